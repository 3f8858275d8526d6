//! The contents of the store, in the form that placement needs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use sched_bridge::model::{Assignment, Fleet, Node, NodeName, Occupancy, VmName};
use sched_bridge::topology::Topology;

use super::BridgeError;
use crate::checkpoint::Checkpoint;
use crate::keys;
use crate::lease::{Lease, LeaseId};
use crate::store::{Change, Changes, Entry, Revision, Snapshot};

/// A lease and its revision.
#[derive(Debug, Clone)]
pub struct LeaseEntry {
    /// The lease.
    pub lease: Arc<Lease>,
    /// The transaction that wrote it last.
    pub revision: Revision,
    /// The part of it that the nodes have. A device may have been removed although it is leased.
    taken: Arc<Vec<Assignment>>,
}

/// The contents of the store at one revision, without accounting records.
#[derive(Debug, Clone, Default)]
pub struct View {
    revision: Revision,
    /// The last transaction that was more than a pulse.
    last_change: Revision,
    nodes: BTreeMap<NodeName, (Arc<Node>, Revision)>,
    topology: (Topology, Option<Revision>),
    guards: HashMap<NodeName, Revision>,
    /// Guards of holders with a quota.
    holders: HashMap<String, Revision>,
    leases: BTreeMap<LeaseId, LeaseEntry>,
    plans: BTreeMap<LeaseId, (Arc<str>, Revision)>,
    checkpoints: BTreeMap<LeaseId, (Arc<Checkpoint>, Revision)>,
    fleet: Arc<Fleet>,
    occupancy: Option<Occupancy>,
    /// Nodes or topology have changed since `fleet` was built.
    stale: bool,
    problems: BTreeMap<String, String>,
}

impl View {
    /// The view of a snapshot.
    #[must_use]
    pub fn of(snapshot: &Snapshot) -> Self {
        let mut view = Self {
            revision: snapshot.revision,
            last_change: snapshot.revision,
            stale: true,
            ..Self::default()
        };
        for (key, entry) in &snapshot.entries {
            view.apply_one(key, Some(entry));
        }
        view.refresh();
        view
    }

    /// Applies changes.
    pub fn apply(&mut self, changes: &Changes) {
        for Change { key, entry } in &changes.changes {
            self.apply_one(key, entry.as_ref());
        }
        self.revision = self.revision.max(changes.revision);
        if changes.changes.iter().any(|change| change.key != keys::PULSE) {
            self.last_change = self.revision;
        }
        self.refresh();
    }

    fn apply_one(&mut self, key: &str, entry: Option<&Entry>) {
        self.problems.remove(key);
        if let Err(problem) = self.try_apply(key, entry) {
            tracing::error!(key, problem, "cannot read a value in the store; it is left as it is");
            self.problems.insert(key.to_owned(), problem);
        }
    }

    fn try_apply(&mut self, key: &str, entry: Option<&Entry>) -> Result<(), String> {
        let name = |text: &str| NodeName::new(text).map_err(|e| e.to_string());
        let id = |text: &str| text.parse::<LeaseId>().map_err(|e| e.to_string());
        if key == keys::TOPOLOGY {
            self.stale = true;
            self.topology = match entry {
                Some(entry) => (parse(&entry.value)?, Some(entry.revision)),
                None => (Topology::default(), None),
            };
        } else if let Some(node) = key.strip_prefix(keys::NODES) {
            self.stale = true;
            let node = name(node)?;
            match entry {
                Some(entry) => {
                    drop(self.nodes.insert(node, (Arc::new(parse(&entry.value)?), entry.revision)));
                }
                None => drop(self.nodes.remove(&node)),
            }
        } else if let Some(node) = key.strip_prefix(keys::GUARDS) {
            let node = name(node)?;
            match entry {
                Some(entry) => drop(self.guards.insert(node, entry.revision)),
                None => drop(self.guards.remove(&node)),
            }
        } else if let Some(holder) = key.strip_prefix(keys::HOLDERS) {
            match entry {
                Some(entry) => drop(self.holders.insert(holder.to_owned(), entry.revision)),
                None => drop(self.holders.remove(holder)),
            }
        } else if let Some(lease) = key.strip_prefix(keys::LEASES) {
            self.remove_lease(&id(lease)?);
            if let Some(entry) = entry {
                let lease: Lease = parse(&entry.value)?;
                self.add_lease(Arc::new(lease), entry.revision, key);
            }
        } else if let Some(plan) = key.strip_prefix(keys::PLANS) {
            let plan = id(plan)?;
            match entry {
                Some(entry) => drop(self.plans.insert(plan, (entry.value.as_str().into(), entry.revision))),
                None => drop(self.plans.remove(&plan)),
            }
        } else if let Some(name) = key.strip_prefix(keys::CHECKPOINTS) {
            let name = id(name)?;
            match entry {
                Some(entry) => {
                    let checkpoint = Arc::new(parse(&entry.value)?);
                    drop(self.checkpoints.insert(name, (checkpoint, entry.revision)));
                }
                None => drop(self.checkpoints.remove(&name)),
            }
        }
        Ok(())
    }

