//! Requests and answers about forks and templates.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::device::ChildDevice;
use crate::fork_devices::{ParentDevice, PartingRequest};
use crate::fork_report::ForkProgress;

/// Forks a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ForkRequest {
    /// Name of the VM; either this or `template`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// Name of a template that is loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// How many children, from 1 on.
    pub count: usize,
    /// Leave the children as the guest was at that moment: loaded and paused, without a network, until `vmove resume`. Only here.
    #[serde(default)]
    pub paused: bool,
    /// Compare each child's memory with the template before it runs.
    #[serde(default)]
    pub verify: bool,
    /// Id for the fork, by which its progress can be asked for meanwhile; one is made up otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// What each child is expected to write, in bytes; without it, one sixteenth of its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_written: Option<u64>,
    /// Children to prepare afterwards for the next fork; without it, as the configuration says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<usize>,
    /// Nodes that children are dealt out to in turn, as `host:port` or a name of the configuration; this node, if it is named.
    /// Without any, all children are here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// Children that are to be here; the others are dealt out to the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub here: Option<usize>,
    /// How many children each of the nodes gets, in the same order: with those `here`, `count` in all. Without it, children are dealt out in turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<usize>,
    /// How the template goes to other nodes; without it, what is estimated to be the shortest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub way: Option<ForkWay>,
    /// On other nodes, children run only when all memory is there; without it, they run at once, and wait for what they touch.
    #[serde(default)]
    pub whole: bool,
    /// Devices for children, in place of those of the parent: `[CHILD:]ROLE=ADDRESS[,mac=…]`. `CHILD` counts from 1: the children here first, then
    /// those of each other node in the order of `nodes`; without it, the first child that lacks the role. A child without one goes on
    /// without the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub devices: Vec<ChildDevice>,
    /// Names of the children, in the order in which they are dealt out; as many as `count`. Without any, they are named after their
    /// parent: `VM.1`, `VM.2`, … Named children are started for the fork: none that is prepared is used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// What a bridge lets children have on their nodes, signed by it, by the name of the child. Needed where a node requires grants.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub grants: BTreeMap<String, String>,
    /// The one child is the guest that the template was made of: it keeps its name (or gets that of `names`), UUID and MAC addresses. Only
    /// its VM Generation ID is new. No request of others has this: they ask for a template to be restored.
    #[serde(skip)]
    pub as_it_was: bool,
    /// A guest that is paused runs on as soon as it is frozen.
    #[serde(default)]
    pub let_run: bool,
    /// How the guest is asked for its devices.
    #[serde(flatten)]
    pub parting: PartingRequest,
}

/// How a template goes to other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ForkWay {
    /// Each node reads from the parent's.
    Unicast,
    /// One datagram to all, repaired where it was lost.
    Multicast,
    /// Nodes read from each other.
    Pipeline,
    /// One node of each leaf switch first, then the others of the leaf from that one.
    TwoStage,
}

/// Children to keep prepared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct WarmRequest {
    /// How many, on each node; 0 ends those that there are.
    pub count: usize,
    /// Nodes on which they are prepared, as `host:port` or a name of the configuration. Without any, this node; a count of 0 then
    /// concerns all nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
}

/// Children that are prepared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Warm {
    /// Name of the VM.
    pub vm: String,
    /// How many on this node.
    pub prepared: usize,
    /// Those on other nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<WarmNode>,
}

/// Prepared children on one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct WarmNode {
    /// The node.
    pub node: String,
    /// How many.
    pub prepared: usize,
}

/// A VM and what came from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkNode {
    /// Name of the VM.
    pub name: String,
    /// Its number among the children of its parent; 0 for one that was not forked from another.
    pub index: u32,
    /// `here`; `unknown`: here, and what was noted of its forks cannot be read (`vmove list` names the file); `fetching`: here, and its memory is still on its way; `ended`; or `elsewhere`: started on another node, which knows what
    /// became of it.
    pub status: String,
    /// Why the daemon ended it, if it did so on its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The node that it was started on, if not this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Its memory is private: it is given memory of its own before it is moved or forked again.
    pub private: bool,
    /// The VM or template that it came from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Where children of it are prepared for the next fork.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prepared: Vec<WarmNode>,
    /// Its children.
    #[cfg_attr(feature = "schema", schema(no_recursion))]
    pub children: Vec<ForkNode>,
}

/// Forks of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkList {
    /// Those whose journals cannot be read first, then the newest.
    pub forks: Vec<ForkProgress>,
}

/// A fork whose journal could not be read was taken up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkRecovered {
    /// Its id.
    pub id: String,
    /// What was done, and what is left to an operator.
    pub note: String,
}

/// How to look at a VM and what came from it.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub struct TreeQuery {
    /// Ask other nodes whether the VM's own children there live; those that do not are `ended`. Those of a node that does not answer
    /// stay `elsewhere`.
    #[serde(default)]
    pub ask: bool,
}

