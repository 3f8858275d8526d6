//! The command line of `vmove`: the one definition behind help, man pages and completions.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};

use vmove_types::device::{DeviceChoice, DeviceRequest};
use vmove_types::spec::{HeadStart, ModeRequest};
use vmove_types::tuning::PinRequest;

pub use super::disk_moves::{Disks, MoveDisk};
pub use super::disks::{DiskArgs, MovedDiskArgs};
pub use super::doctor::Doctor;
pub use super::goals::GoalArgs;
pub use super::hooks::{HookCommand, HookTest};
pub use super::libvirt::LibvirtCommand;
pub use super::page::Page;
pub use super::reads::ReadsArgs;
pub use super::report::ReportArgs;
pub use super::setup::SetupCommand;
pub use super::tune::Tune;
pub use super::visit::{GoHomeArgs, Visit};
pub use super::vms::{Forget, Pause, Resume, Stop, VmName};
pub use super::watch::WatchArgs;

use vmove_types::units;

use super::clusters::ClusterCommand;
use super::members::{DeviceOfMember, GrantOfMember, grant_of_member, mode_of_member, of_member};
use super::{Completions, Global, Man, milliseconds};

/// Moves running QEMU guests between nodes
#[derive(Debug, Parser)]
#[command(name = "vmove", version, propagate_version = true, after_long_help = EXIT_CODES, arg_required_else_help = true)]
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
  1  failed; the guest still runs where it was
  2  wrong usage
  3  refused by the check, or a virtual cluster does not fit; nothing was changed
  4  the guest is paused, or not where it was, and needs `vmove recover`; or it lacks a device, and needs the command that is named
  5  the daemon, or the bridge, cannot be reached
  A second Ctrl-C during `vmove migrate` leaves the migration running and ends with 130. So does the first one in other commands
  that wait for a daemon or the bridge: what was asked for goes on.

Elsewhere (the node has a [[client]] entry for the certificate):
  vmove --at node1.example:7420 --tls-cert ops.pem --tls-key ops.key --tls-ca ca.pem list

Environment:
  VMOVE_CONTROL  control socket, unless --control is given
  VMOVE_AT, VMOVE_TLS_CERT, VMOVE_TLS_KEY, VMOVE_TLS_CA
                 a node elsewhere, unless --at, --tls-cert, --tls-key, --tls-ca are given
  VBRIDGE        the bridge of fleet, topology, place, lease, plan and account, unless --bridge is given";

const DEVICES_HELP: &str = "Examples:
  vmove devices
  vmove --json devices | jq '.devices[] | select(.refused == null and .owner == null) | .address'

Give one to a VM by `vmove run --device ROLE=PCI-ADDRESS`. Bridges are left out.";

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a VM that can be moved
    Run(Run),
    /// Take in a QEMU that somebody else started (libvirt, a script)
    Adopt(Adopt),
    /// List the VMs of this node
    List,
    /// List the devices of this node that VMs can have, and who has them; or give a guest one that it lacks
    #[command(after_help = DEVICES_HELP)]
    Devices(Devices),
    /// Compare the host and its VMs with what is advised: processors, NUMA nodes, huge pages, interrupts, sleep states, IOMMU
    Tune(Tune),
    /// Show everything about one VM
    Show(VmName),
    /// End a VM
    Stop(Stop),
    /// Stop a guest's processors; memory and devices stay
    Pause(Pause),
    /// Let a paused guest run, for instance after `migrate --paused`
    Resume(Resume),
    /// Let go of an adopted VM; it runs on
    Forget(Forget),
    /// Find everything that stands in the way of a migration; changes nothing
    Check(Check),
    /// Move a running VM to another node
    Migrate(Migrate),
    /// List the disks of a VM, and what moves of them
    Disks(Disks),
    /// Move a disk of a running VM to another image on this node
    MoveDisk(MoveDisk),
    /// Send a running VM to another node for a visit, take it home, or let it stay
    Visit(Visit),
    /// Show migrations at work, or one in full
    Status(Status),
    /// Watch VMs, migrations and forks of nodes on a terminal; changes nothing
    Watch(WatchArgs),
    /// Call a migration off; the guest goes on at the source
    Cancel(MigrationId),
    /// Take up a migration whose guest is paused, or that gave up on its peer
    Recover(Recover),
    /// Let the copy of a guest that ended at the destination run again at the source
    Reclaim(Reclaim),
    /// Show where the time and the pause of a migration or a fork went, as text, picture or page
    Report(ReportArgs),
    /// List the migrations that this node remembers
    History(History),
    /// Show the node: fabrics, memory, known peers
    Node,
    /// Serve a page that shows the node, its VMs, migrations and forks as they happen
    Page(Page),
    /// What the node does by itself when something happens (`[[hook]]` in its configuration)
    #[command(subcommand)]
    Hook(HookCommand),
    /// Have `virsh migrate` carried by vmove
    #[command(subcommand)]
    Libvirt(LibvirtCommand),
    /// RDMA and tcp between this node and others
    #[command(subcommand)]
    Fabric(FabricCommand),
    /// Say what this host lacks for moving guests, huge pages, RDMA, devices, networks and forks, and how to mend it
    Doctor(Doctor),
    /// Make what nodes need before their first start
    #[command(subcommand)]
    Setup(SetupCommand),
    /// Virtual clusters.
    #[command(flatten)]
    Cluster(ClusterCommand),
    /// Print a completion script
    Completions(Completions),
    /// Write the man pages into a folder
    Man(Man),
}

