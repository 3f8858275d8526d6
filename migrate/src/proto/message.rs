//! The messages of a session. `docs/protocol.md` says which may come when.

use std::ops::Range;

pub use super::disks::{ChunkHashes, Disk, DiskHashes, DiskRead, MovedDisk};
use serde::{Deserialize, Serialize};
use vmove_fabric::{FabricKind, RemoteRegion};
use vmove_types::Backing;

use crate::pending::{PageSet, WirePart, WireSet};
use crate::taps::Tap;
use vmove_node::peer::{SessionId, Token};
use vmove_types::check::Blocker;
use vmove_types::device::DeviceChoice;
use vmove_types::disk::{DiskProgress, DiskVerified};
use vmove_types::disk_latency::{DiskIo, GaveWay};
use vmove_types::go_home::GoHome;
use vmove_types::progress::ArrivedBlock;
use vmove_types::report::{CpuUse, FaultStats, Report, SlowFault, VisitEnd};
use vmove_types::spec::MigrationSpec;
use vmove_types::time::Mono;

/// The unit in which the source says where it has memory, and in which memory is registered: 2 MiB, or a page that is larger.
pub(crate) const PART_BYTES: u64 = 2 << 20;

/// One RAM block as the source has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockInfo {
    /// QEMU's id of the memory backend.
    pub id: String,
    /// Length in bytes.
    pub size: u64,
    /// Page size of the source's backing in bytes; the destination uses the same.
    pub page_size: u64,
    /// Which 2 MiB parts of it have memory at the source (the last may be shorter).
    pub data: WireSet,
}

/// What the destination must know to make room for a VM. Sent first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prepare {
    /// Name of the VM.
    pub vm: String,
    /// The source's name of itself, for records.
    pub source: String,
    /// An id of the source's running kernel: if it is the destination's too, they share a clock.
    pub boot_id: String,
    /// Secret of this session for all further connections.
    pub token: Token,
    /// The operator's options.
    pub spec: MigrationSpec,
    /// Only look for blockers; change nothing.
    pub check_only: bool,
    /// The operator's command line of the VM.
    pub command_line: Vec<String>,
    /// Environment variables that QEMU was started with.
    pub environment: Vec<(String, String)>,
    /// What its memory is made of, here and there.
    pub backing: Backing,
    /// RAM blocks, in the order in which they are numbered in every other message.
    pub blocks: Vec<BlockInfo>,
    /// QEMU version at the source, `major.minor.micro`.
    pub qemu_version: String,
    /// Machine type at the source, with its version (`pc-q35-10.0`).
    pub machine: String,
    /// Whether guest code was running when this was asked for.
    pub was_running: bool,
    /// Files behind the VM's disks that must be reachable at the destination.
    pub disks: Vec<Disk>,
    /// Disks that are copied.
    #[serde(default)]
    pub moved: Vec<MovedDisk>,
    /// Fabrics the source can use, best first.
    pub fabrics: Vec<vmove_node::peer::FabricOffer>,
    /// Devices of the source that the guest owns. In their place it gets those that the options name.
    #[serde(default)]
    pub devices: Vec<OwnedDevice>,
    /// Taps by which the guest reaches the network.
    #[serde(default)]
    pub taps: Vec<TapPlace>,
    /// It moves with others: its script waits until all of them have their devices.
    #[serde(default)]
    pub in_group: bool,
    /// UUID of a libvirt domain: its QEMU waits at the destination already, and libvirt decides on which side the guest runs.
    #[serde(default)]
    pub libvirt: Option<String>,
    /// The guest comes back from a visit: the destination is its home, which has kept its memory.
    #[serde(default)]
    pub home: Option<Home>,
    /// Port of the source, by which a guest that is on a visit comes back.
    #[serde(default)]
    pub home_port: Option<u16>,
}

/// A visit, named by both of its nodes alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Its session.
    pub visit: SessionId,
    /// The secret of that.
    pub token: Token,
}

/// A tap of the guest at the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TapPlace {
    /// Which.
    pub tap: Tap,
    /// The bridge that it is in.
    pub bridge: Option<String>,
}

/// A device of the source that the guest owns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedDevice {
    /// Its role, and the addresses by which others know it.
    pub device: DeviceChoice,
    /// QEMU's id of it.
    pub id: String,
    /// QEMU's id of the port that it sits on.
    pub bus: String,
    /// Further properties that QEMU's device has.
    pub properties: Vec<(String, String)>,
    /// Numbers of vendor and model, such as `8086:10ca`: the one that takes its place has the same.
    pub model: String,
}