/// A VM was given memory of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Promoted {
    /// Name of the VM.
    pub vm: String,
    /// False if it had memory of its own already.
    pub was_private: bool,
    /// How it went; absent if it had memory of its own already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_memory: Option<crate::fork_report::OwnMemory>,
    /// Devices that the guest was without meanwhile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<ParentDevice>,
    /// Disks that lie over other images: those must stay, and must be where the VM is moved.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskChain>,
}

/// A disk and the images that it is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DiskChain {
    /// QEMU's name of the device.
    pub device: String,
    /// The file that is written, then those below it, which are not.
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub files: Vec<PathBuf>,
}

/// Makes a template of a guest, and writes it to disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TemplateRequest {
    /// Name of the VM.
    pub vm: String,
    /// Name of the template: as names of VMs.
    pub name: String,
    /// A guest that is paused runs on as soon as it is frozen, long before the template is on disk.
    #[serde(default)]
    pub let_run: bool,
    /// How the guest is asked for its devices.
    #[serde(flatten)]
    pub parting: PartingRequest,
}

/// Lets the guest of a template run again as it was then.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RestoreRequest {
    /// Name of the VM; without it, that which the guest had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// Devices of the node in the roles of those that it had: `ROLE=ADDRESS[,mac=…]`. It goes on without those that are not named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub devices: Vec<ChildDevice>,
    /// What a bridge lets the VM have, signed by it. Needed where the node requires grants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<String>,
}

/// A guest that runs again as it was when its template was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Restored {
    /// The template.
    pub template: String,
    /// When it was made, in seconds of the epoch: what the guest did later is lost.
    pub created: u64,
    /// The VM, its devices and its network.
    pub child: crate::fork_report::ChildReport,
    /// From the request until it ran, in milliseconds: to read and verify its memory, to start QEMU, to load the device state.
    pub total_ms: f64,
    /// How it was given memory of its own then, while it ran. Absent for a guest with devices, which gets it when it is next moved or forked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_memory: Option<crate::fork_report::OwnMemory>,
    /// What the operator should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TemplateInfo {
    /// Its name.
    pub name: String,
    /// Id of the fork that made it.
    pub id: String,
    /// The guest that it was.
    pub vm: String,
    /// When, in seconds of the epoch.
    pub created: u64,
    /// Size of guest memory, in bytes.
    pub memory_bytes: u64,
    /// QEMU that wrote it.
    pub qemu: String,
    /// In memory: children can be forked from it.
    pub loaded: bool,
    /// On disk.
    pub saved: bool,
    /// Bytes on disk.
    pub disk_bytes: u64,
    /// How long the guest stood still, in milliseconds; only in the answer to a save.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_pause_ms: Option<f64>,
    /// `let_run`: from the request until the guest ran on, in milliseconds; only in the answer to a save of one that was paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran_on_ms: Option<f64>,
    /// How its memory was frozen; only in the answer to a save.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freeze: Option<crate::fork_report::FreezeReport>,
    /// Roles of devices that its children can get.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<String>,
    /// Devices that the guest was without meanwhile; only in the answer to a save.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<ParentDevice>,
    /// Why the script did not end as it should that was to run in the guest when it had its devices again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_problem: Option<String>,
    /// How it was given memory of its own afterwards; only in the answer to a save.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_memory: Option<crate::fork_report::OwnMemory>,
    /// What the operator should know; only in the answer to a save.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Templates of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TemplateList {
    /// By name.
    pub templates: Vec<TemplateInfo>,
}

/// Something is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Removed {
    /// Its name.
    pub name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `deny_unknown_fields` beside a flattened part: a misspelt field must not be taken for one that was left out.
    #[test]
    fn how_devices_are_asked_for_stands_beside_the_other_fields_and_no_other_is_taken() {
        let text = r#"{"vm":"web","count":2,"quiesce":"stop","unplug_timeout_ms":5000}"#;
        let fork: ForkRequest = serde_json::from_str(text).unwrap();
        assert_eq!(
            (fork.parting.quiesce.as_deref(), fork.parting.unplug_timeout_ms),
            (Some("stop"), Some(5000))
        );
        assert_eq!(
            serde_json::from_str::<ForkRequest>(&serde_json::to_string(&fork).unwrap()).unwrap(),
            fork
        );
        let save =
            serde_json::from_str::<TemplateRequest>(r#"{"vm":"web","name":"t","resume":"go"}"#).unwrap();
        assert_eq!(save.parting.resume.as_deref(), Some("go"));
        let wrong =
            serde_json::from_str::<ForkRequest>(r#"{"vm":"web","count":2,"quiesc":"stop"}"#).unwrap_err();
        assert!(wrong.to_string().contains("unknown field `quiesc`"), "{wrong}");
        serde_json::from_str::<TemplateRequest>(r#"{"vm":"web","name":"t","parting":{}}"#).unwrap_err();
    }
}
