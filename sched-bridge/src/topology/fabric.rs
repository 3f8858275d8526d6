//! From a graph of switches to a tree.
//!
//! A fat tree is not a tree: a leaf switch has many spine switches. What counts for distance is at which level leaf switches meet. So
//! each switch gets a rank, its distance from the nearest leaf switch, and leaf switches that are connected by switches up to a
//! rank are put below one switch of the tree, which represents all of these. In a fat tree this gives the true distance of any two
//! leaf switches; in other networks a note says for how many pairs it does not.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::names::valid;
use super::{Builder, Origin, Style, SwitchName, SwitchSpec, Topology, TopologyError};
use crate::ids::NodeName;

/// A topology, and what an operator should know about its import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// The tree.
    pub topology: Topology,
    /// What was simplified.
    pub notes: Vec<String>,
}

/// Leaf switches between which distances are checked, at most.
const CHECKED: usize = 400;

/// Switches, links between them, and hosts.
#[derive(Debug, Default)]
pub(super) struct Fabric {
    index: BTreeMap<String, usize>,
    names: Vec<String>,
    links: Vec<BTreeSet<usize>>,
    /// Adapters of each host, by switch.
    hosts: BTreeMap<NodeName, BTreeMap<usize, BTreeSet<String>>>,
}

impl Fabric {
    pub fn switch(&mut self, name: &str) -> usize {
        if let Some(at) = self.index.get(name) {
            return *at;
        }
        let at = self.names.len();
        self.index.insert(name.to_owned(), at);
        self.names.push(name.to_owned());
        self.links.push(BTreeSet::new());
        at
    }

    pub fn link(&mut self, a: &str, b: &str) {
        let (a, b) = (self.switch(a), self.switch(b));
        if a != b {
            self.links[a].insert(b);
            self.links[b].insert(a);
        }
    }

    pub fn host(&mut self, switch: &str, host: NodeName, adapter: &str) {
        let at = self.switch(switch);
        self.hosts.entry(host).or_default().entry(at).or_default().insert(adapter.to_owned());
    }

    pub fn tree(self) -> Result<Imported, TopologyError> {
        let mut notes = Vec::new();
        let mut nodes: Vec<Vec<NodeName>> = vec![Vec::new(); self.names.len()];
        let mut rails = 0;
        for (host, adapters) in &self.hosts {
            rails += usize::from(adapters.len() > 1);
            // The leaf switch with most of its adapters; among equals, that of the first adapter.
            let home = adapters.iter().min_by_key(|(_, own)| (usize::MAX - own.len(), own.first().cloned()));
            if let Some((home, _)) = home {
                nodes[*home].push(host.clone());
            }
        }
        if rails > 0 {
            notes.push(format!(
                "{rails} hosts have adapters on several leaf switches (rails); each is placed below the switch with most of its adapters"
            ));
        }
        let ranks = self.distances(|at| !nodes[at].is_empty());
        let lost = ranks.iter().filter(|rank| rank.is_none()).count();
        if lost > 0 {
            notes.push(format!("{lost} switches lead to no host and are left out"));
        }
        let topology = self.build(&nodes, &ranks)?;
        notes.extend(self.check(&topology, &nodes));
        Ok(Imported { topology, notes })
    }

    /// Links from each switch to the nearest of some switches.
    fn distances(&self, from: impl Fn(usize) -> bool) -> Vec<Option<usize>> {
        let mut distances = vec![None; self.names.len()];
        let mut queue: VecDeque<usize> = (0..self.names.len()).filter(|at| from(*at)).collect();
        for at in &queue {
            distances[*at] = Some(0);
        }
        while let Some(at) = queue.pop_front() {
            for next in &self.links[at] {
                if distances[*next].is_none() {
                    distances[*next] = distances[at].map(|distance: usize| distance + 1);
                    queue.push_back(*next);
                }
            }
        }
        distances
    }

    fn build(&self, nodes: &[Vec<NodeName>], ranks: &[Option<usize>]) -> Result<Topology, TopologyError> {
        let mut builder = Builder::new();
        // The highest switch of the tree above each leaf switch so far.
        let mut top: BTreeMap<usize, SwitchName> = BTreeMap::new();
        for (at, below) in nodes.iter().enumerate().filter(|(_, below)| !below.is_empty()) {
            let mut spec = SwitchSpec::new(valid(SwitchName::new(&self.names[at]), 0)?);
            spec.nodes.clone_from(below);
            top.insert(at, spec.name.clone());
            builder.add(spec, Origin::default());
        }
        let highest = ranks.iter().flatten().max().copied().unwrap_or(0);
        for rank in 0..=highest {
            for members in self.components(ranks, rank) {
                let leaves: Vec<usize> =
                    members.iter().copied().filter(|at| !nodes[*at].is_empty()).collect();
                let below: BTreeSet<SwitchName> =
                    leaves.iter().filter_map(|at| top.get(at).cloned()).collect();
                if below.len() < 2 {
                    continue;
                }
                let own: Vec<usize> = members.iter().copied().filter(|at| ranks[*at] == Some(rank)).collect();
                let mut spec = SwitchSpec::new(valid(SwitchName::new(self.group_name(&own, rank)), 0)?);
                spec.switches = below.into_iter().collect();
                for leaf in leaves {
                    top.insert(leaf, spec.name.clone());
                }
                builder.add(spec, Origin::default());
            }
        }
        builder.build(Style::Tree)
    }

    /// A single switch keeps its name; several are named after the first, with the number of the others.
    fn group_name(&self, own: &[usize], rank: usize) -> String {
        let first = own.iter().map(|at| self.names[*at].as_str()).min().unwrap_or("switches");
        match (own.len(), rank) {
            (0 | 1, 1..) => first.to_owned(),
            (count, _) => format!("{first}+{}", count.saturating_sub(1)),
        }
    }

    /// Groups of switches that are connected by switches up to a rank.
    fn components(&self, ranks: &[Option<usize>], rank: usize) -> Vec<Vec<usize>> {
        let within = |at: usize| ranks[at].is_some_and(|own| own <= rank);
        let mut seen = vec![false; self.names.len()];
        let mut components = Vec::new();
        for start in 0..self.names.len() {
            if seen[start] || !within(start) {
                continue;
            }
            seen[start] = true;
            let (mut members, mut reached) = (vec![start], 0);
            while reached < members.len() {
                for next in &self.links[members[reached]] {
                    if !seen[*next] && within(*next) {
                        seen[*next] = true;
                        members.push(*next);
                    }
                }
                reached += 1;
            }
            components.push(members);
        }
        components
    }

    /// Compares distances in the tree with those in the graph.
    fn check(&self, topology: &Topology, nodes: &[Vec<NodeName>]) -> Option<String> {
        let leaves: Vec<usize> = (0..nodes.len()).filter(|at| !nodes[*at].is_empty()).take(CHECKED).collect();
        let (mut wrong, mut pairs) = (0, 0);
        for (at, leaf) in leaves.iter().enumerate() {
            let true_distances = self.distances(|own| own == *leaf);
            for other in &leaves[at + 1..] {
                pairs += 1;
                let in_tree = topology.hops(&nodes[*leaf][0], &nodes[*other][0]);
                wrong += usize::from(
                    in_tree.map(|hops| hops as usize) != true_distances[*other].map(|links| links + 1),
                );
            }
        }
        (wrong > 0).then(|| format!("not a fat tree: for {wrong} of {pairs} pairs of leaf switches the tree has another distance than the network"))
    }
}
