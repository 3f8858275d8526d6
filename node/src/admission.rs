//! Which VMs a node lets in that come from other nodes: those that move here, and children of guests elsewhere.

use std::fmt;

use vmove_types::problem::Problem;
use vmove_types::vm::RunRequest;

/// How a VM comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coming {
    /// By a migration, with all its memory.
    ByMigration,
    /// As a child of a guest, whose memory it shares.
    AsChild,
}

/// Decides which VMs may come.
pub trait Admission: Send + Sync + fmt::Debug {
    /// Whether a VM would be let in now. Changes nothing.
    ///
    /// # Errors
    /// Why not.
    fn would_admit(&self, asked: &RunRequest) -> Result<(), Problem>;

    /// Lets a VM in. It counts as here from now on, until neither a session nor the registry has it.
    ///
    /// # Errors
    /// Why not; nothing has changed then.
    fn admit(&self, asked: &RunRequest, coming: Coming) -> Result<(), Problem>;
}

/// Lets every VM in.
#[derive(Debug)]
pub struct AdmitsAll;

impl Admission for AdmitsAll {
    fn would_admit(&self, _: &RunRequest) -> Result<(), Problem> {
        Ok(())
    }

    fn admit(&self, _: &RunRequest, _: Coming) -> Result<(), Problem> {
        Ok(())
    }
}
