//! The command line of `vfork`: the one definition behind help, man pages and completions.

use clap::{Args, Parser, Subcommand};
use vmove_spread::simulate::SimulateArguments;

use super::bridge::Where;
use super::members::of_member;
use super::{Completions, Global, Man};
use vmove_types::device::ChildDevice;
use vmove_types::fork::ForkWay;
use vmove_types::fork_devices::PartingRequest;
use vmove_types::units;

/// Forks running QEMU guests: one parent, any number of children
#[derive(Debug, Parser)]
#[command(name = "vfork", version, propagate_version = true, after_long_help = EXIT_CODES, arg_required_else_help = true)]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Exit codes:
  0  done
  1  failed, or a child did not come to be; the parent runs
  2  wrong usage
  3  refused by the check or by the configuration; nothing was changed
  4  the parent or a child lacks a device, and needs the command that is named
  5  the daemon cannot be reached
  130  Ctrl-C: nobody waits any more, and what was asked for goes on

Elsewhere (the node has a [[client]] entry for the certificate):
  vfork --at node1.example:7420 --tls-cert ops.pem --tls-key ops.key --tls-ca ca.pem list

Environment:
  VMOVE_CONTROL  control socket, unless --control is given
  VMOVE_AT, VMOVE_TLS_CERT, VMOVE_TLS_KEY, VMOVE_TLS_CA
                 a node elsewhere, unless --at, --tls-cert, --tls-key, --tls-ca are given";

const SIMULATE: &str = "Examples:
  vfork simulate --hosts 1000 --per-leaf 40 --link 10 --uplink 100 --mib 4096
  vfork --json simulate --hosts 10000 --per-leaf 40 --loss 0.001 --way multicast,pipeline --svg progress.svg

The hosts and the pacing of a real distribution run in the model; links are arithmetic.";

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Fork a guest: it goes on, and its children run beside it
    Create(Box<Create>),
    /// Keep children prepared, so that the next fork is fast
    Warm(Warm),
    /// List forks of this node; those whose journals cannot be read come first
    List,
    /// Take up a fork whose journal could not be read
    Recover(Recover),
    /// Show a VM and everything that came from it
    Tree(Name),
    /// End a child
    Kill(Child),
    /// Wait until all children of a VM have ended
    Join(Join),
    /// Give a parent or a child memory of its own, so that it can be moved or forked again
    Promote(Name),
    /// Guests that were kept as they were at one moment
    #[command(subcommand)]
    Template(Template),
    /// Model how memory would get to many hosts, on each way; no daemon is asked
    #[command(after_help = SIMULATE)]
    Simulate(SimulateArguments),
    /// Print a completion script
    Completions(Completions),
    /// Write the man pages into a folder
    Man(Man),
}

/// Arguments of `create`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vfork create web --count 32
  vfork --json create web --count 4 --verify | jq '.children[].name'
  vfork create --template golden --count 8
  vfork create web --count 12 --to node2,node3 --here 4
  vfork create train-worker-0 --place 8 --cluster branches
  vfork create sim --count 2 --device nic=0000:3b:02.4 --device nic=0000:3b:02.5,mac=52:54:00:12:34:56 \\
        --quiesce 'systemctl stop job' --resume 'systemctl start job'

A VM that owns devices of the node is asked to let them go for the moment of the fork, and has them back at once; the report says for how
long it was without each. A child has devices if --device names some for it. Its MAC address and GUIDs are its own.

With --place, children are VMs of a new cluster (`vmove cluster`), named after it, each with the share of its parent in a lease of its own.

