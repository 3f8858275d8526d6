//! The process at the other end of a connection.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::handshake::Hello;
use crate::error::FabricError;
use crate::sys;
use crate::table::{PeerTable, PeerUser};

/// How long deregistration waits for a peer that does not leave its section. A section lasts for one system call of
/// bounded size, so a peer that takes longer is stopped (by a debugger, a freezer), and has no system call under way.
const STOPPED_PEER_TIMEOUT: Duration = Duration::from_secs(1);

/// A process, its table, and the connection's seat there.
#[derive(Debug)]
pub(super) struct PeerProcess {
    pid: i32,
    /// Tells whether the process is still the one that connected.
    pidfd: OwnedFd,
    table: PeerTable,
    seat: usize,
    token: u64,
    token_at: u64,
}

impl PeerProcess {
    pub(super) fn new(pid: i32, hello: &Hello, table: PeerTable) -> Result<Self, FabricError> {
        let Some(known) = Pid::from_raw(pid) else {
            return Err(FabricError::Unsupported {
                what: "a peer in a PID namespace that this process cannot see",
            });
        };
        let pidfd = pidfd_open(known, PidfdFlags::empty())
            .map_err(|error| FabricError::PeerGone { outstanding: 0, source: error.into() })?;
        let Hello { seat, token, token_at, .. } = *hello;
        Ok(Self { pid, pidfd, table, seat, token, token_at })
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    pub(super) fn table(&self) -> &PeerTable {
        &self.table
    }

    /// Whether the peer still has the connection open. To be asked inside a section.
    pub(super) fn is_open(&self) -> bool {
        self.table.token(self.seat) == self.token
    }

    /// Whether the process has not ended: as long as it has not, its number belongs to nobody else.
    pub(super) fn is_running(&self) -> bool {
        let mut polled = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }

    /// Reads the peer's token out of its memory: shows that this side may read there, and that the process
    /// is the one whose table this is.
    ///
    /// # Errors
    /// [`FabricError::Permission`], [`FabricError::PeerGone`], [`FabricError::Protocol`].
    pub(super) fn probe(&self) -> Result<(), FabricError> {
        match sys::process::read_word(self.pid, self.token_at) {
            Ok(word) if word == self.token => Ok(()),
            Ok(_) => Err(FabricError::protocol("a table of regions that is not the peer's own")),
            Err(error) => Err(self.failed(error, 0)),
        }
    }

    /// What a failed access to the process means.
    pub(super) fn failed(&self, source: io::Error, outstanding: usize) -> FabricError {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::ENOSYS) => FabricError::Permission { pid: self.pid, source },
            Some(libc::ESRCH) => FabricError::PeerGone { outstanding, source },
            Some(libc::EFAULT) => FabricError::protocol("a token that is not in the peer's memory"),
            _ => FabricError::Io { operation: "access the memory of the peer", source },
        }
    }
}

impl PeerUser for PeerProcess {
    fn wait_quiet(&self) {
        let begin = Instant::now();
        let mut stuck = false;
        self.table.wait_quiet(self.seat, || {
            stuck = begin.elapsed() > STOPPED_PEER_TIMEOUT;
            stuck || !self.is_running()
        });
        if stuck {
            tracing::warn!(
                pid = self.pid,
                "a peer has stopped in the middle of a transfer; its memory is deregistered"
            );
        }
    }
}
