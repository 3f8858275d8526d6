//! Whether a QEMU lives.

use vmove_memory::{MemoryError, Process};
use vmove_qmp::process::QemuProcess;

/// Whether a process has neither ended nor is ending.
pub(super) fn lives(process: &QemuProcess) -> bool {
    // If it cannot be opened for another reason, nothing was learned.
    let ending = match Process::open(process.pid()) {
        Ok(found) => found.is_ending(),
        Err(error) => matches!(error, MemoryError::ProcessGone { .. }),
    };
    // Asked second: if it has not ended, the process that was opened is this one.
    process.alive() && !ending
}