impl Prepare {
    /// Bytes of the guest's RAM that hold something at the source, in whole 2 MiB parts.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        let of = |block: &BlockInfo| {
            let parts = block.size.div_ceil(PART_BYTES);
            let held = PageSet::decode(&block.data, parts).map_or(parts, |set| set.count());
            held.saturating_mul(PART_BYTES).min(block.size)
        };
        self.blocks.iter().fold(0, |sum, block| sum.saturating_add(of(block)))
    }

    /// Bytes of the guest's RAM, as far as a number can say them.
    #[must_use]
    pub fn guest_bytes(&self) -> u64 {
        self.blocks.iter().fold(0, |sum, block| sum.saturating_add(block.size))
    }
}

/// The destination has room and waits for page connections; its QEMU is being started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// The destination's name of itself.
    pub destination: String,
    /// An id of the destination's running kernel.
    pub boot_id: String,
    /// Fabric to use.
    pub fabric: FabricKind,
    /// Why.
    pub fabric_reason: String,
    /// Its address, where it is not the daemon's port.
    pub fabric_address: String,
    /// Bulk connections wanted.
    pub bulk_connections: u8,
    /// Both sides offer tcp, so it can take over when that fabric fails.
    pub may_fall_back: bool,
}

/// Where the source's blocks can be read; sent when page connections were opened, and when parts were registered afresh.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Regions {
    /// Fabric of the page connections.
    pub fabric: FabricKind,
    /// Page connections stay as they are.
    pub update: bool,
    /// One per block.
    pub blocks: Vec<BlockRegions>,
}

/// Where one block can be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRegions {
    /// Parts that can be read, ascending. What is in none has no memory at the source, or has had none until now.
    pub parts: Vec<RegionPart>,
}

/// A part of a block that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionPart {
    /// Where it begins in the block, in bytes: a multiple of 2 MiB and of the page size.
    pub start: u64,
    /// Address, length and key. Addresses of all parts of a block are those of one range.
    pub region: RemoteRegion,
}

/// A run of pages of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireRun {
    /// Which block.
    pub block: u16,
    /// First page.
    pub start: u64,
    /// Number of pages, at least 1.
    pub len: u64,
    /// The pages are all zero: nothing to read.
    pub zero: bool,
}

impl WireRun {
    /// The pages as a range, if they lie within a block of `pages` pages.
    #[must_use]
    pub fn range(&self, pages: u64) -> Option<Range<u64>> {
        let end = self.start.checked_add(self.len)?;
        (self.len > 0 && end <= pages).then_some(self.start..end)
    }
}

/// Pages of one block whose bytes at the destination are not the final ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outdated {
    /// Which block.
    pub block: u16,
    /// Which pages.
    pub part: WirePart,
}

/// The guest has stopped: every page whose bytes at the destination are not the final ones has been named as outdated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Final {
    /// When QEMU stopped the guest, on the source's clock.
    pub stopped_at: Mono,
    /// Mode in use. With `precopy` the destination says [`ToSource::Loaded`] only when it holds every page as well.
    pub mode: vmove_types::spec::Mode,
}

/// Hashes of pages after the guest stopped, for `--verify`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hashes {
    /// Which block.
    pub block: u16,
    /// First page.
    pub start: u64,
    /// XXH3 of each page from there on.
    pub hashes: Vec<u64>,
}

/// Where the source stands, said at the beginning of every control connection but the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SourceStand {
    /// The guest stays at (or is back at) the source: drop what you have.
    Aborted,
    /// The source has given the guest up: it is yours.
    Committed,
}

/// Where the destination stands, said in answer to [`SourceStand`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DestinationStand {
    /// It holds the device state and waits for the commit.
    Loaded,
    /// The guest is its own; pages are missing.
    Owner,
    /// The guest is its own and complete.
    Complete,
    /// It holds nothing of this session.
    Gone,
}

/// From the source to the destination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToDestination {
    /// Make room.
    Prepare(Box<Prepare>),
    /// Answered by [`ToSource::Pong`]; measures the clocks and keeps the session alive.
    Ping(u32),
    /// Memory is registered, page connections are open.
    Regions(Regions),
    /// A round begins.
    Round(RoundBegun),
    /// Pages of the round, or after [`ToDestination::Stopped`] of the final set.
    Runs(Vec<WireRun>),
    /// All pages of the round have been named.
    RoundEnd(u32),
    /// Pages of the final set, before and after the guest is stopped.
    Outdated(Vec<Outdated>),
    /// The guest is stopped.
    Stopped(Final),
    /// All pages of the final set have been named.
    FinalEnd,
    /// The copies of all disks are whole, and the source writes to none of them any more.
    DisksWhole,
    /// The source has durably given the guest up.
    Commit,
    /// Every guest of the group has its devices: the script may be run. Answer to [`ToSource::Attached`].
    AllAttached,
    /// The guest stays at the source: drop everything.
    Abort(Stays),
    /// For `--verify`.
    Hashes(Hashes),
    /// All hashes have been sent.
    HashesEnd,
    /// For `--verify`, once [`ToSource::HashDisks`] has asked for it.
    DiskHashes(DiskHashes),
    /// The end of that for a disk.
    DiskRead(DiskRead),
    /// The source has ended its QEMU and freed its memory. Its report, as JSON.
    Released(String),
    /// First message of a control connection that takes a session up again.
    Resume(SourceStand),
    /// Now and then, of a migration with a share of the processors to keep.
    HostCpu(SourceCpu),
    /// Answer to [`ToSource::KeepHome`].
    KeptHome {
        /// Why the guest's memory cannot be kept. `None`: it is kept, and that is written down.
        refused: Option<String>,
    },
    /// libvirt has had the guest run at the source, after the commit. Answered by [`ToSource::Running`] if it has run at the destination, and by
    /// [`DestinationStand::Gone`] if it has not: its QEMU there has ended then.
    RunsHere,
}

