//! One process of a daemon, from its start to its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmove_node::simulation::Process;

use crate::plan::{NODES, NodeIndex};

/// One process of a daemon. When it is killed its tasks end; what the one that was running still does comes to nothing, since it goes by a handle of
/// this life.
#[derive(Debug)]
pub struct Life {
    node: NodeIndex,
    version: u16,
    process: Process,
    dead: AtomicBool,
}

impl Life {
    /// A new one. `seed`: what its ids follow from.
    #[must_use]
    pub fn new(node: NodeIndex, version: u16, seed: u64) -> Arc<Self> {
        Arc::new(Self { node, version, process: Process::new(seed), dead: AtomicBool::new(false) })
    }

    /// Where.
    #[must_use]
    pub const fn node(&self) -> NodeIndex {
        self.node
    }

    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        NODES[self.node]
    }

    /// The protocol that it speaks.
    #[must_use]
    pub const fn version(&self) -> u16 {
        self.version
    }

    /// Its tasks.
    #[must_use]
    pub const fn process(&self) -> &Process {
        &self.process
    }

    /// Whether it was not killed.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !self.dead.load(Ordering::Relaxed)
    }

    /// SIGKILL.
    pub fn end(&self) {
        self.dead.store(true, Ordering::Relaxed);
        self.process.kill();
    }
}