Children are VMs named VM.1, VM.2, and so on. Each has a VM Generation ID, a UUID and MAC addresses of its own; its network is
off until its NICs were replaced.")]
pub struct Create {
    /// Name of the VM
    #[arg(value_name = "VM", required_unless_present = "template", conflicts_with = "template")]
    pub vm: Option<String>,
    /// Fork a template that is loaded, instead of a VM
    #[arg(long, value_name = "NAME")]
    pub template: Option<String>,
    /// How many children
    #[arg(
        long,
        value_name = "N",
        required_unless_present = "place",
        default_value_t = 0,
        hide_default_value = true
    )]
    pub count: usize,
    /// Have the bridge place N children close together, on any nodes, with one lease; for a VM of a cluster
    #[arg(long, value_name = "N", requires = "cluster", value_parser = clap::value_parser!(u32).range(1..),
        conflicts_with_all = ["count", "template", "verify", "paused", "expect_written", "warm", "nodes", "devices", "names", "grants", "let_run"])]
    pub place: Option<u32>,
    /// With --place: name of the new cluster, and id of its lease
    #[arg(long, value_name = "NAME", requires = "place")]
    pub cluster: Option<String>,
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// Compare each child's memory with the parent's at the fork, byte for byte, before it runs
    #[arg(long)]
    pub verify: bool,
    /// Leave the children as the guest was, loaded and paused, without a network, until `vmove resume`
    #[arg(long, conflicts_with = "nodes")]
    pub paused: bool,
    /// What each child is expected to write, for the check of memory [default: 1/16 of its memory]
    #[arg(long, value_name = "BYTES", value_parser = units::parse_bytes)]
    pub expect_written: Option<u64>,
    /// Prepare so many children afterwards, for the next fork [default: as configured]
    #[arg(long, value_name = "K")]
    pub warm: Option<usize>,
    /// Nodes for children, host:port or names of the configuration, which are dealt out to in turn [default: this node]
    #[arg(long = "to", visible_alias = "node", value_name = "NODE,NODE", value_delimiter = ',')]
    pub nodes: Vec<String>,
    /// Keep K of the children on this node, and deal the others out
    #[arg(long, value_name = "K", requires = "nodes")]
    pub here: Option<usize>,
    /// How many children each of these nodes gets, in the same order; with --here, --count in all [default: dealt out in turn]
    #[arg(long = "share", value_name = "N,N", value_delimiter = ',', requires = "nodes")]
    pub shares: Vec<usize>,
    /// How the parent's memory goes to other nodes
    #[arg(long, value_enum, default_value = "auto", requires = "nodes")]
    pub way: Way,
    /// On other nodes, run children only when all memory is there, instead of at once
    #[arg(long, requires = "nodes")]
    pub whole: bool,
    /// Device for a child in place of the parent's of that role: for the first child that lacks one, or for child K, counted from 1, those
    /// here first, then those of each node of --to; may be repeated
    #[arg(long = "device", value_name = "[K:]ROLE=PCI-ADDRESS[,mac=…]")]
    pub devices: Vec<ChildDevice>,
    /// Names of the children, as many as --count; they are started for this fork [default: VM.1, VM.2, …]
    #[arg(long = "name", value_name = "NAME,NAME", value_delimiter = ',')]
    pub names: Vec<String>,
    /// What a bridge lets a child have on its node, signed by it; vbridged gives this
    #[arg(long = "grant", value_name = "CHILD=GRANT", value_parser = of_member)]
    pub grants: Vec<(String, String)>,
    /// Let a guest that is paused run as soon as it is frozen
    #[arg(long)]
    pub let_run: bool,
    /// How the guest is asked for its devices.
    #[command(flatten)]
    pub parting: Parting,
}

/// How a guest is asked for its devices.
#[derive(Debug, Clone, Default, Args)]
pub struct Parting {
    /// Shell command to run in the guest, by its agent, before it is asked for its devices
    #[arg(long, value_name = "COMMAND")]
    pub quiesce: Option<String>,
    /// Shell command to run in the guest, and in each child, by its agent, when it has its devices
    #[arg(long, value_name = "COMMAND")]
    pub resume: Option<String>,
    /// Longest time for each of these two [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = super::milliseconds)]
    pub script_timeout: Option<u64>,
    /// Longest time for the guest to let a device go [default: 20s]
    #[arg(long, value_name = "TIME", value_parser = super::milliseconds)]
    pub unplug_timeout: Option<u64>,
}

impl Parting {
    /// As a request has it.
    pub fn request(self) -> PartingRequest {
        PartingRequest {
            quiesce: self.quiesce,
            resume: self.resume,
            script_timeout_ms: self.script_timeout,
            unplug_timeout_ms: self.unplug_timeout,
        }
    }
}

/// How memory goes to other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Way {
    /// What is estimated to be the shortest
    Auto,
    /// Each node reads from this one
    Unicast,
    /// One datagram to all, repaired where it was lost; must be allowed in the configuration
    Multicast,
    /// Nodes read from each other
    Pipeline,
    /// One node of each leaf switch first, then the others of the leaf from that one
    TwoStage,
}

impl Way {
    /// As the daemon is asked.
    #[must_use]
    pub const fn asked(self) -> Option<ForkWay> {
        match self {
            Self::Auto => None,
            Self::Unicast => Some(ForkWay::Unicast),
            Self::Multicast => Some(ForkWay::Multicast),
            Self::Pipeline => Some(ForkWay::Pipeline),
            Self::TwoStage => Some(ForkWay::TwoStage),
        }
    }
}

/// Arguments of `recover`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vfork list
  vfork recover 3f2a90c1d4

