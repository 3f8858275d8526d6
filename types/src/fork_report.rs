//! What a fork tells of itself. The field names are part of the interface.

use std::fmt;
use std::path::PathBuf;

use crate::fork_devices::{ChildDeviceReport, ParentDevice};
use crate::report::{FaultStats, PhaseTime};
use serde::{Deserialize, Serialize};

/// One child.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ChildReport {
    /// Name of the VM.
    pub name: String,
    /// Its number among the children of its parent, from 1.
    pub index: u32,
    /// Node it is on.
    pub node: String,
    /// Its monitor socket.
    pub qmp: String,
    /// Process id of its QEMU; 0 if it did not come to be.
    pub pid: i32,
    /// From the request until it executed guest code, in milliseconds; absent if it never did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running_ms: Option<f64>,
    /// It was prepared beforehand.
    pub warm: bool,
    /// `--verify`: its memory was the template's before it ran, to the last byte but those of `written_while_loading`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified: Option<bool>,
    /// `--verify`: bytes that QEMU or KVM wrote into its memory while the device state was loaded, as they do for every guest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub written_while_loading: Vec<LoadWrite>,
    /// What became of its network: `none`, `up`, or why it is down.
    pub network: String,
    /// Its NICs that are given by `-device`, in the order of the command line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<ChildNic>,
    /// Devices that it got.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<ChildDeviceReport>,
    /// Why the script did not end as it should that was to run in it when it had its devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_problem: Option<String>,
    /// Why it did not come to be, or was ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// An emulated NIC of a child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ChildNic {
    /// Its network back end (`-netdev`).
    pub netdev: String,
    /// Its MAC address.
    pub mac: String,
    /// That of the same NIC of its parent; absent if the parent's command line has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parents: Option<String>,
}

/// Bytes of a child's memory that were written while its device state was loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LoadWrite {
    /// What they are.
    pub what: LoadWriteKind,
    /// RAM block, by number.
    pub block: usize,
    /// Offset in the RAM block, in bytes.
    pub offset: u64,
    /// How many bytes, from there on; some may be the template's by chance.
    pub bytes: u64,
}

/// What is written into a guest's memory while its device state is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LoadWriteKind {
    /// The child's VM Generation ID, by QEMU.
    GenerationId,
    /// The paravirtual clock of a virtual CPU, by KVM.
    KvmClock,
    /// The paravirtual wall clock, by KVM.
    KvmWallClock,
}

impl fmt::Display for LoadWriteKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::GenerationId => "QEMU: VM Generation ID",
            Self::KvmClock => "KVM: clock",
            Self::KvmWallClock => "KVM: wall clock",
        })
    }
}

/// What was sent to many hosts at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Multicast {
    /// Bytes on the parent's link.
    pub sent_bytes: u64,
    /// Chunks that did not arrive at some host.
    pub lost_chunks: u64,
    /// Chunks that were fetched again.
    pub repaired_chunks: u64,
}

/// Another host's part in a fork.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HostReport {
    /// The node, as it was named in the request.
    pub node: String,
    /// Children that were to be there.
    pub children: usize,
    /// Children that run there: all, or none.
    pub running: usize,
    /// Bytes that it read from the parent's node.
    pub from_root_bytes: u64,
    /// Bytes that it read from other hosts.
    pub from_hosts_bytes: u64,
    /// Bytes that came to it by multicast and were wanted.
    pub multicast_bytes: u64,
    /// Pieces (chunks of 4 KiB, or what one datagram carries) that it read because datagrams were lost.
    pub repaired: u64,
    /// Chunks that arrived with wrong bytes, and were asked for again.
    pub wrong: u64,
    /// From the request until the whole template was there, in milliseconds; absent if it never was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_ms: Option<f64>,
    /// Chunks that a child waited for, each once however many children did.
    #[serde(default)]
    pub wanted: u64,
    /// By what it read from the parent's node in the end: `verbs` or `tcp`; absent if it has no children.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<String>,
    /// Why that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric_reason: Option<String>,
    /// How its children get at the images of disks that the guest wrote to: `shared path` or `nbd`; absent without such disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<String>,
    /// Why that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks_reason: Option<String>,
    /// Faults of its children before the whole template was there; absent if they ran only then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faults: Option<FaultStats>,
    /// Why there are no children there, or not any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What a way to distribute the template would have cost.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct WayEstimate {
    /// `unicast`, `multicast`, `pipeline` or `two-stage`.
    pub way: String,
    /// Seconds until all hosts would have everything.
    pub seconds: f64,
    /// How they come about.
    pub arithmetic: String,
}

