//! A process, named so that a reused pid is never mistaken for it.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::error::{MemoryError, Result};
use crate::maps::{MapEntry, parse_maps};

/// A running process, held by a pidfd.
///
/// The pidfd names this very process for as long as the value lives. Paths under `/proc/PID` are only names; each
/// read of them is followed by a check that the process still lives, so what was read was its own.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
    start_time: u64,
}

impl Process {
    /// Opens the process with this pid.
    ///
    /// # Errors
    /// [`MemoryError::ProcessGone`] if there is none.
    pub fn open(pid: u32) -> Result<Self> {
        let gone = MemoryError::ProcessGone { pid };
        let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Err(gone) };
        let pidfd = match pidfd_open(raw, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(Errno::SRCH | Errno::INVAL) => return Err(gone),
            Err(source) => return Err(MemoryError::system("pidfd_open", source)),
        };
        let mut process = Self { pid, pidfd, start_time: 0 };
        process.start_time = process.read_start_time()?;
        Ok(process)
    }

    /// Opens the process that had this pid and start time, as recorded by an earlier run of the program.
    ///
    /// # Errors
    /// [`MemoryError::ProcessGone`] if it ended, even if another process has its pid now.
    pub fn reopen(pid: u32, start_time: u64) -> Result<Self> {
        let process = Self::open(pid)?;
        if process.start_time == start_time { Ok(process) } else { Err(MemoryError::ProcessGone { pid }) }
    }

    /// Its pid in our pid namespace.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// When it was started, in clock ticks since boot (field 22 of `/proc/PID/stat`). With the pid it names a
    /// process uniquely until the next boot.
    #[must_use]
    pub const fn start_time(&self) -> u64 {
        self.start_time
    }

    /// Its pidfd, readable once the process has ended.
    #[must_use]
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// False once it has ended, also while it is a zombie.
    #[must_use]
    pub fn alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut fds, Some(&now)) {
                Ok(ready) => return ready == 0,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Kills it, also where its threads wait for pages that nobody serves. That it has ended already is fine.
    ///
    /// # Errors
    /// [`MemoryError::System`] without the right to.
    pub fn kill(&self) -> Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(source) => Err(MemoryError::system("pidfd_send_signal", source)),
        }
    }

    /// Its memory mappings, in address order.
    ///
    /// # Errors
    /// [`MemoryError::ProcessGone`], or [`MemoryError::Proc`] if permission is missing.
    pub fn maps(&self) -> Result<Vec<MapEntry>> {
        let text = self.read("maps")?;
        parse_maps(&text).map_err(|source| MemoryError::Proc { path: self.path("maps"), source })
    }

    /// False once it has given up its memory: it has ended, or is ending, which may take seconds where much memory is given back. Such a
    /// process is still [`alive`](Self::alive), and never runs again.
    #[must_use]
    pub fn has_memory(&self) -> bool {
        match fs::read(self.path("maps")) {
            Ok(maps) => !maps.is_empty() && self.alive(),
            // Of a process without memory the kernel says either.
            Err(source) => source.raw_os_error() != Some(libc::ESRCH) && self.alive(),
        }
    }

    /// `/proc/PID/NAME`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.pid))
    }

    /// The text of `/proc/PID/NAME`, certainly of this process.
    pub(crate) fn read(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.path(name);
        match fs::read(&path) {
            Ok(text) if self.alive() => Ok(text),
            Err(source) if self.alive() => Err(MemoryError::Proc { path, source }),
            _ => Err(MemoryError::ProcessGone { pid: self.pid }),
        }
    }

    fn read_start_time(&self) -> Result<u64> {
        let text = self.read("stat")?;
        parse_start_time(&text).ok_or_else(|| MemoryError::Proc {
            path: self.path("stat"),
            source: io::Error::new(io::ErrorKind::InvalidData, "expected a number in field 22"),
        })
    }
}

/// Field 22 of `/proc/PID/stat`. Field 2 is the command in parentheses and may itself hold spaces and parentheses.
fn parse_start_time(stat: &[u8]) -> Option<u64> {
    let after_name = stat.iter().rposition(|&b| b == b')')? + 1;
    let rest = std::str::from_utf8(&stat[after_name..]).ok()?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_is_found_behind_a_hostile_name() {
        let stat = b"42 (a) b (c) ) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 777 20 21";
        assert_eq!(parse_start_time(stat), Some(777));
        assert_eq!(parse_start_time(b"42 (x) S 1"), None);
    }

    #[test]
    fn we_are_alive_and_reopen_checks_the_start_time() {
        let us = Process::open(std::process::id()).expect("ourselves");
        assert!(us.alive());
        assert!(!us.maps().expect("our maps").is_empty());
        Process::reopen(us.pid(), us.start_time()).expect("same process");
        let other = Process::reopen(us.pid(), us.start_time() + 1);
        assert!(matches!(other, Err(MemoryError::ProcessGone { .. })));
    }

    #[test]
    fn an_ended_process_is_gone() {
        let mut child = std::process::Command::new("true").spawn().expect("spawn true");
        let process = Process::open(child.id());
        child.wait().expect("wait");
        if let Ok(process) = process {
            assert!(!process.alive());
            assert!(matches!(process.maps(), Err(MemoryError::ProcessGone { .. })));
        }
        assert!(matches!(Process::open(child.id()), Err(MemoryError::ProcessGone { .. })));
        assert!(matches!(Process::open(0), Err(MemoryError::ProcessGone { .. })));
    }
}