If the file has been put right, the fork is taken up. Otherwise what stands after the last line that can be read is given up; the
file as it was is kept beside it, as FILE.damaged.")]
pub struct Recover {
    /// Id of the fork, as `vfork list` shows it
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Arguments of `warm`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vfork warm web --count 32
  vfork warm web --count 8 --to node2,node3     # 8 on each of them
  vfork warm web --count 0                               # ends all of them")]
pub struct Warm {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
    /// How many, on each node; 0 ends those that there are
    #[arg(long, value_name = "K")]
    pub count: usize,
    /// Prepare them on these nodes, host:port or names of the configuration [default: this node]
    #[arg(long = "to", visible_alias = "node", value_name = "NODE,NODE", value_delimiter = ',')]
    pub nodes: Vec<String>,
}

/// A VM.
#[derive(Debug, Args)]
pub struct Name {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
}

/// A child.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vfork kill web.3

Ends a VM that came from a fork, at once. Other VMs are ended by `vmove stop`.")]
pub struct Child {
    /// Name of the child
    #[arg(value_name = "CHILD")]
    pub child: String,
}

/// Arguments of `join`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vfork join web && echo all children have ended")]
pub struct Join {
    /// Name of the parent
    #[arg(value_name = "VM")]
    pub vm: String,
    /// Give up after this time [default: wait for ever]
    #[arg(long, value_name = "TIME", value_parser = super::milliseconds)]
    pub timeout: Option<u64>,
}

/// What to do with templates.
#[derive(Debug, Subcommand)]
pub enum Template {
    /// Keep a guest as it is now, in memory and on disk; it runs on
    Save(Save),
    /// Bring a template from disk into memory, verified
    Load(TemplateName),
    /// Let the guest of a template run again on this node, as it was then
    Restore(Restore),
    /// List the templates of this node
    List,
    /// Remove a template from memory and disk; children that came from it stay
    Rm(TemplateName),
}

/// Arguments of `template save`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vfork template save web golden
  vfork create --template golden --count 8")]
pub struct Save {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
    /// Name of the template
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Let a guest that is paused run as soon as it is frozen
    #[arg(long)]
    pub let_run: bool,
    /// How the guest is asked for its devices.
    #[command(flatten)]
    pub parting: Parting,
}

/// Arguments of `template restore`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vfork template save web before-the-update
  vmove stop web
  vfork template restore before-the-update

The guest keeps its name, UUID and MAC addresses; its VM Generation ID is new, so that it knows that it went back. What it did after the
template was made is lost. Make sure that it runs nowhere else: two guests would have the same addresses, and write to the same disks.
Where template-dir in [fork] is a folder that several nodes see, a template can be restored on any of them.")]
pub struct Restore {
    /// Name of the template
    #[arg(value_name = "NAME")]
    pub template: String,
    /// Another name for the VM [default: that which it had]
    #[arg(long = "name", value_name = "VM")]
    pub vm: Option<String>,
    /// Device of this node in the role of one that it had; may be repeated [default: it goes on without]
    #[arg(long = "device", value_name = "ROLE=PCI-ADDRESS[,mac=…]")]
    pub devices: Vec<ChildDevice>,
    /// What a bridge lets the VM have here, signed by it; vbridged gives this
    #[arg(long, value_name = "GRANT")]
    pub grant: Option<String>,
}

/// A template.
#[derive(Debug, Args)]
pub struct TemplateName {
    /// Name of the template
    #[arg(value_name = "NAME")]
    pub name: String,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_model_answers_in_json_where_all_commands_do() {
        let parse = |words: &[&str]| Cli::try_parse_from(std::iter::once(&"vfork").chain(words));
        parse(&["simulate", "--hosts", "10001"]).unwrap_err();
        let asked = parse(&["simulate", "--hosts", "3", "--mib", "8", "--json"]).unwrap();
        let Command::Simulate(arguments) = asked.command else { panic!("another command") };
        let text = arguments.run(asked.global.json).unwrap();
        let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(answer["outcomes"].as_array().map(Vec::len), Some(4), "{text}");
    }

    #[test]
    fn nodes_are_named_in_one_list_or_one_by_one() {
        for words in
            [&["--to", "n2,n3"][..], &["--node", "n2", "--node", "n3"], &["--to", "n2", "--to", "n3"]]
        {
            let all = [&["vfork", "create", "web", "--count", "3"], words].concat();
            let Command::Create(create) = Cli::try_parse_from(all).unwrap().command else { panic!() };
            assert_eq!(create.nodes, ["n2", "n3"]);
        }
    }

    #[test]
    fn either_a_vm_or_a_template_is_forked() {
        let parse = |words: &[&str]| Cli::try_parse_from(std::iter::once(&"vfork").chain(words));
        parse(&["create", "web", "--count", "3"]).unwrap();
        parse(&["create", "--template", "t", "--count", "3"]).unwrap();
        for bad in [
            &["create", "--count", "3"][..],
            &["create", "web"],
            &["create", "web", "--template", "t", "--count", "1"],
        ] {
            parse(bad).unwrap_err();
        }
    }
}
