//! Why a configuration cannot be used.

use crate::vmid::{NoVmid, Vmid};

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PveError {
    /// No number of a VM.
    #[error(transparent)]
    Vmid(#[from] NoVmid),
    /// A quote that does not end.
    #[error("args of the VM has a quote without an end ({0}): set it anew by `qm set VMID --args`")]
    Quote(String),
    /// A size that is none.
    #[error(
        "Expected memory: of the VM as a number of MiB, found {0:?}: set it anew by `qm set VMID --memory`"
    )]
    Memory(String),
    /// Nothing to take away.
    #[error("VM {0} is not enabled for vmove: nothing is to be undone")]
    NotEnabled(Vmid),
    /// Somebody works on it.
    #[error(
        "VM {vmid} is locked ({lock}): wait until that has ended; a lock that was left behind is taken away by `qm unlock {vmid}`"
    )]
    Locked {
        /// Which one.
        vmid: Vmid,
        /// What for.
        lock: String,
    },
}
