//! Programs that are run to their end. Each has a time limit, after which it is killed with everything that it has started.

use std::io;
use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Why a program has no output.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It was not started.
    #[error("could not run {program}: {reason}")]
    NotRun {
        /// The program.
        program: String,
        /// The kernel's answer.
        reason: io::Error,
    },
    /// It was killed. What it had asked for may happen nevertheless.
    #[error("{program} has not ended within {} s and was killed", .limit.as_secs_f32())]
    TimedOut {
        /// The program.
        program: String,
        /// The time limit.
        limit: Duration,
    },
}

/// Set for adapters: what they run stays in their process group, so that who kills an adapter kills all of it.
pub(crate) const IN_ADAPTER: &str = "VMOVE_IN_ADAPTER";

/// Runs a program to its end and returns its output. `name` stands for it in messages.
///
/// # Errors
/// It cannot be started, or has not ended within `limit`.
pub async fn run(command: &mut Command, name: &str, limit: Duration) -> Result<Output, ProgramError> {
    run_with_input(command, name, limit, b"").await
}

/// As [`run`], with this as its standard input.
///
/// # Errors
/// As [`run`].
pub async fn run_with_input(
    command: &mut Command,
    name: &str,
    limit: Duration,
    input: &[u8],
) -> Result<Output, ProgramError> {
    let not_run = |reason| ProgramError::NotRun { program: name.to_owned(), reason };
    let inside = std::env::var_os(IN_ADAPTER).is_some();
    if !inside {
        // A group of its own, so that what it starts ends with it.
        command.process_group(0);
    }
    let mut child = command
        .stdin(if input.is_empty() { Stdio::null() } else { Stdio::piped() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(inside)
        .spawn()
        .map_err(not_run)?;
    let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    let stdin = child.stdin.take();
    let ended = async {
        let written = async {
            if let Some(mut stdin) = stdin {
                // One that ends before it has read all says why by its output.
                let _ = stdin.write_all(input).await;
            }
        };
        tokio::join!(written, child.wait_with_output()).1
    };
    tokio::pin!(ended);
    if let Ok(output) = tokio::time::timeout(limit, &mut ended).await {
        return output.map_err(not_run);
    }
    if let Some(group) = group.filter(|_| !inside) {
        // Fails if all of them have ended in this moment.
        let _ = kill_process_group(group, Signal::KILL);
    }
    Err(ProgramError::TimedOut { program: name.to_owned(), limit })
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Instant;

    use super::*;

    /// For what must happen at all.
    const DEADLINE: Duration = Duration::from_secs(120);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// Whether a process runs. One that has ended but was not waited for does not.
    fn runs(pid: &str) -> bool {
        let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    }

    #[tokio::test]
    async fn one_that_hangs_is_killed_with_what_it_has_started() {
        let dir = tempfile::tempdir().unwrap();
        let pids = dir.path().join("pids");
        let script = format!("sleep 1000 & echo $$ $! >{}; wait", pids.display());
        let start = Instant::now();
        let error = run(&mut shell(&script), "sh", Duration::from_secs(2)).await.unwrap_err();
        assert!(start.elapsed() < DEADLINE);
        assert_eq!(error.to_string(), "sh has not ended within 2 s and was killed");
        let pids = std::fs::read_to_string(pids).unwrap();
        for pid in pids.split_whitespace() {
            while runs(pid) {
                assert!(start.elapsed() < DEADLINE, "process {pid} of {pids} still runs");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }

    #[tokio::test]
    async fn one_that_ends_has_its_output() {
        let output = run(&mut shell("echo out; echo err >&2; exit 3"), "sh", DEADLINE).await.unwrap();
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(3), &b"out\n"[..]));
        let error = run(&mut Command::new("/nonexistent"), "/nonexistent", DEADLINE).await.unwrap_err();
        assert!(error.to_string().starts_with("could not run /nonexistent: "), "{error}");
    }
}
