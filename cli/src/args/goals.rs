//! What a migration is to keep.

use clap::Args;
use vmove_types::goal::Goals;

use super::milliseconds;

/// Of `check` and `migrate`.
#[derive(Debug, Args)]
pub struct GoalArgs {
    /// Goal: longest pause of the guest in every mode, device state included, such as 20ms
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    pub max_pause: Option<u64>,
    /// Goal: longest time for the whole migration without its disks, such as 60s
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    pub within: Option<u64>,
}

impl GoalArgs {
    /// As the daemon takes them.
    #[must_use]
    pub const fn goals(&self) -> Goals {
        Goals { max_pause_ms: self.max_pause, within_ms: self.within }
    }
}
