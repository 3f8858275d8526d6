//! How ready the kernel is to end a program that we start, when memory runs out.
//!
//! The unit of the daemon protects it (`OOMScoreAdjust=-900`). Children inherit that, and a QEMU with the daemon's protection
//! would be the last to go although it holds nearly all memory: something else would be ended in its place.
//!
//! A QEMU may also have a control group of its own, which it enters before it takes any memory.

use std::{ffi::OsStr, path::Path, process::Command};

/// Gives itself the value and enters the group, each if it is not empty, then becomes the program: the process id stays, and nothing that
/// the program starts is born with ours. Where that is not allowed, the program runs as we do; of the group it is told.
const RESET: &str = r#"[ -z "$0" ] || { echo "$0" > /proc/self/oom_score_adj; } 2>/dev/null
[ -z "$1" ] || echo 0 > "$1/cgroup.procs"
shift
exec "$@""#;

/// A command for `program`, whose process has the `oom_score_adj` that our parent has: what it would have without us, 0 under systemd.
///
/// Where ours is the same, it is the plain command. Otherwise a shell comes first, which becomes the program; a program that does
/// not exist then ends with code 127 instead of an error of `spawn`.
#[must_use]
pub fn command(program: impl AsRef<OsStr>) -> Command {
    command_in(program, None)
}

/// The same, in a control group (a folder of cgroup 2), if one is given.
#[must_use]
pub fn command_in(program: impl AsRef<OsStr>, group: Option<&Path>) -> Command {
    let usual = match (score("self"), parent().and_then(|parent| score(&parent))) {
        (Some(ours), Some(usual)) if ours != usual => usual.to_string(),
        _ if group.is_none() => return Command::new(program),
        _ => String::new(),
    };
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(RESET).arg(usual).arg(group.unwrap_or(Path::new(""))).arg(program);
    command
}

/// Process id of our parent; none where it is in another pid namespace.
fn parent() -> Option<String> {
    rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string())
}

/// Of a process, -1000 to 1000.
fn score(process: &str) -> Option<i32> {
    std::fs::read_to_string(format!("/proc/{process}/oom_score_adj")).ok()?.trim().parse().ok()
}