/// Arguments of `devices`.
#[derive(Debug, Args)]
pub struct Devices {
    /// What to do; without it, all are listed.
    #[command(subcommand)]
    pub command: Option<DevicesCommand>,
}

/// What `devices` does.
#[derive(Debug, Subcommand)]
pub enum DevicesCommand {
    /// Give a guest a device that it should have and lacks, such as after a move that could not plug it in
    #[command(after_help = "Example:
  vmove devices attach web net0

Run it on the node that has the guest. A guest that has the device keeps it as it is.")]
    Attach(DeviceOfVm),
}

/// A device of a VM.
#[derive(Debug, Args)]
pub struct DeviceOfVm {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
    /// What the device is to it
    #[arg(value_name = "ROLE")]
    pub role: String,
}

/// What `fabric` does.
#[derive(Debug, Subcommand)]
pub enum FabricCommand {
    /// Try every fabric between this node and another: devices, path, latency and bandwidth of READs, and what is wrong.
    /// Exit code 0 if RDMA works, 3 if only something else does or nothing
    Check(FabricCheckArgs),
}

/// Arguments of `fabric check`.
#[derive(Debug, Args)]
pub struct FabricCheckArgs {
    /// Name from the configuration, or host:port
    #[arg(value_name = "NODE")]
    pub to: String,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove run --name web -- qemu-system-x86_64 -accel kvm -m 4G -smp 4 -drive file=/shared/web.qcow2
  vmove run --name db --memory hugetlb-2m -- qemu-system-x86_64 -m 64G -nodefaults -display none \\
        -serial unix:{vmdir}/console.sock,server=on,wait=off
  vmove run --name fast --pin -- qemu-system-x86_64 -accel kvm -m 16G -smp 8
  vmove run --name near --pin=1:8 --memory hugetlb-2m -- qemu-system-x86_64 -accel kvm -m 16G -smp 8
  vmove run --name sim --device net0=0000:3b:02.1,mac=52:54:00:12:34:56 --device gpu=0000:17:00.0 -- \\
        qemu-system-x86_64 -accel kvm -machine q35 -m 64G -drive file=/shared/sim.qcow2

Guest memory is put into a file that the daemon can share; everything else of the command line stays as it is.
{vmdir} and {name} are replaced on every node the VM comes to; {vmdir} is also QEMU's working folder, so other paths
must be absolute and mean the same on every node.

A device is bound to vfio-pci and sits on a port where it can be unplugged; when the VM ends it returns to the driver that
it had. -device vfio-pci in the command line comes to the same. `vmove devices` lists what the node has.")]
pub struct Run {
    /// Name of the VM: 1 to 64 bytes, any script, no slash
    #[arg(long, value_name = "VM")]
    pub name: String,
    /// Backing of guest memory
    #[arg(long, value_name = "BACKING", default_value = "thp", value_parser = ["thp", "hugetlb-2m", "hugetlb-1g"])]
    pub memory: String,
    /// Label, by which hooks choose VMs, here and wherever the VM goes; may be repeated
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub labels: Vec<(String, String)>,
    /// Environment variable for QEMU, here and wherever the VM goes; may be repeated
    #[arg(long = "env", value_name = "KEY=VALUE", value_parser = key_value)]
    pub environment: Vec<(String, String)>,
    /// Device of this node for the VM, its role there, and for a virtual function its addresses:
    /// `ROLE=PCI-ADDRESS[,mac=MAC][,vlan=N][,trust=on|off][,node-guid=GUID][,port-guid=GUID][,pkey=KEY]`; may be repeated
    #[arg(long = "device", value_name = "ROLE=PCI-ADDRESS[,…]")]
    pub devices: Vec<DeviceRequest>,
    /// What a bridge lets the VM have here, signed by it; vbridged gives this
    #[arg(long, value_name = "GRANT")]
    pub grant: Option<String>,
    /// Processors that the VM has for itself, and the NUMA nodes of its memory: `NUMA-NODE:PROCESSORS[:MIB]`, several with commas between
    /// them; without a value the node chooses as many as the VM has. Refused if the node cannot do so
    #[arg(long, value_name = "NODE:CPUS,…", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub pin: Option<PinRequest>,
    /// The same, but the VM starts also if the node cannot do so; `vmove show` says why
    #[arg(long, value_name = "NODE:CPUS,…", num_args = 0..=1, require_equals = true, default_missing_value = "", conflicts_with = "pin")]
    pub prefer_pin: Option<PinRequest>,
    /// QEMU and its arguments, after `--`
    #[arg(last = true, required = true, value_name = "QEMU ARGUMENTS")]
    pub command_line: Vec<String>,
}

/// Arguments of `adopt`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove adopt --name legacy --qmp /run/qemu/legacy.qmp

The monitor must be free: it serves one client at a time. Guest RAM must be a shared named file
(memory-backend-file,share=on on tmpfs or hugetlbfs); `vmove adopt` says what is in the way otherwise.")]
pub struct Adopt {
    /// Name it shall have here
    #[arg(long, value_name = "VM")]
    pub name: String,
    /// Its QMP socket
    #[arg(long, value_name = "SOCK")]
    pub qmp: PathBuf,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove check web --to node2
  vmove --json check web --to 192.0.2.2:7420 | jq -r '.blockers[].message'
  vmove check sim --to node2 --device net0=0000:3b:02.4
  vmove check web --to node2 --disks all
  vmove check web --to node2 --max-pause 20ms --within 60s
  vmove --json check web --to node2 | jq .promise
  vmove --json check web --to node2 --reads 2GiB | jq -r .choice.choice

With --reads it says what is the fastest for a guest that is to read so much data of the other node: `stay` and read from afar, `visit`, or `migrate`
to and fro; and what each costs.
The promise is what a migration would be like: mode, pause, time, and what crosses. The guest is watched for 0.3 s for that, and does not notice.
Ends with 0 if at least one mode remains and the goals can be kept, with 3 if not.")]
pub struct Check {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
    /// Where to: host:port, or a name from the daemon's configuration
    #[arg(long, value_name = "NODE")]
    pub to: String,
    /// Device of the other node for a role that the guest has here, as for `vmove migrate`; may be repeated
    #[arg(long = "device", value_name = "ROLE=PCI-ADDRESS[,…]")]
    pub devices: Vec<DeviceChoice>,
    /// Disks that come along.
    #[command(flatten)]
    pub disks: DiskArgs,
    /// How memory would cross
    #[arg(long, value_name = "MODE", default_value = "auto",
          value_parser = PossibleValuesParser::new(["auto", "precopy", "postcopy", "hybrid"]).try_map(|s| s.parse::<ModeRequest>()))]
    pub mode: ModeRequest,
    /// Cap on bulk traffic, such as 10Gbit or 1GiB per second [default: none]
    #[arg(long, value_name = "RATE", value_parser = units::parse_rate)]
    pub bandwidth: Option<u64>,
    /// What the migration is to keep.
    #[command(flatten)]
    pub goals: GoalArgs,
    /// What the guest is to read there.
    #[command(flatten)]
    pub reads: ReadsArgs,
}

