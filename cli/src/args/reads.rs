//! What a guest is to read at the other node.

use clap::Args;
use vmove_types::spec::MigrationSpec;
use vmove_types::units;

/// Of `check` and `migrate`.
#[derive(Debug, Args)]
pub struct ReadsArgs {
    /// How much data beside the other node the guest is to read there before it goes home: it goes only if that is faster, by a visit or a migration,
    /// whichever is
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    pub reads: Option<u64>,
    /// What that data can be read at there, such as 2GiB per second [default: 476.84 MiB/s]
    #[arg(long, value_name = "RATE", value_parser = units::parse_rate, requires = "reads")]
    pub reads_near: Option<u64>,
}

impl ReadsArgs {
    /// Options with them.
    #[must_use]
    pub fn in_options(&self, options: MigrationSpec) -> MigrationSpec {
        MigrationSpec { reads_bytes: self.reads, reads_near_bytes_per_s: self.reads_near, ..options }
    }
}
