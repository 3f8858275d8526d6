//! What a finished migration says of itself: the object that ends `vmove migrate --json`.

use serde::{Deserialize, Serialize};

use crate::choice::Choice;
use crate::disk::DiskReport;
use crate::promise::{Promise, Verdict};
use crate::spec::Mode;

/// Latency of page faults at the destination, from the kernel's message being read to the page being mapped.
///
/// Unit: microseconds of the destination's CLOCK_MONOTONIC.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FaultStats {
    /// Faults that the guest or QEMU took on pages under our care, including those that needed no fetch.
    pub count: u64,
    /// Faults for which a page was read over the fabric.
    pub fetched: u64,
    /// Median of the fetched.
    pub p50_us: f64,
    /// 99th percentile of the fetched.
    pub p99_us: f64,
    /// 99.9th percentile of the fetched: of fewer than 1,000 the longest.
    #[serde(default)]
    pub p999_us: f64,
    /// Longest of the fetched.
    pub max_us: f64,
}

/// One of the slowest page faults, and where its time went: `asked_us`, `read_us` and `map_us` are one after the other and make `total_us`.
///
/// Unit: microseconds of the destination's CLOCK_MONOTONIC, but for `at_ms`. It begins when the kernel's message is read: a thread that waited
/// before that, since the fault thread did not run, waited longer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct SlowFault {
    /// When it began, in milliseconds after the first fault could be answered.
    pub at_ms: f64,
    /// RAM block of the page, by its name in QEMU.
    pub block: String,
    /// Where the page begins in that block, in bytes.
    pub offset: u64,
    /// All of it.
    pub total_us: f64,
    /// Until its read was handed to the fabric. 0: another read brought the page, or it was there.
    pub asked_us: f64,
    /// Until the page had arrived. 0: it was there.
    pub read_us: f64,
    /// Until it was mapped into QEMU.
    pub map_us: f64,
    /// The page came by a read of its own; if not, a bulk read under way brought it, or had brought it.
    pub own_read: bool,
}

/// One phase of the migration. Phases do not overlap; their names are those of [`crate::progress::Phase`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PhaseTime {
    /// Name of the phase.
    pub name: String,
    /// Begin, in milliseconds after the request was taken.
    pub start_ms: f64,
    /// Duration in milliseconds.
    pub duration_ms: f64,
}

/// How far a migration was at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ProgressPoint {
    /// When, in milliseconds after the request was taken.
    pub at_ms: f64,
    /// Bytes on the wire until then.
    pub sent_bytes: u64,
    /// Bytes of guest memory that were left: of the round, and once the guest was stopped in all.
    pub left_bytes: u64,
}

/// One pre-copy round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct RoundStats {
    /// Pages that were to be sent in this round (zero pages included), in pages of the backing.
    pub pages: u64,
    /// Of these, pages known to be zero.
    pub zero: u64,
    /// Wall time of the round in milliseconds.
    pub duration_ms: f64,
    /// Cost of the scan that opened the round, in microseconds.
    pub scan_us: f64,
    /// Pages per second the guest dirtied meanwhile.
    pub dirty_pages_per_s: f64,
}

impl RoundStats {
    /// A round that was made in two parts.
    #[must_use]
    pub fn followed_by(self, part: Self) -> Self {
        Self {
            pages: self.pages + part.pages,
            zero: self.zero + part.zero,
            duration_ms: self.duration_ms + part.duration_ms,
            scan_us: part.scan_us,
            dirty_pages_per_s: part.dirty_pages_per_s,
        }
    }
}

/// How a visit ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum VisitEnd {
    /// The guest came home. What it had not touched has never left it.
    Home,
    /// It stays: all of its memory has followed it.
    Stayed,
    /// The guest ended on its visit, by itself or by an operator. Its home has kept nothing.
    Ended,
}

