//! What can be changed about a request or a fleet.

use serde::{Deserialize, Serialize};

use crate::model::{DeviceKind, NodeName, NodeState};

/// A change of a request, or of the fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "change")]
#[non_exhaustive]
pub enum Change {
    /// More hops between two VMs.
    MaxHops {
        /// The limits of the request: `max_hops 1`, `level leaf`.
        from: String,
        /// The fewest hops with which it fits.
        to: u32,
    },
    /// More leaf switches.
    LeafSwitches {
        /// Those of the request.
        from: u32,
        /// The fewest with which it fits.
        to: u32,
    },
    /// More VMs in one domain of failure.
    AntiAffinity {
        /// Those of the request.
        from: u32,
        /// The fewest with which it fits.
        to: u32,
    },
    /// More hops to the data.
    NearHops {
        /// Those of the request.
        from: u32,
        /// The fewest with which it fits.
        to: u32,
    },
    /// Something that is required is only preferred, or left out.
    Without {
        /// The group of VMs.
        group: String,
        /// What the request asks for: `numa_policy=required`.
        condition: String,
        /// It is about how the parts of a VM are arranged, not about what the VM gets.
        arrangement: bool,
    },
    /// Fewer VMs.
    Vms {
        /// The group of VMs.
        group: String,
        /// Those of the request.
        from: u64,
        /// The most with which it fits.
        to: u64,
    },
    /// Fewer devices for each VM.
    Devices {
        /// The group of VMs.
        group: String,
        /// Kind of device.
        kind: DeviceKind,
        /// Those of the request.
        from: u64,
        /// The most with which it fits.
        to: u64,
    },
    /// Fewer cores for each VM.
    Cores {
        /// The group of VMs.
        group: String,
        /// Those of the request.
        from: u64,
        /// The most with which it fits.
        to: u64,
    },
    /// Less memory for each VM.
    Memory {
        /// The group of VMs.
        group: String,
        /// That of the request, MiB.
        from: u64,
        /// As much as fits, MiB, to within a 64th of what was asked for.
        to: u64,
    },
    /// Nodes that the request excludes.
    ExcludedNodes,
    /// Nodes take VMs that do not now.
    Nodes {
        /// Their state now.
        state: NodeState,
        /// The fewest that were found to suffice.
        names: Vec<NodeName>,
    },
    /// Nothing else is leased.
    OtherLeases,
}

impl Change {
    /// Smaller is nearer: the kind of change, and the share that is given up, in thousandths.
    pub(super) fn rank(&self) -> (u8, u64) {
        let share = |from: &u64, to: &u64| (from - to) * 1000 / (*from).max(1);
        match self {
            Self::MaxHops { .. }
            | Self::LeafSwitches { .. }
            | Self::AntiAffinity { .. }
            | Self::NearHops { .. } => (0, 0),
            Self::Without { arrangement: true, .. } => (1, 0),
            Self::Vms { from, to, .. }
            | Self::Devices { from, to, .. }
            | Self::Cores { from, to, .. }
            | Self::Memory { from, to, .. } => (2, share(from, to)),
            Self::Without { .. } => (3, 0),
            Self::ExcludedNodes => (4, 0),
            Self::Nodes { .. } => (5, 0),
            Self::OtherLeases => (6, 0),
        }
    }

    /// For people, without the nodes. `several`: the request has several groups.
    pub(super) fn text(&self, several: bool) -> String {
        let of = |group: &str| if several { format!(" for {group}") } else { String::new() };
        match self {
            Self::MaxHops { from, to } => format!("fits with max_hops {to} instead of {from}"),
            Self::LeafSwitches { from, to } => {
                format!("fits with max_leaf_switches {to} instead of {from}")
            }
            Self::AntiAffinity { from, to } => {
                format!("fits with anti-affinity of at most {to} VMs instead of {from} in one domain")
            }
            Self::NearHops { from, to } => format!("fits with {to} hops to the data instead of {from}"),
            Self::Without { group, condition, .. } => format!("fits without {condition}{}", of(group)),
            Self::Vms { group, from, to } => format!("fits {to} of {from} VMs{}", of(group)),
            Self::Devices { group, kind, from, to } => {
                let name = plural(*kind, *to);
                let to = if *to == 0 { "no".to_owned() } else { to.to_string() };
                format!("fits with {to} {name} instead of {from}{}", of(group))
            }
            Self::Cores { group, from, to } => {
                let cores = if *to == 1 { "core" } else { "cores" };
                format!("fits with {to} {cores} instead of {from}{}", of(group))
            }
            Self::Memory { group, from, to } => {
                format!("fits with {to} MiB of memory instead of {from}{}", of(group))
            }
            Self::ExcludedNodes => "fits without only_nodes and not_nodes".to_owned(),
            Self::Nodes { state, names } => {
                let all: Vec<&str> = names.iter().map(NodeName::as_str).collect();
                let were = if names.len() == 1 { "were" } else { "all were" };
                format!("fits if {} {were} not {state}:", all.join(", "))
            }
            Self::OtherLeases => "fits if nothing else were leased:".to_owned(),
        }
    }
}

fn plural(kind: DeviceKind, count: u64) -> String {
    let name = kind.name();
    if count == 1 { name.to_owned() } else { format!("{name}s") }
}