/// Arguments of `migrate`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove migrate web --to node2
  vmove migrate db --to 192.0.2.2:7420 --mode hybrid --bandwidth 10Gbit --verify
  vmove --json migrate web --to node2 | jq .downtime_ms
  vmove migrate web --to node2 --detach
  vmove migrate rank0 rank1 rank2 --to node2
  vmove migrate sim --to node2 --device net0=0000:3b:02.4 --device gpu=0000:65:00.0 \\
        --quiesce 'systemctl stop job' --resume 'systemctl start job'

Goals in place of settings: the migration says beforehand what it will be like, or does not begin and says what could be kept; it chooses its mode
and ends its rounds by them; and it says afterwards what it kept:
  vmove migrate web --to node2 --max-pause 20ms --within 60s

A guest that is to read data of the other node, and to come home after that, goes if that is faster than reading from here: as a visit (see `vmove
visit`), or for good if it brings most of its memory. If it is not, nothing is changed, and it ends with 3:
  vmove migrate web --to node2 --reads 2GiB
  vmove migrate web --to node2 --reads 200GiB --reads-near 3GiB --return-when idle

Disks must be on storage that both nodes see, or be copied along:
  vmove migrate web --to node2 --disks all
  vmove migrate web --to node2 --disks vda,vdb --disk-map vdb=/dev/vg0/web-data --source-disks delete