/// The result of one migration. Times are CLOCK_MONOTONIC.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct Report {
    /// Version of this schema: 1.
    pub schema: u32,
    /// Session id.
    pub id: String,
    /// When the request was taken, by this node's clock: RFC 3339, UTC, milliseconds. `None`: a migration of an earlier release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub began_at: Option<String>,
    /// Name of the VM.
    pub vm: String,
    /// Node it came from.
    pub source: String,
    /// Node it went to.
    pub destination: String,
    /// Mode that was used.
    pub mode: String,
    /// Of a guest that went for a visit: how that ended. `bytes_sent` is what followed the guest until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub visit: Option<VisitEnd>,
    /// Why this mode: `requested`, or the prediction in a sentence.
    pub mode_reason: String,
    /// Fabric back end that moved the pages.
    pub fabric: String,
    /// Why this fabric.
    pub fabric_reason: String,
    /// Backing of guest memory at the destination: `thp`, `hugetlb-2m`, `hugetlb-1g`.
    pub memory: String,
    /// From the request to the end: the destination holds all pages, the source QEMU has ended.
    pub total_ms: f64,
    /// From the source's QMP STOP event to the destination's RESUME event. 0 if the guest was paused before.
    pub downtime_ms: f64,
    /// Uncertainty of `downtime_ms` from comparing two hosts' clocks; 0 on one host.
    pub downtime_error_ms: f64,
    /// Part of `total_ms` before the first page byte: checks, destination QEMU, attach.
    pub setup_ms: f64,
    /// Pre-copy rounds.
    pub rounds: Vec<RoundStats>,
    /// Why the rounds ended.
    pub rounds_reason: String,
    /// What the rounds measured of the link, in bytes of page payload per second: the next `auto` to this node may count on it. `None`: too
    /// little crossed in rounds to say so, or `--bandwidth` held them back.
    pub link_bytes_per_s: Option<f64>,
    /// What was promised before it began. `None`: no goals were given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promise: Option<Promise>,
    /// How the guest went, if that was chosen by what it was to read there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<Choice>,
    /// What came of each goal.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub verdict: Vec<Verdict>,
    /// What copying in the background has used of the processors of each host.
    pub host_cpu: HostCpuUse,
    /// Bytes on the wire for pages and device state, headers included, both directions.
    pub bytes_sent: u64,
    /// Device state alone.
    pub state_bytes: u64,
    /// Pages of guest RAM, in pages of the backing.
    pub pages_total: u64,
    /// Pages that were zero when the guest stopped and were not sent.
    pub pages_zero: u64,
    /// Pages left to fetch when the guest resumed.
    pub pages_after_resume: u64,
    /// Page size of the backing in bytes.
    pub page_size: u64,
    /// Cost of dirty scanning: microseconds per GiB of guest RAM, mean over the rounds; 0 without rounds.
    pub scan_us_per_gib: f64,
    /// How direct I/O in flight was excluded, or that there was none.
    pub direct_io: String,
    /// Fault latency at the destination.
    pub faults: FaultStats,
    /// The ten slowest of them, slowest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slowest_faults: Vec<SlowFault>,
    /// Where the time went.
    pub phases: Vec<PhaseTime>,
    /// What the pause consisted of: its steps from STOP to RESUME, one after the other, in milliseconds after STOP. Empty if the guest was
    /// paused before, or the source's daemon was started anew meanwhile.
    pub pause: Vec<PhaseTime>,
    /// How far it was over time, at the source: a few points each second, and at most 100, so that longer migrations have fewer each second.
    /// Empty for one of an earlier release, and at the destination.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub over_time: Vec<ProgressPoint>,
    /// `Some(true)`: every page hashed equal on both sides, and each disk that moved is the one that the guest left. `None`: not asked for, or not known.
    pub verified: Option<bool>,
    /// The guest was left paused, as asked.
    pub paused: bool,
    /// libvirt had the guest run at the source, too, after it had run at the destination: what was done about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_copy: Option<String>,
    /// How often the session lost its peer or its own daemon and went on.
    pub recoveries: u32,
    /// What others on the network see of the move. `None`: the guest has no tap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkStats>,
    /// Devices of the nodes that the guest owns: how long it was without each. `downtime_ms` has no part of it.
    pub devices: Vec<DeviceTimes>,
    /// What was sent ahead while the guest had its devices, or why nothing was. `None`: it owns none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_start: Option<HeadStartStats>,
    /// How long the script took that was run in the guest before its devices left.
    pub quiesce_ms: Option<f64>,
    /// How long the script took that was run in the guest when it had its devices again.
    pub resume_ms: Option<f64>,
    /// How long that script waited until all guests of its group had their devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_waited_ms: Option<f64>,
    /// Why that script did not end as it should.
    pub resume_problem: Option<String>,
    /// Disks that moved with the guest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskReport>,
}

