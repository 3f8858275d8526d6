//! Control sockets: Unix sockets that only their owner may use.

use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixListener;

/// Why the socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Another process answers there.
    #[error("Another daemon listens on {0}: stop it, or give this one another --control")]
    Taken(PathBuf),
    /// The path is too long, its folder does not exist, or we have no right to it.
    #[error("Could not listen on the control socket {path}: {why}")]
    Io {
        /// The path.
        path: PathBuf,
        /// The kernel's answer.
        why: io::Error,
    },
}

/// A listening Unix socket with mode 0600, removed when dropped.
#[derive(Debug)]
pub struct ControlSocket {
    path: PathBuf,
}

/// Listens on `path`, which only our own user may connect to, at no moment anyone else.
///
/// A socket that a daemon left behind when it was killed is replaced.
///
/// # Errors
/// Another process listens there, or the socket cannot be made: its folder must exist.
pub fn listen(path: &Path) -> Result<(UnixListener, ControlSocket), ControlError> {
    let failed = |why: io::Error| ControlError::Io { path: path.to_owned(), why };
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => return Err(ControlError::Taken(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(failed)?;
        }
        Err(_) => {}
    }
    let listener = bind_private(path).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let listener = UnixListener::from_std(listener).map_err(failed)?;
    Ok((listener, ControlSocket { path: path.to_owned() }))
}

/// The mode is set before the name exists: Linux gives the name the mode of the socket's own inode.
fn bind_private(path: &Path) -> io::Result<StdListener> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(StdListener::from(socket))
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // The next daemon replaces a socket that is left behind.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn only_the_owner_may_connect_and_a_dead_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock");
        let (listener, held) = listen(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(listen(&path), Err(ControlError::Taken(_))));
        drop(listener);
        std::mem::forget(held);
        assert!(path.exists());
        let (_listener, held) = listen(&path).unwrap();
        drop(held);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_path_that_is_too_long_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(listen(&dir.path().join("x".repeat(120))), Err(ControlError::Io { .. })));
    }
}
