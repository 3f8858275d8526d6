//! What a node knows of migrations: which one holds a VM, and where guests went. The engine of forks and the registry of VMs ask.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;

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

/// What is left of a VM after an operator has ended the migration that held it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Abandoned {
    /// No migration held it.
    NotHeld,
    /// The VM, which nobody needs any more.
    Free {
        /// What cannot be written down yet, and is tried again.
        owed: Option<String>,
    },
    /// Nothing: a copy that had never run was removed.
    Removed {
        /// As above.
        owed: Option<String>,
    },
}

/// Why a migration still holds its VM.
#[derive(Debug, thiserror::Error)]
pub enum AbandonError {
    /// Both sides are at work.
    #[error("migration {migration} is at work: wait for its end, or `vmove cancel {migration}`")]
    AtWork {
        /// Id of the migration.
        migration: String,
    },
    /// Its journal.
    #[error("could not use {}", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
}

/// A request to end a migration, at work.
pub type Abandoning<'a> = Pin<Box<dyn Future<Output = Result<Abandoned, AbandonError>> + Send + 'a>>;

/// The migrations to and from a node.
pub trait Migrations: Send + Sync {
    /// The migration that holds a VM: it runs, or it left the guest paused and awaits `vmove recover`.
    fn of_vm(&self, name: &str) -> Option<Progress>;

    /// The disk of a VM that gets another image on this node now.
    fn moving_disk(&self, _name: &str) -> Option<String> {
        None
    }

    /// Whether a disk of a VM is about to be copied to another image: the guest stands still for that, and must neither be resumed nor paused.
    fn begins_disk_move(&self, _name: &str) -> bool {
        false
    }

    /// Ends the migration that holds a VM and cannot go on: its peer is lost, or it failed. Memory that had not crossed is given up.
    fn abandon<'a>(&'a self, name: &'a str) -> Abandoning<'a>;

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

    fn abandon<'a>(&'a self, _: &'a str) -> Abandoning<'a> {
        Box::pin(std::future::ready(Ok(Abandoned::NotHeld)))
    }

    fn moved(&self) -> HashMap<QemuId, Moved> {
        HashMap::new()
    }

    fn came(&self, _: SessionId) -> Option<VmRecord> {
        None
    }
}
