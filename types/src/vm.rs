//! Requests and answers about VMs.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Backing;
use crate::device::{DeviceRequest, VmDevice};
use crate::progress::Progress;
use crate::tuning::{PinInfo, PinRequest};

/// Environment variables of QEMU that begin so are labels of its VM: `VMOVE_LABEL_team=ml`. They go where the VM goes, and to its children.
pub const LABEL: &str = "VMOVE_LABEL_";

/// All VMs of a node.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmList {
    /// The node's name; empty if its daemon is of a version that does not tell it.
    #[serde(default)]
    pub node: String,
    /// By name.
    pub vms: Vec<VmSummary>,
}

/// One VM in short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmSummary {
    /// Name, unique on the node.
    pub name: String,
    /// Process id of QEMU.
    pub pid: i32,
    /// QEMU's own word (`running`, `paused`, `inmigrate`, ...), or `migrating` while a migration holds its monitor,
    /// `ended` when the process is gone, `unknown` when its monitor does not answer, and `unknown, see FILE` when its record cannot be
    /// read: then `pid` and `memory_bytes` are 0, and `memory` and `adopted` mean nothing.
    pub status: String,
    /// Backing of guest memory: `thp`, `hugetlb-2m` or `hugetlb-1g`.
    pub memory: Backing,
    /// Size of guest memory. Unit: bytes.
    pub memory_bytes: u64,
    /// Somebody else started this QEMU.
    pub adopted: bool,
    /// A domain of libvirt's: `virsh` starts, moves and ends it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub libvirt: bool,
    /// A VM of Proxmox VE: `qm` starts and ends it, `vmove-pve move` moves it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub proxmox: bool,
    /// Devices of the node that it has, or lacks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceInfo>,
    /// The lease of a bridge into whose grant it was started here; absent if it was started without one, or has come from another node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    /// The migration that holds it now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<String>,
    /// What it waits for: its peer, if the migration has lost that, or a file that cannot be written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
    /// Why it has ended: the daemon did it on its own, or the kernel for lack of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A device of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DeviceInfo {
    /// Which one, and as what.
    #[serde(flatten)]
    pub device: VmDevice,
    /// Whether the VM has it now. Otherwise it lacks it: the device could not be given to it after a move.
    pub held: bool,
}

/// One VM in full.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmDetail {
    /// The short form.
    #[serde(flatten)]
    pub summary: VmSummary,
    /// QEMU version; absent while the monitor cannot be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qemu: Option<String>,
    /// Monitor socket. It serves one client at a time, and the daemon is one: use it for short questions.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub qmp: PathBuf,
    /// Working folder of QEMU.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub dir: PathBuf,
    /// What QEMU printed; absent for adopted ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub log: Option<PathBuf>,
    /// Character devices that can be reached from outside: consoles and the like.
    pub consoles: BTreeMap<String, String>,
    /// Control group of its QEMU, if it has one of its own: a folder of cgroup 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub control_group: Option<PathBuf>,
    /// Processors that it has for itself, and NUMA nodes of its memory; absent if it is not pinned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<PinInfo>,
    /// Why it is not pinned, though that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_pinned: Option<String>,
    /// In the answer to the request that started it: what another node will not take of its command line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Files that hold guest memory.
    pub ram: Vec<RamFileInfo>,
    /// Share of guest memory that QEMU maps by huge pages. 0 to 1; absent if it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_share: Option<f64>,
    /// Command line as the operator gave it.
    pub command_line: Vec<String>,
    /// Environment that QEMU was given.
    pub environment: BTreeMap<String, String>,
    /// The migration that holds it now, in full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
}

/// A file of guest memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct RamFileInfo {
    /// QEMU's id of the memory backend.
    pub id: String,
    /// Where it is.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: PathBuf,
    /// Length. Unit: bytes.
    pub size: u64,
    /// Memory it really holds. Unit: bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
}

/// Starts a VM.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// Name: 1 to 64 bytes of UTF-8 without `/` and control characters.
    pub name: String,
    /// Backing of guest memory: `thp` (default), `hugetlb-2m` or `hugetlb-1g`.
    #[serde(default = "thp")]
    pub memory: String,
    /// QEMU and its arguments. `{vmdir}` and `{name}` are replaced on every node the VM comes to.
    pub command_line: Vec<String>,
    /// Environment variables for QEMU, here and on every node the VM comes to.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Devices of the node that it gets, each on a port where it can be unplugged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceRequest>,
    /// What a bridge lets it have here, signed by the bridge. Needed where the node's configuration says so (`[grants]`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<String>,
    /// Processors that it has for itself, and NUMA nodes of its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<PinRequest>,
}

fn thp() -> String {
    "thp".to_owned()
}

/// Takes in a QEMU that somebody else started.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AdoptRequest {
    /// Name it shall have here.
    pub name: String,
    /// Path of its QMP socket.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub qmp: PathBuf,
}

/// How to end a VM.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub struct StopQuery {
    /// End QEMU by a signal when its monitor does not answer, adopted or not.
    #[serde(default)]
    pub force: bool,
}

/// Whether a guest is to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Running {
    /// Its processors run.
    Running,
    /// They are stopped; memory and devices stay.
    Paused,
}

impl Running {
    /// The command of QEMU's monitor that leads there.
    #[must_use]
    pub const fn command(self) -> &'static str {
        match self {
            Self::Running => "cont",
            Self::Paused => "stop",
        }
    }
}

/// Body of `PUT /v1/vms/{name}/state`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct StateRequest {
    /// What it is to be.
    pub state: Running,
    /// `paused`: it runs on by itself after this time, unless somebody pauses it again or lets it run before. Unit: milliseconds, 1 to 86,400,000. A
    /// daemon that is restarted meanwhile forgets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
}

/// Stopping a VM.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Stopped {
    /// Name of the VM.
    pub name: String,
    /// `quit` (its monitor obeyed) or `killed`.
    pub how: String,
    /// What of its migration cannot be written down yet. The daemon tries again; the VM does not come back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owed: Option<String>,
}
