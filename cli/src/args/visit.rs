//! Arguments of `vmove visit`.

use clap::{ArgGroup, Args};

use super::milliseconds;
use vmove_types::migration::MigrateRequest;
use vmove_types::spec::{Bandwidth, MigrationSpec, Visit as Step};
use vmove_types::units;

/// Arguments of `visit`.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("step").required(true).args(["to", "back", "stay"]),
    after_help = "Examples:
  vmove visit web --to hpc7
  vmove visit web --back          (on the node that web visits)
  vmove visit web --stay          (there, too)

The guest runs at the other node within the pause of a post-copy migration. Of its memory, only the pages follow that it touches there, and as much
ahead of them as it goes on to touch. Its home keeps its memory: what the guest touches for the first time is fetched from there, so both nodes and
the link between them must last. When the guest comes back, only what it has touched crosses again, and of that only what has changed.

A guest whose home is lost waits at the first page that it lacks, until its home is back. One that ends on its visit is lost: its home keeps memory,
and nothing that runs. With --stay the rest of its memory is fetched, as by a post-copy migration."
)]
pub struct Visit {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
    /// Where to: host:port, or a name from the daemon's configuration
    #[arg(long, value_name = "NODE")]
    pub to: Option<String>,
    /// Take the guest home; its home must have an address in this daemon's configuration
    #[arg(long)]
    pub back: bool,
    /// Let the guest stay on this node for good
    #[arg(long)]
    pub stay: bool,
    /// Cap on what is read ahead, such as 10Gbit or 1GiB per second [default: none]
    #[arg(long, value_name = "RATE", value_parser = units::parse_rate, conflicts_with = "stay")]
    pub bandwidth: Option<u64>,
    /// Hand the guest over within this time, or call it off; 0 for no limit [default: 120s]
    #[arg(long, value_name = "TIME", value_parser = milliseconds, conflicts_with = "stay")]
    pub timeout: Option<u64>,
    /// Print the id and do not wait
    #[arg(long)]
    pub detach: bool,
}

impl Visit {
    /// The request for a step of the visit, to this node.
    #[must_use]
    pub fn request(&self, step: Step, to: String) -> MigrateRequest {
        let default = MigrationSpec::default();
        let options = MigrationSpec {
            visit: step,
            bandwidth: self.bandwidth.map(Bandwidth),
            timeout_ms: self.timeout.unwrap_or(default.timeout_ms),
            ..default
        };
        MigrateRequest { vm: self.vm.clone(), to, options }
    }
}
