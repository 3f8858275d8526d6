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

    /// Whether it has ended or is ending: it was killed, or gives its memory back, which may take seconds where that is much. It may still be
    /// [`alive`](Self::alive) then, and never runs again.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        let stat = fs::read(self.path("stat"));
        // Asked second: what was read was its own.
        !self.alive() || stat.is_ok_and(|stat| says_ending(&stat))
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

/// Field 22 of `/proc/PID/stat`.
fn parse_start_time(stat: &[u8]) -> Option<u64> {
    field(stat, 22)?.parse().ok()
}

/// Whether the main thread has ended or is ending (fields 3 and 9), or SIGKILL is on its way to it (field 31).
fn says_ending(stat: &[u8]) -> bool {
    /// `PF_EXITING` of the kernel.
    const EXITING: u64 = 1 << 2;
    const KILLED: u64 = 1 << (libc::SIGKILL - 1);
    let has =
        |number, bit| field(stat, number).and_then(|f| f.parse::<u64>().ok()).is_some_and(|f| f & bit != 0);
    matches!(field(stat, 3), Some("Z" | "X")) || has(9, EXITING) || has(31, KILLED)
}

/// A field of `/proc/PID/stat`, or of a thread's, by its number in proc(5), at least 3. Field 2 is the command in parentheses and may itself hold spaces and
/// parentheses.
pub(crate) fn field(stat: &[u8], number: usize) -> Option<&str> {
    let after_name = stat.iter().rposition(|&b| b == b')')? + 1;
    let rest = std::str::from_utf8(&stat[after_name..]).ok()?;
    rest.split_ascii_whitespace().nth(number - 3)
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
    fn the_end_of_a_process_shows_in_its_main_thread() {
        let stat = |state: &str, flags: u32, signals: u32| {
            let text = format!(
                "42 (x) {state} 1 1 1 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0 0 0 0 0 0 0 {signals} 0"
            );
            says_ending(text.as_bytes())
        };
        assert!(!stat("S", 0x0040_0000, 0x4000));
        assert!(!stat("T", 0, 0x0004_0000));
        assert!(stat("Z", 0, 0));
        assert!(stat("R", 0x0040_0004, 0));
        assert!(stat("R", 0, 0x0100));
    }

    /// As it is for seconds where a killed process gives back much memory: the kernel does not say yet that it has ended.
    #[test]
    fn a_process_that_is_ending_is_told_from_one_that_runs() {
        // Ends its main thread, and no other.
        let ends = format!(
            "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(100,)).start(); ctypes.CDLL(None).syscall({}, 0)",
            libc::SYS_exit
        );
        let child = std::process::Command::new("python3").args(["-c", &ends]).spawn();
        let mut child = vmove_skip::need!(child);
        let process = Process::open(child.id()).expect("it runs");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !process.is_ending() {
            assert!(std::time::Instant::now() < deadline, "it never ends");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(process.alive(), "it ended at once");
        child.kill().expect("kill");
        child.wait().expect("wait");
        assert!(process.is_ending());
        assert!(!Process::open(std::process::id()).expect("ourselves").is_ending());
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