/// What the migration's own threads have used of the processors of its two hosts for copying in the background: reads of pages that nobody waits for, the
/// answers to them, scans, naming, hashing. What the guest waited for, page faults and the switchover, is not counted, nor what the kernel does
/// outside of these threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct HostCpuUse {
    /// At the source. `None`: not known here, or its daemon was started anew meanwhile.
    pub source: Option<CpuUse>,
    /// At the destination. `None`: likewise.
    pub destination: Option<CpuUse>,
}

/// What was used of the processors of one host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct CpuUse {
    /// Processor time. Unit: milliseconds.
    pub cpu_ms: f64,
    /// The same as a share of the time of all processors that the daemon may run on, from the first such work to the end of the migration. Unit: percent.
    pub percent: f64,
    /// How many processors these are.
    pub processors: u32,
}

impl HostCpuUse {
    /// Of the host at which it was more. Unit: percent.
    #[must_use]
    pub fn most(&self) -> Option<f64> {
        let shares = [self.source, self.destination].into_iter().flatten().map(|host| host.percent);
        shares.reduce(f64::max)
    }
}

/// What others on the network see of a move.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct NetworkStats {
    /// From RESUME until the first announcement of the guest's addresses went out at the destination, in milliseconds: from then on switches send its
    /// frames there. `None`: not known.
    pub announced_ms: Option<f64>,
    /// Frames that came to the source for the guest from its stop on, and were passed on to the destination.
    pub frames_passed_on: u64,
    /// Such frames for which the source had no room.
    pub frames_lost: u64,
    /// Why frames of a tap were not passed on: what comes while the guest stands still is lost then, and clients send it again.
    pub problem: Option<String>,
}

/// Memory that was sent ahead while the guest had its devices. Nobody sees what a device writes, so what the guest itself had not written since was compared
/// when they had left, and the rest crossed again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct HeadStartStats {
    /// Whether memory was sent ahead. If not, the other figures are of what was tried before that was decided.
    pub made: bool,
    /// Why, or why not.
    pub reason: String,
    /// Rounds of it.
    pub rounds: u32,
    /// Bytes of pages that crossed in them.
    pub sent_bytes: u64,
    /// How long they took, in milliseconds.
    pub duration_ms: f64,
    /// Bytes of pages that were compared when the devices had left.
    pub compared_bytes: u64,
    /// Of these, bytes that differed, and crossed again.
    pub changed_bytes: u64,
    /// How long that took, in milliseconds.
    pub compare_ms: f64,
}

/// How a device was exchanged for another of the destination. Times are CLOCK_MONOTONIC, in milliseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct DeviceTimes {
    /// What it is to the guest.
    pub role: String,
    /// Its address at the source.
    pub source: String,
    /// Address at the destination of the device that took its place.
    pub destination: String,
    /// From the first request to the guest until it had let the device go.
    pub unplug_ms: f64,
    /// From then until the other device was about to be plugged in: the move itself. `None` if it was not.
    pub away_ms: Option<f64>,
    /// Until it was plugged in. QEMU's main loop stands meanwhile, since all guest memory is pinned. `None` if it was not.
    pub plug_ms: Option<f64>,
    /// Why the guest lacks it.
    pub problem: Option<String>,
    /// Why the source's device was not given back to its driver.
    pub left_at_source: Option<String>,
}

impl Report {
    /// An empty report of schema 1.
    #[must_use]
    pub fn new(id: String, vm: String, mode: Mode) -> Self {
        Self { schema: 1, id, vm, mode: mode.to_string(), ..Self::default() }
    }
}
