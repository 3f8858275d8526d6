//! Whether the kernel has killed a process for lack of memory. The process cannot tell, and its exit status only says SIGKILL.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;

/// Microseconds of a clock tick in `/proc` on this architecture.
const TICK_US: u64 = 10_000;
/// Bytes of the longest line of the kernel's log, with what it says of itself.
const LINE: usize = 8 << 10;

/// Whether the kernel's log says that it killed process `pid`, which was started at `started` (clock ticks since boot), for lack of memory.
/// False if the log cannot be read, or has lost the line by now. Also false if the host was suspended before:
/// the clock of the log stands still meanwhile. May take some milliseconds.
#[must_use]
pub fn was_killed(pid: i32, started: u64) -> bool {
    let log = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open("/dev/kmsg");
    let Ok(mut log) = log else { return false };
    let started_us = started.saturating_mul(TICK_US);
    let mut line = [0; LINE];
    loop {
        match log.read(&mut line) {
            Ok(0) => return false,
            Ok(length) if is_kill(&String::from_utf8_lossy(&line[..length]), pid, started_us) => return true,
            // Lines were lost in between, or this one is longer than any that is looked for.
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted) => {}
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {}
            Err(_) => return false,
        }
    }
}

/// A line of `/dev/kmsg`: `PRIORITY,NUMBER,MICROSECONDS,FLAGS;TEXT`.
fn is_kill(line: &str, pid: i32, started_us: u64) -> bool {
    let Some((head, text)) = line.split_once(';') else { return false };
    let at: Option<u64> = head.split(',').nth(2).and_then(|at| at.parse().ok());
    // "Out of memory: Killed process 7 (qemu-system-x86) …", "Memory cgroup out of memory: Killed process 7 …"
    at.is_some_and(|at| at >= started_us)
        && text.to_ascii_lowercase().contains("out of memory")
        && text.contains(&format!("illed process {pid} ("))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_understood() {
        let line = "3,1203,9000000,-;Memory cgroup out of memory: Killed process 77 (qemu-system-x86) total-vm:9kB, anon-rss:1kB\n";
        assert!(is_kill(line, 77, 9_000_000));
        assert!(is_kill("6,1,9,-;Out of memory: Killed process 77 (qemu)", 77, 0));
        assert!(!is_kill(line, 7, 0), "another process");
        assert!(!is_kill(line, 77, 9_000_001), "an earlier process of this id");
        assert!(!is_kill("6,1,9,-;audit: Killed process 77 (qemu)", 77, 0), "for another reason");
    }

    #[test]
    fn a_process_that_nobody_killed_is_not_found() {
        assert!(!was_killed(std::process::id() as i32, 0));
    }
}