    fn add_lease(&mut self, lease: Arc<Lease>, revision: Revision, key: &str) {
        let mut taken = Vec::new();
        if let (Some(occupancy), false) = (&mut self.occupancy, self.stale) {
            for held in &lease.held {
                match occupancy.take(&self.fleet, &held.assignment) {
                    Ok(()) => taken.push(held.assignment.clone()),
                    Err(error) => drop(self.problems.insert(key.to_owned(), error.to_string())),
                }
            }
        }
        self.leases.insert(lease.id.clone(), LeaseEntry { lease, revision, taken: Arc::new(taken) });
    }

    fn remove_lease(&mut self, id: &LeaseId) {
        let Some(entry) = self.leases.remove(id) else { return };
        let Some(occupancy) = &mut self.occupancy else { return };
        for assignment in entry.taken.iter() {
            if occupancy.release(&self.fleet, assignment).is_err() {
                // Only possible if nodes have changed; then everything is rebuilt.
                self.stale = true;
            }
        }
    }

    /// Rebuilds fleet and occupancy if nodes or topology have changed.
    fn refresh(&mut self) {
        if !std::mem::take(&mut self.stale) {
            return;
        }
        let nodes = self.nodes.values().map(|(node, _)| Node::clone(node)).collect();
        match Fleet::new(nodes, self.topology.0.clone()) {
            Ok(fleet) => {
                self.fleet = Arc::new(fleet);
                self.problems.remove(keys::NODES);
            }
            Err(error) => drop(self.problems.insert(keys::NODES.to_owned(), error.to_string())),
        }
        self.occupancy = Some(Occupancy::new(&self.fleet));
        for entry in std::mem::take(&mut self.leases).into_values() {
            let key = keys::lease(&entry.lease.id);
            self.problems.remove(&key);
            self.add_lease(entry.lease, entry.revision, &key);
        }
    }

    /// The last transaction in this view.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Whether more than pulses were committed since an earlier view.
    #[must_use]
    pub fn differs(&self, earlier: &Self) -> bool {
        self.last_change > earlier.revision
    }

    /// Nodes and topology.
    #[must_use]
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// What is leased on each node.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy {
        self.occupancy.clone().unwrap_or_else(|| Occupancy::new(&self.fleet))
    }

    /// Revision of a node's guard; none if nothing was ever taken there.
    #[must_use]
    pub fn guard(&self, node: &NodeName) -> Option<Revision> {
        self.guards.get(node).copied()
    }

    /// Revision of the guard of a holder with a quota; none if nothing was ever granted to it under one.
    #[must_use]
    pub fn holder(&self, name: &str) -> Option<Revision> {
        self.holders.get(name).copied()
    }

    /// A node's inventory and its revision.
    #[must_use]
    pub fn node(&self, name: &NodeName) -> Option<(&Arc<Node>, Revision)> {
        self.nodes.get(name).map(|(node, revision)| (node, *revision))
    }

    /// Revision of the topology; none if it was never written.
    #[must_use]
    pub fn topology_revision(&self) -> Option<Revision> {
        self.topology.1
    }

    /// All leases, by id.
    #[must_use]
    pub fn leases(&self) -> &BTreeMap<LeaseId, LeaseEntry> {
        &self.leases
    }

    /// All leases, without their revisions.
    pub fn all_leases(&self) -> impl Iterator<Item = &Lease> {
        self.leases.values().map(|entry| &*entry.lease)
    }

    /// A lease by its id.
    ///
    /// # Errors
    /// There is no such lease.
    pub fn lease(&self, id: &LeaseId) -> Result<&LeaseEntry, BridgeError> {
        self.leases.get(id).ok_or_else(|| BridgeError::UnknownLease(id.clone()))
    }

    /// The lease of a VM.
    ///
    /// # Errors
    /// No lease has this VM.
    pub fn lease_of(&self, vm: &VmName) -> Result<&LeaseEntry, BridgeError> {
        self.leases
            .values()
            .find(|entry| entry.lease.home(vm).is_some())
            .ok_or_else(|| BridgeError::UnknownVm(vm.clone()))
    }

    /// Plans by id: the text in the store, and its revision.
    #[must_use]
    pub fn plans(&self) -> &BTreeMap<LeaseId, (Arc<str>, Revision)> {
        &self.plans
    }

    /// Checkpoints of clusters by name, and their revisions.
    #[must_use]
    pub fn checkpoints(&self) -> &BTreeMap<LeaseId, (Arc<Checkpoint>, Revision)> {
        &self.checkpoints
    }

    /// Problems by key: values that cannot be read, and leases of resources that do not exist.
    #[must_use]
    pub fn problems(&self) -> &BTreeMap<String, String> {
        &self.problems
    }
}

fn parse<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|e| format!("not the JSON that this version of vbridged writes: {e}"))
}
