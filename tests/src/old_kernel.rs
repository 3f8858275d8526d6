//! An older kernel than the one that runs: requests that it does not know fail as they would there.
//!
//! A filter in front of system calls (seccomp) is inherited by every process that is started under it, so the daemon and
//! its QEMUs all see the same kernel.

use std::collections::BTreeMap;
use std::process::{Child, Command};

use anyhow::{Context, Result, anyhow};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// `PAGEMAP_SCAN`, which came with Linux 6.7.
const PAGEMAP_SCAN: u64 = 0xc060_6610;

/// A filter under which `ioctl(PAGEMAP_SCAN)` fails as it does before Linux 6.7.
fn before_6_7() -> Result<BpfProgram> {
    let request = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, PAGEMAP_SCAN)?;
    let rules = BTreeMap::from([(libc::SYS_ioctl, vec![SeccompRule::new(vec![request])?])]);
    let refused = SeccompAction::Errno(libc::ENOTTY.unsigned_abs());
    let filter =
        SeccompFilter::new(rules, SeccompAction::Allow, refused, std::env::consts::ARCH.try_into()?)?;
    Ok(filter.try_into()?)
}

/// Fails where filters are not possible.
///
/// # Errors
/// Why not.
pub fn possible() -> Result<()> {
    spawn_before_6_7(Command::new("true"))?.wait().map(drop).map_err(Into::into)
}

/// Starts `command` as if the kernel were older than Linux 6.7.
///
/// # Errors
/// When filters are not possible here, or the program cannot be started.
pub fn spawn_before_6_7(mut command: Command) -> Result<Child> {
    let filter = before_6_7()?;
    // A filter holds for the thread that asks for it and for what that starts, for ever: so a thread of its own.
    let child = std::thread::spawn(move || -> Result<Child> {
        seccompiler::apply_filter(&filter).context("no seccomp filter is possible here")?;
        Ok(command.spawn()?)
    });
    child.join().map_err(|_| anyhow!("the starting thread panicked"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_started_program_sees_the_older_kernel() {
        let filters = |of: &str| {
            let status = std::fs::read_to_string(of).expect("a status");
            status.lines().find(|line| line.starts_with("Seccomp:")).map(str::to_owned)
        };
        let before = filters("/proc/thread-self/status");
        let mut command = Command::new("grep");
        command.args(["-q", "^Seccomp:.*2", "/proc/self/status"]);
        crate::need!(possible());
        let mut child = spawn_before_6_7(command).expect("it starts");
        assert!(child.wait().expect("it ends").success(), "it runs without a filter");
        assert_eq!(filters("/proc/thread-self/status"), before, "we are filtered");
    }
}
