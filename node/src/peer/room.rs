//! How much may be under way between two processes of this host.
//!
//! A Unix socket holds what its writer's end says: 208 KiB, unless somebody says otherwise. QEMU writes disks in pieces of 1 MiB, so it would wait in
//! the middle of each until somebody has read, and with it whoever fills its buffers.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt::{
    set_socket_send_buffer_size, set_socket_send_buffer_size_force, socket_send_buffer_size,
};
use rustix::net::{SocketAddrAny, getpeername, getsockname};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use tokio::net::UnixStream;

/// The kernel takes twice that (socket(7), `SO_SNDBUF`): four of QEMU's largest requests. Unit: bytes.
const UNDER_WAY: usize = 2 << 20;

/// Lets more of what is written to this socket be under way.
pub(super) fn enlarge(socket: impl AsFd) {
    // Twice that.
    if socket_send_buffer_size(&socket).is_ok_and(|size| size >= 2 * UNDER_WAY) {
        return;
    }
    // The administrator's limit (`net.core.wmem_max`) holds for those who may not exceed it.
    if set_socket_send_buffer_size_force(&socket, UNDER_WAY).is_err() {
        let _ = set_socket_send_buffer_size(&socket, UNDER_WAY);
    }
}

/// The same for what the process at the other end writes, which has connected to a socket that is named, and that nobody else has connected to.
/// Needs what `ptrace` needs (ptrace(2), `PTRACE_MODE_ATTACH_REALCREDS`).
///
/// # Errors
/// The process may not be looked into, or its end of the connection is not there. Then it waits for its reader more often.
pub fn enlarge_far_end(accepted: &UnixStream) -> io::Result<()> {
    let process = accepted.peer_cred()?.pid().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    let ends = connected_to(process, &getsockname(accepted)?)?;
    ends.iter().for_each(enlarge);
    Ok(())
}

/// A process's connections to this address: ours, and those that an earlier copy has left there.
fn connected_to(process: Pid, address: &SocketAddrAny) -> io::Result<Vec<OwnedFd>> {
    let pidfd = pidfd_open(process, PidfdFlags::empty())?;
    let (mut found, mut error) = (Vec::new(), io::Error::from(io::ErrorKind::NotFound));
    for entry in std::fs::read_dir(format!("/proc/{process}/fd"))? {
        let entry = entry?;
        let is_socket =
            std::fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"));
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if !is_socket {
            continue;
        }
        match pidfd_getfd(pidfd.as_fd(), number, PidfdGetfdFlags::empty()) {
            Ok(fd) if getpeername(&fd).is_ok_and(|peer| peer.as_ref() == Some(address)) => found.push(fd),
            Ok(_) => {}
            // It was closed meanwhile.
            Err(Errno::BADF) => {}
            Err(why) => error = why.into(),
        }
    }
    if found.is_empty() { Err(error) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn the_end_of_the_one_who_connected_gets_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("here");
        let listener = UnixListener::bind(&path).unwrap();
        let (other, other_end) = UnixStream::pair().unwrap();
        let (near, far) = tokio::join!(listener.accept(), UnixStream::connect(&path));
        let (near, far) = (near.unwrap().0, far.unwrap());
        let room = |of: &UnixStream| socket_send_buffer_size(of).unwrap();
        let before = room(&other);
        enlarge_far_end(&near).unwrap();
        assert!(room(&far) > before, "{} and {before}", room(&far));
        assert_eq!((room(&near), room(&other), room(&other_end)), (before, before, before));
    }

    #[tokio::test]
    async fn an_end_that_is_closed_is_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("here");
        let listener = UnixListener::bind(&path).unwrap();
        let (near, far) = tokio::join!(listener.accept(), UnixStream::connect(&path));
        drop(far.unwrap());
        assert_eq!(enlarge_far_end(&near.unwrap().0).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
