//! Bytes go from one socket to another without being copied: the kernel hands over the pages that hold them, through a pipe (splice(2)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::{Errno, read, retry_on_intr};
use rustix::net::{SendFlags, send};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};

use super::link::{BoxedStream, Stream};
use super::room;

/// What a pipe holds, in pages of a machine that has them of 4 KiB: 128.
const PIPE_BYTES: usize = 512 << 10;

/// A socket whose bytes go over the wire as they are.
#[derive(Debug, Clone, Copy)]
pub(super) enum Plain<'a> {
    Tcp(&'a TcpStream),
    Unix(&'a UnixStream),
}

impl<'a> Plain<'a> {
    /// Nothing for a stream that encrypts.
    pub(super) fn of<S: Stream>(stream: &'a S) -> Option<Self> {
        let any = stream.as_any();
        match any.downcast_ref::<BoxedStream>() {
            Some(boxed) => Self::among((**boxed).as_any()),
            None => Self::among(any),
        }
    }

    fn among(any: &'a dyn std::any::Any) -> Option<Self> {
        let tcp = any.downcast_ref().map(Self::Tcp);
        tcp.or_else(|| any.downcast_ref().map(Self::Unix))
    }

    /// Lets more be under way to whoever reads from it. Sockets to other hosts are sized by TCP itself.
    pub(super) fn enlarge(self) {
        if let Self::Unix(socket) = self {
            room::enlarge(socket);
        }
    }

    /// Does something that would block until the socket is ready for it, when it is.
    async fn when(
        self,
        interest: Interest,
        mut what: impl FnMut(BorrowedFd<'_>) -> io::Result<usize>,
    ) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.async_io(interest, || what(socket.as_fd())).await,
            Self::Unix(socket) => socket.async_io(interest, || what(socket.as_fd())).await,
        }
    }
}

/// A pipe between two sockets.
#[derive(Debug)]
pub(super) struct Pipe {
    out: OwnedFd,
    into: OwnedFd,
}

impl Pipe {
    /// Fails where this user has too many pipes: those that the kernel still gives are too small to be of use.
    pub(super) fn new() -> io::Result<Self> {
        let (out, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        fcntl_setpipe_size(&into, PIPE_BYTES)?;
        Ok(Self { out, into })
    }

    /// Passes bytes on until `from` ends. They are counted when they are on their way.
    pub(super) async fn pump(&self, from: Plain<'_>, to: Plain<'_>, bytes: &AtomicU64) -> io::Result<()> {
        let mut left = 0;
        match self.hand_over(from, to, &mut left, bytes).await {
            Err(error) if is_refused(&error) => self.copy(from, to, left, bytes).await,
            other => other,
        }
    }

    /// Without a copy. `left`: bytes that are in the pipe when it ends.
    async fn hand_over(
        &self,
        from: Plain<'_>,
        to: Plain<'_>,
        left: &mut usize,
        bytes: &AtomicU64,
    ) -> io::Result<()> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        loop {
            // The pipe is empty: it is the socket that has nothing when this would block.
            let read = from.when(Interest::READABLE, |socket| {
                Ok(retry_on_intr(|| splice(socket, None, &self.into, None, PIPE_BYTES, flags))?)
            });
            *left = read.await?;
            if *left == 0 {
                return Ok(());
            }
            while *left > 0 {
                let sent = to.when(Interest::WRITABLE, |socket| {
                    Ok(retry_on_intr(|| splice(&self.out, None, socket, None, *left, flags))?)
                });
                *left -= counted(sent.await?, bytes)?;
            }
        }
    }

    /// Where the kernel hands nothing over: what is in the pipe first, and then what comes.
    async fn copy(
        &self,
        from: Plain<'_>,
        to: Plain<'_>,
        mut left: usize,
        bytes: &AtomicU64,
    ) -> io::Result<()> {
        let mut buffer = vec![0; PIPE_BYTES];
        loop {
            let mut read = if left > 0 {
                retry_on_intr(|| read(&self.out, &mut buffer[..]))?
            } else {
                let read = from
                    .when(Interest::READABLE, |socket| Ok(retry_on_intr(|| read(socket, &mut buffer[..]))?));
                read.await?
            };
            if read == 0 {
                return Ok(());
            }
            left = left.saturating_sub(read);
            let mut at = 0;
            while read > 0 {
                let part = &buffer[at..at + read];
                let sent = to.when(Interest::WRITABLE, |socket| {
                    Ok(retry_on_intr(|| send(socket, part, SendFlags::NOSIGNAL))?)
                });
                let sent = counted(sent.await?, bytes)?;
                (at, read) = (at + sent, read - sent);
            }
        }
    }
}

/// The kernel, or somebody between us and it, has no splice for these: a filter of system calls, a kernel that is none of Linux.
fn is_refused(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw_os_error);
    code.is_some_and(|code| [Errno::INVAL, Errno::PERM, Errno::NOSYS, Errno::IO].contains(&code))
}

fn counted(sent: usize, bytes: &AtomicU64) -> io::Result<usize> {
    if sent == 0 {
        return Err(io::ErrorKind::WriteZero.into());
    }
    bytes.fetch_add(sent as u64, Ordering::Relaxed);
    Ok(sent)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn what_is_in_the_pipe_comes_first_where_the_kernel_hands_nothing_over() {
        let ((mut client, here), (there, mut server)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let (pipe, bytes) = (Pipe::new().unwrap(), AtomicU64::new(0));
        rustix::io::write(&pipe.into, b"first ").unwrap();
        client.write_all(b"second").await.unwrap();
        drop(client);
        pipe.copy(Plain::Unix(&here), Plain::Unix(&there), 6, &bytes).await.unwrap();
        drop(there);
        let mut got = String::new();
        server.read_to_string(&mut got).await.unwrap();
        assert_eq!((got.as_str(), bytes.into_inner()), ("first second", 12));
        assert!(is_refused(&io::Error::from(Errno::INVAL)) && !is_refused(&io::Error::from(Errno::PIPE)));
    }

    /// Each small write takes a slot of the pipe, of which there are fewer than bytes.
    #[tokio::test]
    async fn many_small_writes_arrive_though_nobody_reads_for_a_while() {
        const WRITES: usize = 2000;
        let ((mut client, here), (there, mut server)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let pump = tokio::spawn(async move {
            let pipe = Pipe::new().unwrap();
            pipe.pump(Plain::Unix(&here), Plain::Unix(&there), &AtomicU64::new(0)).await
        });
        let writer = tokio::spawn(async move {
            for at in 0..WRITES {
                client.write_all(&at.to_le_bytes()).await.unwrap();
            }
        });
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        let mut got = Vec::new();
        server.read_to_end(&mut got).await.unwrap();
        let sent: Vec<u8> = (0..WRITES).flat_map(usize::to_le_bytes).collect();
        assert!(got == sent, "{} bytes of {}", got.len(), sent.len());
        writer.await.unwrap();
        pump.await.unwrap().unwrap();
    }
}
