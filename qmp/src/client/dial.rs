//! Reaching a QMP socket: long paths, refused connections, and who is at the other end.

use std::{
    ffi::OsStr,
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags};
use tokio::net::UnixStream;

/// Longest path that fits into `sockaddr_un` with its final zero, in bytes.
pub const MAX_SOCKET_PATH: usize = 107;

/// Connects to a unix socket whose path may be longer than [`MAX_SOCKET_PATH`]: its folder is opened and the socket
/// reached through `/proc/self/fd`.
///
/// # Errors
/// As `connect(2)`.
pub async fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    if path.as_os_str().len() <= MAX_SOCKET_PATH {
        return UnixStream::connect(path).await;
    }
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let folder = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    UnixStream::connect(through(&folder, name)).await
}

fn through(folder: &impl AsRawFd, name: &OsStr) -> PathBuf {
    Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name)
}
