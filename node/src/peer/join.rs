//! Two connections that are one: what comes from either goes to the other.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::link::Stream;
use super::splice::{Pipe, Plain};

/// Bytes that are passed on at once.
const BUFFER: usize = 256 << 10;

/// Passes bytes on, both ways, until one side ends: a reader that asked the other in vain is told by that. Sockets without encryption are joined by
/// the kernel, which copies nothing.
pub async fn join(one: impl Stream, other: impl Stream) {
    join_counted(one, other, &AtomicU64::new(0)).await;
}

/// The same, and counts the bytes, both ways.
pub async fn join_counted(one: impl Stream, other: impl Stream, bytes: &AtomicU64) {
    let plain = [Plain::of(&one), Plain::of(&other)];
    plain.into_iter().flatten().for_each(Plain::enlarge);
    if let [Some(one), Some(other)] = plain
        && let (Ok(there), Ok(back)) = (Pipe::new(), Pipe::new())
    {
        tokio::select! {
            _ = there.pump(one, other, bytes) => {}
            _ = back.pump(other, one, bytes) => {}
        }
        return;
    }
    let ((one_in, one_out), (other_in, other_out)) = (tokio::io::split(one), tokio::io::split(other));
    tokio::select! {
        _ = pump(one_in, other_out, bytes) => {}
        _ = pump(other_in, one_out, bytes) => {}
    }
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    bytes: &AtomicU64,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..read]).await?;
        to.flush().await?;
        bytes.fetch_add(read as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::{TcpListener, TcpStream, UnixStream};

    use super::*;
    use crate::peer::BoxedStream;

    async fn tcp() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        let (one, other) = tokio::join!(TcpStream::connect(at), listener.accept());
        (one.unwrap(), other.unwrap().0)
    }

    /// Sends some MiB over a socket, a wire and a socket, and an answer back, in pieces that fit nothing. How many bytes were counted.
    async fn through(near: BoxedStream, far: BoxedStream) -> u64 {
        const BYTES: usize = (5 << 20) + 3;
        let content: Vec<u8> = (0..BYTES).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
        let ((mut client, here), (there, mut server)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let counted = std::sync::Arc::new(AtomicU64::new(0));
        let count = std::sync::Arc::clone(&counted);
        let joins = [
            tokio::spawn(async move { join_counted(here, near, &count).await }),
            tokio::spawn(async move { join(far, there).await }),
        ];
        let sent = content.clone();
        let client = tokio::spawn(async move {
            for piece in sent.chunks(70_001) {
                client.write_all(piece).await.unwrap();
            }
            let mut answer = [0; 3];
            client.read_exact(&mut answer).await.unwrap();
            assert_eq!(answer, [1, 2, 3]);
        });
        let mut got = vec![0; BYTES];
        server.read_exact(&mut got).await.unwrap();
        assert!(got == content, "what comes is what was sent");
        server.write_all(&[1, 2, 3]).await.unwrap();
        client.await.unwrap();
        // One side has ended, and the other hears of it.
        let end = tokio::time::timeout(Duration::from_secs(10), server.read(&mut got)).await;
        assert_eq!(end.expect("it ends").unwrap(), 0);
        for join in joins {
            join.await.unwrap();
        }
        counted.load(Ordering::Relaxed)
    }

    #[tokio::test]
    async fn all_bytes_arrive_in_order_by_pages_and_by_copies() {
        let (near, far) = tcp().await;
        assert!(Plain::of(&near).is_some());
        let boxed: (BoxedStream, BoxedStream) = (Box::new(near), Box::new(far));
        assert!(Plain::of(&boxed.0).is_some(), "also in a box");
        assert_eq!(through(boxed.0, boxed.1).await, (5 << 20) + 6);
        // As streams that encrypt.
        let (near, far) = tokio::io::duplex(64 << 10);
        assert!(Plain::of(&near).is_none());
        assert_eq!(through(Box::new(near), Box::new(far)).await, (5 << 20) + 6);
    }
}
