//! How ready the kernel is to end a program that we start, when memory runs out.
//!
//! The unit of the daemon protects it (`OOMScoreAdjust=-900`). Children inherit that, and a QEMU with the daemon's protection
//! would be the last to go although it holds nearly all memory: something else would be ended in its place.

use std::{ffi::OsStr, process::Command};

/// Gives itself the value, then becomes the program: the process id stays, and nothing that the program starts is born with ours.
/// Where the value may not be written, the program runs with ours.
const RESET: &str = r#"{ echo "$0" > /proc/self/oom_score_adj; } 2>/dev/null; exec "$@""#;

/// A command for `program`, whose process has the `oom_score_adj` that our parent has: what it would have without us, 0 under systemd.
///
/// Where ours is the same, it is the plain command. Otherwise a shell comes first, which becomes the program; a program that does
/// not exist then ends with code 127 instead of an error of `spawn`.
#[must_use]
pub fn command(program: impl AsRef<OsStr>) -> Command {
    match (score("self"), parent().and_then(|parent| score(&parent))) {
        (Some(ours), Some(usual)) if ours != usual => {
            let mut command = Command::new("/bin/sh");
            command.arg("-c").arg(RESET).arg(usual.to_string()).arg(program);
            command
        }
        _ => Command::new(program),
    }
}

/// Process id of our parent; none where it is in another pid namespace.
fn parent() -> Option<String> {
    rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string())
}

/// Of a process, -1000 to 1000.
fn score(process: &str) -> Option<i32> {
    std::fs::read_to_string(format!("/proc/{process}/oom_score_adj")).ok()?.trim().parse().ok()
}
