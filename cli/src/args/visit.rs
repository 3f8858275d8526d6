//! Arguments of `vmove visit`.

use clap::{ArgGroup, Args, ValueEnum};

use super::milliseconds;
use vmove_types::go_home::{AwaitedEvent, GoHome};
use vmove_types::migration::MigrateRequest;
use vmove_types::spec::{Bandwidth, MigrationSpec, Visit as Step};
use vmove_types::units;

/// Arguments of `visit`.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("step").required(true).args(["to", "back", "stay", "keep_home"]),
    after_help = "Examples:
  vmove visit web --to hpc7
  vmove visit web --to hpc7 --for 2h
  vmove visit web --to hpc7 --until VSERPORT_CHANGE:id=job,open=false
  vmove visit web --to hpc7 --return-when idle
  vmove visit web --back          (on the node that web visits)
  vmove visit web --stay          (there, too)
  vmove visit web --keep-home     (on the node that a migration brings web to)

The guest runs at the other node within the pause of a post-copy migration. Of its memory, only the pages follow that it touches there, and as much
ahead of them as it goes on to touch. Its home keeps its memory: what the guest touches for the first time is fetched from there, so both nodes and
the link between them must last. When the guest comes back, only what it has touched crosses again, and of that only what has changed.

A guest whose home is lost waits at the first page that it lacks, until its home is back. One that ends on its visit is lost: its home keeps memory,
and nothing that runs. With --stay the rest of its memory is fetched, as by a post-copy migration.

With --keep-home the migration that brings the guest to this node becomes a visit, as long as memory still follows the guest (post-copy and hybrid): the
node that it came from keeps what it has. What has crossed by then counts as touched.

With --for, --until or --return-when the node that it visits takes it home by itself, at whichever comes first; if that fails, it is tried again, and
`vmove status` says why."
)]
pub struct Visit {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
    /// Where to: host:port, or a name from the daemon's configuration
    #[arg(long, value_name = "NODE")]
    pub to: Option<String>,
    /// Take the guest home
    #[arg(long, conflicts_with = "GoHomeArgs")]
    pub back: bool,
    /// Let the guest stay on this node for good
    #[arg(long, conflicts_with = "GoHomeArgs")]
    pub stay: bool,
    /// Turn the migration that brings the guest here into a visit: its home keeps its memory, and no more follows than it touches
    #[arg(long)]
    pub keep_home: bool,
    /// What takes it home by itself.
    #[command(flatten)]
    pub go_home: GoHomeArgs,
    /// Cap on what is read ahead, such as 10Gbit or 1GiB per second [default: none]
    #[arg(long, value_name = "RATE", value_parser = units::parse_rate, conflicts_with_all = ["stay", "keep_home"])]
    pub bandwidth: Option<u64>,
    /// Hand the guest over within this time, or call it off; 0 for no limit [default: 120s]
    #[arg(long, value_name = "TIME", value_parser = milliseconds, conflicts_with_all = ["stay", "keep_home"])]
    pub timeout: Option<u64>,
    /// Print the id and do not wait
    #[arg(long)]
    pub detach: bool,
}

/// What takes a guest home from a visit by itself.
#[derive(Debug, Args)]
pub struct GoHomeArgs {
    /// Take it home from its visit this long after it came
    #[arg(long = "for", value_name = "TIME", value_parser = milliseconds)]
    pub for_ms: Option<u64>,
    /// Take it home when its QEMU tells of this event there: NAME, or NAME:KEY=VALUE,… with fields of its data
    #[arg(long, value_name = "EVENT")]
    pub until: Option<AwaitedEvent>,
    /// Take it home when it has been idle for --idle-for: its QEMU uses less than 5 % of one processor
    #[arg(long, value_name = "WHAT")]
    pub return_when: Option<ReturnWhen>,
    /// How long it must be idle
    #[arg(long, value_name = "TIME", value_parser = milliseconds, default_value = "60s", requires = "return_when")]
    pub idle_for: u64,
}

impl GoHomeArgs {
    /// As the daemon takes them.
    #[must_use]
    pub fn go_home(&self) -> GoHome {
        GoHome {
            after_ms: self.for_ms,
            on_event: self.until.clone(),
            when_idle_ms: self.return_when.map(|ReturnWhen::Idle| self.idle_for),
        }
    }
}

/// What a guest goes home by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReturnWhen {
    /// It has nothing to do
    Idle,
}

impl Visit {
    /// The request for a step of the visit, to this node.
    #[must_use]
    pub fn request(&self, step: Step, to: String) -> MigrateRequest {
        let default = MigrationSpec::default();
        let options = MigrationSpec {
            visit: step,
            go_home: self.go_home.go_home(),
            bandwidth: self.bandwidth.map(Bandwidth),
            timeout_ms: self.timeout.unwrap_or(default.timeout_ms),
            ..default
        };
        MigrateRequest { vm: self.vm.clone(), to, options }
    }
}
