//! Whose turn it is at the machine's huge pages.

use std::fs::File;

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

/// A test's turn at the huge pages. Tests that need some have it at the same time; one that takes all of them has it alone, since pages that
/// another test gives back would be there for the guest that shall find none.
#[derive(Debug)]
pub(crate) struct Turn(#[expect(dead_code, reason = "held")] Flock<File>);

impl Turn {
    pub(crate) fn beside_others() -> Result<Self> {
        Self::take(FlockArg::LockShared)
    }

    pub(crate) fn alone() -> Result<Self> {
        Self::take(FlockArg::LockExclusive)
    }

    fn take(how: FlockArg) -> Result<Self> {
        let path = std::env::temp_dir().join("vmove-huge-pages-turn.lock");
        let file = File::create(&path).with_context(|| path.display().to_string())?;
        Ok(Self(Flock::lock(file, how).map_err(|(_, error)| error)?))
    }
}