/// How the template came to other hosts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Distribution {
    /// `unicast`, `multicast`, `pipeline` or `two-stage`.
    pub way: String,
    /// It was asked for; otherwise it is the first of the estimates.
    pub asked: bool,
    /// Bytes of the template that are not zero.
    pub memory_bytes: u64,
    /// Bytes of that which the guest had written to again when the order was made, and what lies around them: they went first.
    #[serde(default)]
    pub first_bytes: u64,
    /// Bytes that left the parent's node, with the headers of fabric and datagrams and without those of TCP, IP and below.
    pub root_bytes: u64,
    /// From the request until the table of checksums was made, in milliseconds.
    pub prepared_ms: f64,
    /// All ways that were possible, the shortest first.
    pub estimates: Vec<WayEstimate>,
}

/// A fork that has ended.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkReport {
    /// Id of the fork.
    pub id: String,
    /// Name of the guest that was forked, or of the template.
    pub parent: String,
    /// Children, by number.
    pub children: Vec<ChildReport>,
    /// How long the parent stood still, from its STOP to its RESUME, in milliseconds; 0 for one that was paused, and
    /// for a template.
    pub parent_pause_ms: f64,
    /// From the request until that STOP, in milliseconds; absent for one that was paused, and for a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_stopped_ms: Option<f64>,
    /// `let_run`: from the request until the parent ran on, in milliseconds; absent for one that was not paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran_on_ms: Option<f64>,
    /// From the request until the last child executed guest code, in milliseconds.
    pub all_running_ms: f64,
    /// From the request until nothing was left to do, hooks and networks included, in milliseconds.
    pub complete_ms: f64,
    /// Distribution to other hosts.
    pub multicast: Multicast,
    /// How children come to the template: `local` on one host; where there are others what their hosts read it by, `verbs` or
    /// `tcp`, or `tcp, verbs` if these are not all the same; empty if none has it.
    pub fabric: String,
    /// Why, if there are other hosts.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fabric_reason: String,
    /// Other hosts, in the order of the request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostReport>,
    /// How the template came to them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distribution: Option<Distribution>,
    /// How the parent's memory was frozen; absent for a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freeze: Option<FreezeReport>,
    /// The parent was given memory of its own before this fork, since an earlier one had left it none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_memory_before: Option<OwnMemory>,
    /// The parent was given memory of its own after this fork, so that it can be moved and forked again. Absent for a template, where
    /// memory was copied instead (`freeze`), where it could not be done (see `warnings`), and for a guest that asked for the fork, which is
    /// answered first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_memory: Option<OwnMemory>,
    /// How long the parent stood still for this fork in all steps together, in milliseconds: `parent_pause_ms`, and what it was stopped or
    /// had to wait while it was given memory of its own. What it waited counts fully even if only one of its processors did.
    #[serde(default)]
    pub parent_stood_still_ms: f64,
    /// Disks of the parent that were frozen, and what it writes to since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<FrozenDisk>,
    /// Devices that the parent was without, and for how long. No part of that is in `parent_pause_ms`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<ParentDevice>,
    /// How long the script took that was run in the parent before its devices left, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesce_ms: Option<f64>,
    /// How long the script took that was run in the parent when it had its devices again, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_ms: Option<f64>,
    /// Why that script did not end as it should.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_problem: Option<String>,
    /// What the operator should know.
    pub warnings: Vec<String>,
}

impl ForkReport {
    /// Whether the parent or a child lacks a device that it should have.
    #[must_use]
    pub fn lacks_devices(&self) -> bool {
        let of_children = self.children.iter().flat_map(|child| &child.devices);
        self.devices.iter().any(|device| device.problem.is_some())
            || of_children.into_iter().any(|device| device.problem.is_some())
    }
}

/// How a guest's memory was frozen.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FreezeReport {
    /// `remapped`: its file is the template. `write-protected`: it was copied to the template while the guest ran.
    pub way: String,
    /// Why it could not be remapped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Pages of 4 KiB that were copied since the guest was about to write there; it waited.
    pub pages_by_faults: u64,
    /// Pages of 4 KiB that were copied in the background.
    pub pages_by_copy: u64,
    /// What of them was not zero, in bytes: memory that the template takes.
    pub kept_bytes: u64,
    /// From the guest's RESUME until the copy was whole, in milliseconds.
    pub whole_ms: f64,
}

