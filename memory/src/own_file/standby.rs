//! A process that keeps write protection up for a moment if ours ends in the middle of a move.
//!
//! A piece is mapped over by a system call that a thread of the other process makes for us. If we are killed when that thread has been
//! told to go on, and before it made the call, our userfaultfd is closed first: the piece could be written to, and then be replaced by what
//! was copied before. So a second process has the userfaultfd, too. It hears which thread is held, and does nothing else. When our end of
//! the pipe closes, it waits until that thread sleeps again, as it did before it was held, and only then lets protection end.
//!
//! Writes are lost only if both are killed within that moment.

use std::fs;
use std::io::{self, BufRead, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::error::{MemoryError, Result};

/// First argument of a program that is to [`stand_by`].
pub const STAND_BY: &str = "stand-by";
/// Between two looks at the thread.
const LOOK_AGAIN: Duration = Duration::from_micros(500);
/// How long writers wait for a thread that does not come to rest: by far longer than a call takes.
const PATIENCE: Duration = Duration::from_secs(2);

/// The second process.
#[derive(Debug)]
pub struct Standby {
    child: Child,
    /// Tests close it, as the kernel does when we are killed.
    pub(super) tell: Option<ChildStdin>,
}

impl Standby {
    /// Starts `program`, whose first argument is [`STAND_BY`] and which then calls [`stand_by`].
    ///
    /// # Errors
    /// [`MemoryError::System`] if it cannot be started.
    pub(super) fn start(program: &Path, uffd: BorrowedFd<'_>) -> Result<Self> {
        let failed =
            |source| MemoryError::system("Starting the process that keeps write protection up", source);
        let uffd = uffd.as_fd().try_clone_to_owned().map_err(failed)?;
        let mut child = Command::new(program)
            .arg(STAND_BY)
            .env_clear()
            .stdin(Stdio::piped())
            // It is only held, never written to.
            .stdout(uffd)
            .stderr(Stdio::null())
            // Whoever interrupts us by the terminal does not end it.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let tell = child.stdin.take();
        Ok(Self { child, tell })
    }

    /// Before memory is protected: which thread of which process is held.
    ///
    /// # Errors
    /// [`MemoryError::System`] if the second process has ended.
    pub(super) fn holding(&mut self, pid: u32, tid: u32) -> Result<()> {
        let line = format!("{pid} {tid}\n");
        let told = self.tell.as_mut().map_or(Ok(()), |tell| tell.write_all(line.as_bytes()));
        told.map_err(|source| {
            MemoryError::system("Telling the process that keeps write protection up", source)
        })
    }
}

impl Drop for Standby {
    /// Nothing is protected any more: it need not wait for anybody.
    fn drop(&mut self) {
        if let Some(mut tell) = self.tell.take() {
            let _ = tell.write_all(b"done\n");
        }
        let _ = self.child.wait();
    }
}

/// What the second process does; its standard input is our pipe, its standard output the userfaultfd.
#[must_use]
pub fn stand_by() -> ExitCode {
    let mut held = String::new();
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        held = line;
    }
    // We end here, too, when the pipe closes because its owner was killed.
    if let Some((pid, tid)) = held.split_once(' ') {
        let until = Instant::now() + PATIENCE;
        while !is_at_rest(pid, tid) && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
    ExitCode::SUCCESS
}

/// The thread sleeps, or is no more: its call has been made. While it is held it is in a tracing stop (`t`, see proc(5)), then it runs.
fn is_at_rest(pid: &str, tid: &str) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")) else { return true };
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('S' | 'Z' | 'X'))
}