impl ToDestination {
    /// The word used in errors and in the table of `docs/protocol.md`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Prepare(_) => "Prepare",
            Self::Ping(_) => "Ping",
            Self::Regions(_) => "Regions",
            Self::Round(_) => "Round",
            Self::Runs(_) => "Runs",
            Self::RoundEnd(_) => "RoundEnd",
            Self::Outdated(_) => "Outdated",
            Self::Stopped(_) => "Stopped",
            Self::FinalEnd => "FinalEnd",
            Self::DisksWhole => "DisksWhole",
            Self::Commit => "Commit",
            Self::AllAttached => "AllAttached",
            Self::Abort(_) => "Abort",
            Self::Hashes(_) => "Hashes",
            Self::HashesEnd => "HashesEnd",
            Self::DiskHashes(_) => "DiskHashes",
            Self::DiskRead(_) => "DiskRead",
            Self::Released(_) => "Released",
            Self::Resume(_) => "Resume",
            Self::HostCpu(_) => "HostCpu",
            Self::KeptHome { .. } => "KeptHome",
            Self::RunsHere => "RunsHere",
        }
    }
}

/// Why the guest stays at the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stays {
    /// For people.
    pub why: String,
    /// Somebody asked for it.
    pub cancelled: bool,
}

impl From<String> for Stays {
    fn from(why: String) -> Self {
        Self { why, cancelled: false }
    }
}

/// What the source has used of its host's processors for copying in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceCpu {
    /// Processor time in all, in nanoseconds.
    pub used_ns: u64,
    /// How many processors there are.
    pub processors: u32,
}

/// Counters the destination reports while it works.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Page payload that has landed, in bytes, repeats included.
    pub landed_bytes: u64,
    /// Bytes on the page connections, both ways, headers included.
    pub wire_bytes: u64,
    /// Pages still to come before the destination holds everything; 0 before the guest stopped.
    pub pages_left: u64,
}

/// What of the guest's memory is at the destination, to be shown.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Arrived {
    /// A map of it.
    pub blocks: Vec<ArrivedBlock>,
    /// Page faults so far; `None`: none yet.
    pub faults: Option<FaultStats>,
    /// Disks that follow the guest, once its memory is there.
    pub disks: Vec<DiskProgress>,
}

/// The beginning of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundBegun {
    /// The first of a session, or after a head start, is 1.
    pub number: u32,
    /// The destination has an earlier state of most of its pages: only what is different need cross.
    pub compare: bool,
    /// What it names and what is known to come after it, in bytes, zero pages among them: for who looks at the destination.
    pub bytes: u64,
}

/// The end of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundDone {
    /// Which.
    pub round: u32,
    /// Payload bytes read in it.
    pub bytes: u64,
    /// From its first to its last read, in microseconds.
    pub micros: u64,
}

/// The guest runs (or is paused, as asked) at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// RESUME, on the destination's clock; `None` if it was left paused.
    pub resumed_at: Option<Mono>,
    /// Pages that had not landed then.
    pub pages_left: u64,
}

/// The destination holds every page.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Complete {
    /// Faults.
    pub faults: FaultStats,
    /// The slowest of them.
    #[serde(default)]
    pub slowest_faults: Vec<SlowFault>,
    /// Pages that were zero when the guest stopped.
    pub pages_zero: u64,
    /// Counters at the end.
    pub counted: Counted,
    /// Result of `--verify`: number of pages that differ.
    pub differing_pages: Option<u64>,
    /// Device state received, in bytes.
    pub state_bytes: u64,
    /// The devices that the guest was given.
    #[serde(default)]
    pub devices: Vec<DeviceEnd>,
    /// What came of the script that was run in the guest after that.
    #[serde(default)]
    pub script: Option<ScriptEnd>,
    /// From RESUME until the guest's addresses were announced, in milliseconds.
    #[serde(default)]
    pub announced_ms: Option<f64>,
    /// How the guest's visit ended, if it was one: unless it stayed, what it had not touched has never been there.
    #[serde(default)]
    pub visit: Option<VisitEnd>,
    /// What copying in the background has used of the processors.
    #[serde(default)]
    pub host_cpu: Option<CpuUse>,
    /// The guest's requests to the disks that moved since it runs here, by the disks' names.
    #[serde(default)]
    pub disk_io: Vec<(String, DiskIo)>,
    /// How disks that followed the guest gave way to its requests.
    #[serde(default)]
    pub gave_way: Option<GaveWay>,
    /// Result of `--verify` for the disks that moved, by their names.
    #[serde(default)]
    pub verified_disks: Vec<(String, DiskVerified)>,
}