/// A VM was given memory of its own after a fork, while it ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct OwnMemory {
    /// Bytes copied from the template.
    pub template_bytes: u64,
    /// Bytes copied that the guest had written since the fork.
    pub own_bytes: u64,
    /// How often somebody (the guest, QEMU, the kernel for them) waited for the 2 MiB, or the huge page, that was being moved.
    pub waits: u64,
    /// How long all of them waited together, in milliseconds, at most.
    pub waited_ms: f64,
    /// The longest of these times, at most.
    pub longest_wait_ms: f64,
    /// How long the guest was stopped for it, in milliseconds: only if a disk uses direct I/O.
    pub pause_ms: f64,
    /// All of it, in milliseconds.
    pub total_ms: f64,
}

impl OwnMemory {
    /// How long the guest stood still for it, at most, in milliseconds.
    #[must_use]
    pub fn stood_still_ms(&self) -> f64 {
        self.pause_ms + self.waited_ms
    }
}

/// How far a copy of a guest's memory has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct KeepProgress {
    /// Pages of 4 KiB that are in the template.
    pub pages: u64,
    /// Pages in all.
    pub of: u64,
}

/// How far a guest is with getting memory of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct RehomeProgress {
    /// Bytes that are done.
    pub bytes: u64,
    /// Bytes in all: the guest's memory counts twice, since it is first copied as it was at the fork, and then what was written since is.
    pub of: u64,
}

/// A disk that was frozen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FrozenDisk {
    /// QEMU's name of the device.
    pub device: String,
    /// The image, which nobody writes any more: parent and children read it.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub base: PathBuf,
    /// What the parent writes to since the fork.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub overlay: PathBuf,
}

/// Where a fork stands.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkProgress {
    /// Id of the fork.
    pub id: String,
    /// Name of the guest.
    pub parent: String,
    /// `check`, `rehome`, `detach`, `freeze`, `copy`, `fetch`, `load`, `run`, `network`, `devices`, `hosts`, `done` or `failed`; `unknown, see FILE` if its
    /// journal cannot be read, and then the numbers mean nothing.
    pub phase: String,
    /// When the request came, by this node's clock: RFC 3339, UTC, milliseconds. `None`: not known any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began_at: Option<String>,
    /// The node whose guest it is, if that is another: this one has children of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ordered_by: Option<String>,
    /// Phases that are over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<PhaseTime>,
    /// Children asked for.
    pub children: usize,
    /// Children whose QEMU is there.
    pub prepared: usize,
    /// Children that hold memory and device state.
    pub loaded: usize,
    /// Children that run.
    pub running: usize,
    /// The copy of the parent's memory, where it could not be remapped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<KeepProgress>,
    /// Other hosts, as far as they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostProgress>,
    /// Milliseconds since the request.
    pub elapsed_ms: f64,
    /// The end, when it has come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<ForkReport>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<ForkFailure>,
    /// In phase `rehome`: how far the guest is with getting memory of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rehome: Option<RehomeProgress>,
}

/// Where another host stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HostProgress {
    /// The node, as it was named in the request.
    pub node: String,
    /// `asked`, `fetch`, `load`, `run`, `done` or `failed`.
    pub phase: String,
    /// Chunks of 4 KiB in all; 0 before it knows.
    pub chunks: u32,
    /// Chunks that it misses.
    pub missing: u32,
    /// Children that are to be there.
    #[serde(default)]
    pub children: usize,
    /// Children that run there.
    #[serde(default)]
    pub running: usize,
    /// Bytes that it has read from the parent's node.
    #[serde(default)]
    pub from_root_bytes: u64,
    /// Bytes that it has read from other hosts.
    #[serde(default)]
    pub from_hosts_bytes: u64,
    /// Bytes that came to it by multicast and were wanted.
    #[serde(default)]
    pub multicast_bytes: u64,
    /// Pieces (chunks of 4 KiB, or what one datagram carries) that it read because datagrams were lost.
    #[serde(default)]
    pub repaired: u64,
}

/// Why a fork failed, in the words of the HTTP interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkFailure {
    /// Stable word.
    pub code: String,
    /// For people.
    pub message: String,
    /// What the command ends with.
    pub exit_code: u8,
}

impl ForkProgress {
    /// Whether nothing more is to come.
    #[must_use]
    pub const fn is_end(&self) -> bool {
        self.report.is_some() || self.error.is_some()
    }
}
