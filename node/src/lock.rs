//! One node per state folder, whether it is `vmoved` or inside a program.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::files::no_link;
use rustix::fs::FlockOperation;

/// A process that a killed daemon was just starting holds the lock until it is another program: milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Why the state folder cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error(
        "Another vmoved, or program with a node in it,{holder} uses the state folder {dir}: end it, or give this one a state folder of its own"
    )]
    Taken {
        /// The folder.
        dir: PathBuf,
        /// ` (pid N)`, if it said so.
        holder: String,
    },
    /// It cannot be made or written.
    #[error("Could not use the state folder {dir}")]
    Io {
        /// The folder.
        dir: PathBuf,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
}

/// Held for the life of a node. The kernel frees it with the process, however that ends.
#[derive(Debug)]
pub struct StateLock(#[expect(dead_code, reason = "holds the lock")] File);

impl StateLock {
    /// Takes the folder, which is the node's own.
    ///
    /// # Errors
    /// [`LockError`]. Waits up to two seconds for a holder that has ended.
    pub fn take(dir: &Path) -> Result<Self, LockError> {
        let io = |source| LockError::Io { dir: dir.to_owned(), source };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = no_link(&mut options).open(dir.join("lock")).map_err(io)?;
        let until = Instant::now() + PATIENCE;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(errno) => return Err(io(errno.into())),
            }
            let holder = holder(&mut file);
            let lives = holder.is_none_or(|pid| Path::new("/proc").join(pid.to_string()).exists());
            if lives || Instant::now() >= until {
                let holder = holder.map_or_else(String::new, |pid| format!(" (pid {pid})"));
                return Err(LockError::Taken { dir: dir.to_owned(), holder });
            }
            std::thread::sleep(RETRY_INTERVAL);
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(io)?;
        writeln!(file, "{}", std::process::id()).map_err(io)?;
        Ok(Self(file))
    }
}

/// The process id that the holder has written.
fn holder(file: &mut File) -> Option<u32> {
    let mut pid = String::new();
    file.rewind().and_then(|()| file.read_to_string(&mut pid)).ok()?;
    pid.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process id that no kernel gives.
    const NOBODY: &str = "4194305\n";

    #[test]
    fn what_a_killed_daemon_was_starting_has_the_lock_for_a_moment() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateLock::take(dir.path()).unwrap();
        std::fs::write(dir.path().join("lock"), NOBODY).unwrap();
        let soon = std::thread::spawn(move || {
            std::thread::sleep(PATIENCE / 10);
            drop(first);
        });
        drop(StateLock::take(dir.path()).unwrap());
        soon.join().unwrap();
    }

    #[test]
    fn a_second_holder_is_told_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateLock::take(dir.path()).unwrap();
        let error = StateLock::take(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(first);
        drop(StateLock::take(dir.path()).unwrap());
    }

    #[test]
    fn a_lock_that_is_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join("lock")).unwrap();
        assert!(matches!(StateLock::take(dir.path()), Err(LockError::Io { .. })));
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    }
}
