//! The device-state stream between QEMU and whoever carries it to the other host.

use std::{
    io,
    os::fd::OwnedFd,
    path::Path,
    pin::Pin,
    task::{Context, Poll},
};
use vmove_types::time::Mono;

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{UnixListener, UnixStream},
};

use super::SwitchoverError;

/// Our end of the source's stream. QEMU's end goes to it by [`super::Outbound::Fd`]: a socket pair needs no path, no
/// length limit, no cleaning up, and no connect on the way.
#[derive(Debug)]
pub struct StateReceiver(UnixStream);

/// Our end of the destination's stream.
#[derive(Debug)]
pub struct StateSender(UnixStream);

fn pair() -> Result<(UnixStream, OwnedFd), SwitchoverError> {
    let make = || {
        // QEMU decides itself whether its end blocks; ours never does.
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok((UnixStream::from_std(ours)?, OwnedFd::from(theirs)))
    };
    make().map_err(|source| SwitchoverError::Stream { what: "could not make a socket pair", source })
}

impl StateReceiver {
    /// A stream and the end that belongs to the source QEMU.
    ///
    /// # Errors
    /// [`SwitchoverError::Stream`] when the process has no descriptors left.
    pub fn pair() -> Result<(Self, OwnedFd), SwitchoverError> {
        pair().map(|(ours, theirs)| (Self(ours), theirs))
    }

    /// Waits for a source QEMU that was told `unix:PATH`. `listener` must be bound before `migrate` is sent.
    ///
    /// # Errors
    /// [`SwitchoverError::Stream`].
    pub async fn accept(listener: &UnixListener) -> Result<Self, SwitchoverError> {
        let accepted = listener.accept().await;
        accepted
            .map(|(stream, _)| Self(stream))
            .map_err(|source| SwitchoverError::Stream { what: "could not accept QEMU's connection", source })
    }
}

impl StateSender {
    /// A stream and the end that belongs to the destination QEMU.
    ///
    /// # Errors
    /// [`SwitchoverError::Stream`] when the process has no descriptors left.
    pub fn pair() -> Result<(Self, OwnedFd), SwitchoverError> {
        pair().map(|(ours, theirs)| (Self(ours), theirs))
    }

    /// Connects to a destination QEMU that was told `unix:PATH`.
    ///
    /// # Errors
    /// [`SwitchoverError::Stream`].
    pub async fn connect(path: &Path) -> Result<Self, SwitchoverError> {
        let connected = crate::client::connect_unix(path).await;
        connected.map(Self).map_err(|source| SwitchoverError::Stream {
            what: "could not connect to QEMU's -incoming socket",
            source,
        })
    }
}

impl AsyncRead for StateReceiver {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for StateSender {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// What went through a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayStats {
    /// Bytes of device state, without any framing.
    pub bytes: u64,
    /// When the first bytes were read; `None` if there were none.
    pub first: Option<Mono>,
    /// When the last bytes had been written.
    pub last: Option<Mono>,
}

/// Carries everything from `from` to `to` as it comes, then shuts `to` down.
///
/// # Errors
/// The I/O error of either side. The destination QEMU then sees the end of its stream in mid-state and fails the load.
pub async fn relay(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<RelayStats> {
    let mut stats = RelayStats { bytes: 0, first: None, last: None };
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            to.shutdown().await?;
            return Ok(stats);
        }
        stats.first.get_or_insert_with(Mono::now);
        to.write_all(&buffer[..count]).await?;
        to.flush().await?;
        stats.last = Some(Mono::now());
        stats.bytes += u64::try_from(count).unwrap_or(u64::MAX);
    }
}