They are copied while the guest runs, before its memory; --timeout counts from then on, and --bandwidth holds for both. The guest is handed
over only when the copies are whole. The images here are kept under another name (IMAGE.moved-ID) unless they are to be deleted.

A device that the guest owns stays behind: the guest is asked to let it go, its memory crosses, and it gets the device of the other node
that --device names for the role, with the addresses (MAC, GUID, P_Key) that it had. The report says how long it was without each. If
the migration fails before the hand-over, the guest has its devices back. Where memory is compared faster than it crosses, it is sent
ahead while the guest has its devices, and only what has changed crosses after they have left (--head-start).

Several VMs move at one barrier, as the ranks of a parallel job must: all wait until each can be stopped, are stopped together, and are
handed over all or none. Whatever fails before that brings all of them back. Options hold for each; --to-of, --mode-of and
--device VM:ROLE=… say what is different for one:
  vmove migrate rank0 rank1 --to node2 --to-of rank1=node3 --mode-of rank1=precopy \\
        --device rank0:ib0=0000:3b:00.1 --device rank1:ib0=0000:3b:00.2

Ctrl-C asks for the end of the migration: the guest goes on at the source, unless it was handed over already.
A second Ctrl-C leaves the migration running.")]
pub struct Migrate {
    /// Name of the VM; of several, all move at one barrier, or none
    #[arg(value_name = "VM", required = true)]
    pub vms: Vec<String>,
    /// Another destination for one of several VMs; may be repeated
    #[arg(long, value_name = "VM=NODE", value_parser = of_member)]
    pub to_of: Vec<(String, String)>,
    /// Another mode for one of several VMs; may be repeated
    #[arg(long, value_name = "VM=MODE", value_parser = mode_of_member)]
    pub mode_of: Vec<(String, ModeRequest)>,
    /// Where to: host:port, or a name from the daemon's configuration
    #[arg(long, value_name = "NODE")]
    pub to: String,
    /// How memory crosses; auto measures the guest and the link, and says why it chose
    #[arg(long, value_name = "MODE", default_value = "auto",
          value_parser = PossibleValuesParser::new(["auto", "precopy", "postcopy", "hybrid"]).try_map(|s| s.parse::<ModeRequest>()))]
    pub mode: ModeRequest,
    /// Longest pause that precopy may cause and auto plans for [default: 300ms]
    #[arg(long, value_name = "TIME", value_parser = milliseconds, conflicts_with = "max_pause")]
    pub max_downtime: Option<u64>,
    /// What the migration is to keep.
    #[command(flatten)]
    pub goals: GoalArgs,
    /// What the guest is to read there.
    #[command(flatten)]
    pub reads: ReadsArgs,
    /// With --reads, what takes it home if it goes for a visit.
    #[command(flatten)]
    pub go_home: GoHomeArgs,
    /// Cap on bulk traffic, such as 10Gbit or 1GiB per second [default: none]
    #[arg(long, value_name = "RATE", value_parser = units::parse_rate)]
    pub bandwidth: Option<u64>,
    /// Leave the guest paused at the destination
    #[arg(long)]
    pub paused: bool,
    /// Hash every page and every disk that moves on both sides and compare
    #[arg(long)]
    pub verify: bool,
    /// Hand the guest over within this time, or call the migration off; 0 for no limit [default: 120s]
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    pub timeout: Option<u64>,
    /// Device of the other node for a role that the guest has here; further settings replace those that the guest has; may be repeated
    #[arg(long = "device", value_name = "[VM:]ROLE=PCI-ADDRESS[,…]")]
    pub devices: Vec<DeviceOfMember>,
    /// What a bridge lets the VM have on the other node, signed by it; vbridged gives this
    #[arg(long = "grant", value_name = "[VM:]GRANT", value_parser = grant_of_member)]
    pub grants: Vec<GrantOfMember>,
    /// Shell command to run in the guest, by its agent, before it is asked for its devices
    #[arg(long, value_name = "COMMAND")]
    pub quiesce: Option<String>,
    /// Shell command to run in the guest, by its agent, when it has its devices again, here or there
    #[arg(long, value_name = "COMMAND")]
    pub resume: Option<String>,
    /// Longest time for each of these two [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    pub script_timeout: Option<u64>,
    /// Longest time for the guest to let a device go [default: 20s]
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    pub unplug_timeout: Option<u64>,
    /// Send memory ahead while the guest has its devices, and compare it when they have left; auto does if it measures that this is faster
    #[arg(long, value_name = "WHEN", default_value = "auto",
          value_parser = PossibleValuesParser::new(["auto", "always", "never"]).try_map(|s| s.parse::<HeadStart>()))]
    pub head_start: HeadStart,
    /// Disks that come along.
    #[command(flatten)]
    pub disks: MovedDiskArgs,
    /// Print the id and do not wait
    #[arg(long)]
    pub detach: bool,
}

