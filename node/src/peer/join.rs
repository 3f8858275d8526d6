//! Two connections that are one: what comes from either goes to the other.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes that are passed on at once.
const BUFFER: usize = 256 << 10;

/// Passes bytes on, both ways, until one side ends: a reader that asked the other in vain is told by that.
pub async fn join<A, B>(one: A, other: B)
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    join_counted(one, other, &AtomicU64::new(0)).await;
}

/// The same, and counts the bytes, both ways.
pub async fn join_counted<A, B>(one: A, other: B, bytes: &AtomicU64)
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
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
