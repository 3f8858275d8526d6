//! What a node knows of migrations: which one holds a VM, and where guests went. The engine of forks and the registry of VMs ask.

use std::collections::HashMap;
use std::fmt;

use vmove_types::progress::Progress;

use crate::peer::{PeerTarget, SessionId};
use crate::record::VmRecord;

/// Where a guest has gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// The session that took it: what the node it came to knows it by.
    pub session: SessionId,
    /// The node.
    pub to: PeerTarget,
}

/// A QEMU of this node: its process id and when that was started, in clock ticks since boot.
pub type QemuId = (i32, u64);

/// The migrations to and from a node.
pub trait Migrations: Send + Sync {
    /// The migration that holds a VM: it runs, or it left the guest paused and awaits `vmove recover`.
    fn of_vm(&self, name: &str) -> Option<Progress>;

    /// Where guests were sent, as long as the journals of that are kept. Reads the disk.
    fn moved(&self) -> HashMap<QemuId, Moved>;

    /// The guest that a session brought here, as it was registered first, as long as the journal of that is kept. Reads the disk.
    fn came(&self, session: SessionId) -> Option<VmRecord>;
}

impl fmt::Debug for dyn Migrations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Migrations")
    }
}

/// A node without migrations.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoMigrations;

impl Migrations for NoMigrations {
    fn of_vm(&self, _: &str) -> Option<Progress> {
        None
    }

    fn moved(&self) -> HashMap<QemuId, Moved> {
        HashMap::new()
    }

    fn came(&self, _: SessionId) -> Option<VmRecord> {
        None
    }
}
