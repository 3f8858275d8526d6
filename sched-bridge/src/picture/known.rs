//! What is known of nodes and clusters, as pictures need it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Fleet, NodeSeen};
use crate::model::{DeviceKind, NodeName, NodeState};
use crate::topology::Topology;

pub(super) struct Known<'a> {
    pub fleet: Option<&'a Fleet>,
    /// All nodes of the picture.
    pub shown: Vec<&'a NodeName>,
    /// Those below no switch.
    pub alone: Vec<&'a NodeName>,
    /// By number of VMs, the largest first.
    pub clusters: Vec<Cluster<'a>>,
    /// The end that all names of nodes share.
    pub domain: String,
    seen: HashMap<&'a str, &'a NodeSeen>,
    /// What clusters, by their place in `clusters`, have of each node.
    held: HashMap<&'a str, BTreeMap<usize, Part<'a>>>,
}

pub(super) struct Cluster<'a> {
    pub name: &'a str,
    pub letters: String,
    pub vms: usize,
}

/// What a cluster has of a node.
#[derive(Default)]
pub(super) struct Part<'a> {
    pub vms: BTreeSet<&'a str>,
    pub gpus: usize,
    pub adapters: usize,
}

impl<'a> Known<'a> {
    pub fn new(topology: &'a Topology, fleet: Option<&'a Fleet>) -> Self {
        let nodes = fleet.map_or(&[][..], |fleet| &fleet.nodes);
        let seen = nodes.iter().map(|node| (node.name.as_str(), node)).collect();
        let placed = topology.roots().flat_map(|root| topology.nodes_below(root));
        let mut shown: Vec<&NodeName> = placed.collect();
        let alone: Vec<&NodeName> = nodes
            .iter()
            .map(|node| &node.name)
            .filter(|name| topology.leaf_of(name.as_str()).is_none())
            .collect();
        shown.extend(&alone);
        let mut known = Self {
            fleet,
            domain: domain(&shown),
            shown,
            alone,
            clusters: Vec::new(),
            seen,
            held: HashMap::new(),
        };
        if let Some(fleet) = fleet {
            known.count(fleet);
        }
        known
    }

    fn count(&mut self, fleet: &'a Fleet) {
        let mut sized: Vec<_> = fleet
            .clusters
            .iter()
            .map(|(name, held)| (held.iter().map(|one| &one.vm).collect::<BTreeSet<_>>().len(), name, held))
            .collect();
        sized.sort_by_key(|(vms, name, _)| (std::cmp::Reverse(*vms), *name));
        for (at, (vms, name, held)) in sized.into_iter().enumerate() {
            self.clusters.push(Cluster { name, letters: letters(at), vms });
            for one in held {
                let part = self.held.entry(one.node.as_str()).or_default().entry(at).or_default();
                part.vms.insert(one.vm.as_str());
                part.gpus += one.count(DeviceKind::Gpu);
                part.adapters += one.devices.iter().filter(|device| device.kind.is_network()).count();
            }
        }
    }

    /// What the bridge knows of a node; nothing if it has no inventory.
    pub fn node(&self, name: &NodeName) -> Option<&'a NodeSeen> {
        self.seen.get(name.as_str()).copied()
    }

    pub fn parts(&self, name: &NodeName) -> impl Iterator<Item = (usize, &Part<'a>)> {
        self.held.get(name.as_str()).into_iter().flatten().map(|(at, part)| (*at, part))
    }

    /// A name without the end that all share.
    pub fn short<'b>(&self, name: &'b NodeName) -> &'b str {
        name.as_str().strip_suffix(self.domain.as_str()).unwrap_or(name.as_str())
    }

    /// A node and all VMs there, a line each.
    pub fn described(&self, name: &NodeName) -> String {
        let mut lines = vec![match self.node(name) {
            Some(node) => format!("{name}: {}", node.state),
            None if self.fleet.is_some() => format!("{name}: no inventory"),
            None => name.to_string(),
        }];
        for (at, part) in self.parts(name) {
            let cluster = self.clusters[at].name;
            lines.extend(part.vms.iter().map(|vm| format!("{cluster}: {vm}")));
        }
        lines.join("\n")
    }

    /// The state of a node that no VMs are put on, with its class.
    pub fn away(&self, name: &NodeName) -> Option<(&'static str, &'static str)> {
        self.fleet?;
        match self.node(name).map(|node| node.state) {
            Some(NodeState::Up) => None,
            Some(NodeState::Drained) => Some(("drained", "v-drained")),
            Some(NodeState::Down) => Some(("down", "v-down")),
            None => Some(("no inventory", "v-unknown")),
        }
    }

    /// What is free of nodes, and how many are away.
    pub fn summary(&self, names: &[&NodeName]) -> String {
        let nodes: Vec<&NodeSeen> = names.iter().filter_map(|name| self.node(name)).collect();
        let sum = |of: fn(&NodeSeen) -> usize| nodes.iter().map(|node| of(node)).sum::<usize>();
        let mut said = number(names.len(), "node");
        for (what, all, free) in [
            ("GPU", sum(|node| node.gpus), sum(|node| node.gpus_free)),
            ("adapter", sum(|node| node.adapters), sum(|node| node.adapters_free)),
        ] {
            if all > 0 {
                said.push_str(&format!(", {free} of {} free", number(all, what)));
            }
        }
        for state in ["drained", "down", "no inventory"] {
            let count =
                names.iter().filter(|name| self.away(name).is_some_and(|away| away.0 == state)).count();
            match count {
                0 => {}
                count if state == "no inventory" => said.push_str(&format!(", {count} without an inventory")),
                count => said.push_str(&format!(", {count} {state}")),
            }
        }
        said
    }
}

/// `1 VM`, `2 VMs`.
pub(super) fn number(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A to Z, AA, AB and so on.
fn letters(at: usize) -> String {
    let letter = u8::try_from(at % 26).map_or('?', |number| char::from(b'A' + number));
    if at < 26 { letter.to_string() } else { format!("{}{letter}", letters(at / 26 - 1)) }
}

/// The end that all names share, from a dot on.
fn domain(names: &[&NodeName]) -> String {
    let Some((first, others)) = names.split_first() else { return String::new() };
    let first = first.as_str();
    let dots = first.match_indices('.').map(|(at, _)| first.split_at(at));
    let shared = |end: &&str| others.iter().all(|name| name.as_str().ends_with(*end));
    dots.filter(|(begin, _)| !begin.is_empty())
        .map(|(_, end)| end)
        .find(shared)
        .unwrap_or_default()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_go_on_behind_z() {
        assert_eq!([0, 25, 26, 27, 701, 702].map(letters), ["A", "Z", "AA", "AB", "ZZ", "AAA"]);
    }

    #[test]
    fn the_domain_that_all_share() {
        for (names, end) in [
            (&["a.x.org", "b.x.org"][..], ".x.org"),
            (&["a.x.org", "b.y.org"], ".org"),
            (&["a.x.org", "b"], ""),
            (&["n1", "n2"], ""),
            (&[], ""),
        ] {
            let names: Vec<NodeName> = names.iter().map(|name| NodeName::new(*name).unwrap()).collect();
            assert_eq!(domain(&names.iter().collect::<Vec<_>>()), end);
        }
    }
}