/// Arguments of `status`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove status
  vmove status 3f2a --follow

The id of a group shows all its members. An id may be cut short as long as it is unambiguous.

--follow shows a bar on a terminal. Where standard output is a pipe or a file, a line goes there at each phase and every five seconds. With --json it
has one object a line: at each phase and every second what `vmove status ID --json` prints, and last what `vmove migrate --json` prints, which has
exit_code.")]
pub struct Status {
    /// Id of a migration or a group; without it, all that are at work
    #[arg(value_name = "ID")]
    pub id: Option<String>,
    /// Wait for its end, as `vmove migrate` does; Ctrl-C only ends the waiting
    #[arg(long, short, requires = "id")]
    pub follow: bool,
}

/// A migration.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove cancel 3f2a

Of a group, or of one of its members, all are called off. Returns when the request is taken; see `vmove status ID --follow` for the end.")]
pub struct MigrationId {
    /// Id of the migration or of the group, may be cut short
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Arguments of `recover`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove recover 3f2a

Run it on the node that the guest came from: it holds what is missing, and it is the side that dials. If it says that the session stopped
with an error at the destination, run it there first.")]
pub struct Recover {
    /// Id of the migration, may be cut short
    #[arg(value_name = "ID")]
    pub id: String,
    /// Do not wait for the end
    #[arg(long)]
    pub detach: bool,
}

/// Arguments of `reclaim`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove reclaim 3f2a --guest-is-lost

Run it on the node that the guest came from, after its QEMU at the destination has ended and before all of its memory was there. The copy here
is as of the moment when the guest was stopped: what it did since, and wrote to its disks, is not in it. To drop the copy instead: `vmove stop
--force VM`.")]
pub struct Reclaim {
    /// Id of the migration, may be cut short
    #[arg(value_name = "ID")]
    pub id: String,
    /// The guest has ended at the destination and will not run there again: it would run twice otherwise
    #[arg(long, required = true)]
    pub guest_is_lost: bool,
}

/// Arguments of `history`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove history
  vmove --json history --vm web | jq '.migrations[0].outcome'")]
pub struct History {
    /// Only migrations of this VM
    #[arg(long, value_name = "VM")]
    pub vm: Option<String>,
    /// How many at most, newest first
    #[arg(long, short = 'n', value_name = "COUNT", default_value_t = 50)]
    pub limit: usize,
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = key_value(text)?;
    if key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return Ok((key, value));
    }
    Err(format!("expected a key of letters, digits and _, found {key:?}"))
}

fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("expected KEY=VALUE, found \"{text}\"")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once(&"vmove").chain(args))
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_help_and_those_with_arguments_an_example() {
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            assert!(command.get_about().is_some(), "{name} has no help");
            if command.get_arguments().next().is_some() {
                let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(after.contains("Example"), "{name} has no example");
            }
        }
    }

    #[test]
    fn migrate_takes_human_units_and_keeps_defaults() {
        let cli =
            parse(&["migrate", "my vm", "--to", "b", "--bandwidth", "10Gbit", "--max-downtime", "50ms"])
                .unwrap();
        let Command::Migrate(migrate) = cli.command else { panic!("{cli:?}") };
        let [request] = &migrate.requests().unwrap()[..] else { panic!("{migrate:?}") };
        let spec = &request.options;
        assert_eq!(spec.bandwidth.map(|bandwidth| bandwidth.0), Some(1_250_000_000));
        assert_eq!((spec.max_downtime_ms, spec.timeout_ms), (50, 120_000));
        assert_eq!(spec.mode, ModeRequest::Auto);
        assert_eq!(parse(&["migrate", "a", "--to", "b", "--timeout", "0"]).map(|_| ()).ok(), Some(()));
    }

    #[test]
    fn wrong_usage_is_named() {
        for (args, word) in [
            (&["migrate", "a"][..], "--to"),
            (&["migrate", "a", "--to", "b", "--mode", "rdma"], "postcopy"),
            (&["migrate", "a", "--to", "b", "--bandwidth", "10"], "10Gbit"),
            (&["migrate", "a", "--to", "b", "--max-downtime", "1us"], "1ms"),
            (&["migrate", "a", "--to", "b", "--max-pause", "20"], "300ms"),
            (
                &["migrate", "a", "--to", "b", "--max-pause", "1s", "--max-downtime", "1s"],
                "cannot be used with",
            ),
            (&["run", "--name", "a"], "QEMU"),
            (&["run", "--name", "a", "--device", "17:00.0", "--", "q"], "ROLE=ADDRESS"),
            (&["run", "--name", "a", "--device", "gpu=17:00.0,speed=1", "--", "q"], "not a setting"),
            (&["run", "--name", "a", "--memory", "ram", "--", "q"], "hugetlb-2m"),
            (&["status", "--follow"], "ID"),
        ] {
            let error = parse(args).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{args:?}");
            assert!(error.to_string().contains(word), "{args:?}: {error}");
        }
    }

    #[test]
    fn arguments_of_qemu_are_left_alone() {
        let cli =
            parse(&["run", "--name", "ü", "--env", "A=b=c", "--", "qemu", "-m", "1G", "--json"]).unwrap();
        let Command::Run(run) = cli.command else { panic!("{cli:?}") };
        assert_eq!(run.command_line, ["qemu", "-m", "1G", "--json"]);
        assert_eq!(run.environment, [("A".to_owned(), "b=c".to_owned())]);
        assert!(!cli.global.json);
    }
}
