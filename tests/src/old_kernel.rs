//! Simulates an older kernel: requests that the older kernel does not know fail as they would there.
//!
//! A seccomp filter is inherited by every process that is started under it, so the daemon and its QEMUs see the same kernel.

use std::collections::BTreeMap;
use std::process::{Child, Command};

use anyhow::{Context, Result, anyhow};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// `PAGEMAP_SCAN`, which came with Linux 6.7.
const PAGEMAP_SCAN: u64 = 0xc060_6610;

/// `MADV_DONTNEED_LOCKED`, which came with Linux 5.18.
const MADV_DONTNEED_LOCKED: u64 = 24;

/// The requests that the simulated kernel does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// `ioctl(PAGEMAP_SCAN)` fails as it does before Linux 6.7.
    V6_7,
    /// `madvise(MADV_DONTNEED_LOCKED)` fails as it does before Linux 5.18.
    V5_18,
}

/// The filter for this kernel.
fn filter(kernel: Before) -> Result<BpfProgram> {
    let (call, argument, request, errno) = match kernel {
        Before::V6_7 => (libc::SYS_ioctl, 1, PAGEMAP_SCAN, libc::ENOTTY),
        Before::V5_18 => (libc::SYS_madvise, 2, MADV_DONTNEED_LOCKED, libc::EINVAL),
    };
    let request = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, request)?;
    let rules = BTreeMap::from([(call, vec![SeccompRule::new(vec![request])?])]);
    let refused = SeccompAction::Errno(errno.unsigned_abs());
    let filter =
        SeccompFilter::new(rules, SeccompAction::Allow, refused, std::env::consts::ARCH.try_into()?)?;
    Ok(filter.try_into()?)
}

/// Checks that filters are possible here.
///
/// # Errors
/// Why they are not.
pub fn possible() -> Result<()> {
    spawn_before(Before::V6_7, Command::new("true"))?.wait().map(drop).map_err(Into::into)
}

/// Starts `command` under the filter.
///
/// # Errors
/// When filters are not possible here, or the program cannot be started.
pub fn spawn_before(kernel: Before, mut command: Command) -> Result<Child> {
    let filter = filter(kernel)?;
    // A filter applies to its thread and to everything that this thread starts, and cannot be removed. Hence a separate thread.
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
        vmove_skip::need!(possible());
        let mut child = spawn_before(Before::V6_7, command).expect("it starts");
        assert!(child.wait().expect("it ends").success(), "it runs without a filter");
        assert_eq!(filters("/proc/thread-self/status"), before, "we are filtered");
    }
}