/// What came of a device at the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceEnd {
    /// What it is to the guest.
    pub role: String,
    /// Its address.
    pub address: String,
    /// When it was about to be plugged in, on the destination's clock.
    pub begun: Mono,
    /// When it was.
    pub plugged: Option<Mono>,
    /// Why it was not.
    pub problem: Option<String>,
}

/// What came of a script in the guest.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ScriptEnd {
    /// How long it took, in milliseconds.
    pub ms: f64,
    /// Why it did not end as it should.
    pub problem: Option<String>,
    /// How long it waited for the devices of the group's other guests, in milliseconds.
    #[serde(default)]
    pub waited_ms: Option<f64>,
}

impl Complete {
    /// What of it a report says on either side.
    pub(crate) fn add_to(&self, report: &mut Report) {
        report.faults = self.faults;
        report.visit = self.visit;
        report.host_cpu.destination = self.host_cpu;
        report.slowest_faults.clone_from(&self.slowest_faults);
        report.state_bytes = self.state_bytes;
        report.bytes_sent = self.counted.wire_bytes.saturating_add(self.state_bytes);
    }
}

/// From the destination to the source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToSource {
    /// There is room.
    Accepted(Box<Accepted>),
    /// There is not, or something else is in the way.
    Refused(Vec<Blocker>),
    /// The answer with `check_only`.
    Checked {
        /// What is in the way; perhaps nothing.
        blockers: Vec<Blocker>,
        /// What is not in the way, and is to be known.
        warnings: Vec<String>,
        /// Which fabric would be used, and why.
        fabric: String,
    },
    /// Answer to a ping.
    Pong {
        /// The ping's number.
        token: u32,
        /// The destination's clock.
        now: Mono,
    },
    /// Destination QEMU runs, paused and attached.
    Prepared,
    /// A round has landed.
    RoundDone(RoundDone),
    /// The device state is loaded, and the destination will not touch the guest until told to.
    Loaded,
    /// The guest is the destination's.
    Running(Running),
    /// The guest has its devices, and a script waits for those of its group. Said again over each new connection.
    Attached,
    /// For `--verify`: every page is there and the disks are flushed; the disks shall be hashed. Said again over each new connection.
    HashDisks,
    /// Now and then.
    Progress(Counted),
    /// After [`Self::Progress`], for people who look at the source.
    Arrived(Box<Arrived>),
    /// Every page is there.
    Complete(Box<Complete>),
    /// The destination gives up before the hand-over.
    Failed(String),
    /// Answer to [`ToDestination::Resume`].
    Resume(DestinationStand),
    /// Page connections failed: the source shall open others, and name again what it has named since the last round's end.
    PagesLost {
        /// The reason.
        why: String,
        /// The same fabric may work again.
        same_fabric: bool,
    },
    /// The guest, which is ours, is to be on a visit: the source shall keep its memory, and take the guest back when this asks for it. Answered by
    /// [`ToDestination::KeptHome`].
    KeepHome(GoHome),
    /// From here on pages come by demand alone: the source shall open other page connections, and name nothing but what is zero.
    ByDemand,
}

impl ToSource {
    /// The word used in errors and in the table of `docs/protocol.md`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Accepted(_) => "Accepted",
            Self::Refused(_) => "Refused",
            Self::Checked { .. } => "Checked",
            Self::PagesLost { .. } => "PagesLost",
            Self::Pong { .. } => "Pong",
            Self::Prepared => "Prepared",
            Self::RoundDone(_) => "RoundDone",
            Self::Loaded => "Loaded",
            Self::Running(_) => "Running",
            Self::Attached => "Attached",
            Self::HashDisks => "HashDisks",
            Self::Progress(_) => "Progress",
            Self::Arrived(_) => "Arrived",
            Self::Complete(_) => "Complete",
            Self::Failed(_) => "Failed",
            Self::Resume(_) => "Resume",
            Self::KeepHome(_) => "KeepHome",
            Self::ByDemand => "ByDemand",
        }
    }
}
