//! What the store holds, in the form that placement needs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use sched_bridge::model::{Assignment, Fleet, Node, NodeName, Occupancy, VmName};
use sched_bridge::topology::Topology;

use super::BridgeError;
use crate::keys;
use crate::lease::{Lease, LeaseId};
use crate::store::{Change, Changes, Entry, Revision, Snapshot};

/// A lease and the transaction that wrote it last.
#[derive(Debug, Clone)]
pub struct Known {
    /// The lease.
    pub lease: Arc<Lease>,
    /// When it was written.
    pub revision: Revision,
    /// What of it could be taken in the fleet; a device may be gone that is still held.
    taken: Arc<Vec<Assignment>>,
}

/// See the [module](self).
#[derive(Debug, Clone, Default)]
pub struct View {
    revision: Revision,
    /// The last transaction that was more than a pulse.
    news: Revision,
    nodes: BTreeMap<NodeName, (Arc<Node>, Revision)>,
    topology: (Topology, Option<Revision>),
    guards: HashMap<NodeName, Revision>,
    leases: BTreeMap<LeaseId, Known>,
    plans: BTreeMap<LeaseId, (Arc<str>, Revision)>,
    fleet: Arc<Fleet>,
    occupancy: Option<Occupancy>,
    /// Nodes or topology have changed since the fleet was made.
    stale: bool,
    problems: BTreeMap<String, String>,
}

impl View {
    /// Everything at one moment.
    #[must_use]
    pub fn of(snapshot: &Snapshot) -> Self {
        let mut view =
            Self { revision: snapshot.revision, news: snapshot.revision, stale: true, ..Self::default() };
        for (key, entry) in &snapshot.entries {
            view.apply_one(key, Some(entry));
        }
        view.refresh();
        view
    }

    /// Takes over what has changed.
    pub fn apply(&mut self, changes: &Changes) {
        for Change { key, entry } in &changes.changes {
            self.apply_one(key, entry.as_ref());
        }
        self.revision = self.revision.max(changes.revision);
        if changes.changes.iter().any(|change| change.key != keys::PULSE) {
            self.news = self.revision;
        }
        self.refresh();
    }

    fn apply_one(&mut self, key: &str, entry: Option<&Entry>) {
        self.problems.remove(key);
        if let Err(problem) = self.try_apply(key, entry) {
            tracing::error!(key, problem, "a value in the store cannot be read; it is left as it is");
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
        } else if let Some(lease) = key.strip_prefix(keys::LEASES) {
            self.give_back(&id(lease)?);
            if let Some(entry) = entry {
                let lease: Lease = parse(&entry.value)?;
                self.take(Arc::new(lease), entry.revision, key);
            }
        } else if let Some(plan) = key.strip_prefix(keys::PLANS) {
            let plan = id(plan)?;
            match entry {
                Some(entry) => drop(self.plans.insert(plan, (entry.value.as_str().into(), entry.revision))),
                None => drop(self.plans.remove(&plan)),
            }
        }
        Ok(())
    }

    fn take(&mut self, lease: Arc<Lease>, revision: Revision, key: &str) {
        let mut taken = Vec::new();
        if let (Some(occupancy), false) = (&mut self.occupancy, self.stale) {
            for held in &lease.held {
                match occupancy.take(&self.fleet, &held.assignment) {
                    Ok(()) => taken.push(held.assignment.clone()),
                    Err(error) => drop(self.problems.insert(key.to_owned(), error.to_string())),
                }
            }
        }
        self.leases.insert(lease.id.clone(), Known { lease, revision, taken: Arc::new(taken) });
    }

    fn give_back(&mut self, id: &LeaseId) {
        let Some(known) = self.leases.remove(id) else { return };
        let Some(occupancy) = &mut self.occupancy else { return };
        for assignment in known.taken.iter() {
            if occupancy.release(&self.fleet, assignment).is_err() {
                // Cannot be unless nodes changed, which makes all anew.
                self.stale = true;
            }
        }
    }

    /// Makes fleet and occupancy anew if nodes or switches have changed.
    fn refresh(&mut self) {
        if !std::mem::take(&mut self.stale) {
            return;
        }
        let nodes = self.nodes.values().map(|(node, _)| Node::clone(node)).collect();
        match Fleet::new(nodes, self.topology.0.clone()) {
            Ok(fleet) => self.fleet = Arc::new(fleet),
            Err(error) => drop(self.problems.insert(keys::NODES.to_owned(), error.to_string())),
        }
        self.occupancy = Some(Occupancy::new(&self.fleet));
        for known in std::mem::take(&mut self.leases).into_values() {
            let key = keys::lease(&known.lease.id);
            self.problems.remove(&key);
            self.take(known.lease, known.revision, &key);
        }
    }

    /// The last transaction that is part of this view.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Whether more than pulses lies between an earlier view and this one.
    #[must_use]
    pub fn differs(&self, earlier: &Self) -> bool {
        self.news > earlier.revision
    }

    /// Nodes and switches.
    #[must_use]
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// What is taken.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy {
        self.occupancy.clone().unwrap_or_else(|| Occupancy::new(&self.fleet))
    }

    /// A node's guard: the revision, or none if nothing was ever taken there.
    #[must_use]
    pub fn guard(&self, node: &NodeName) -> Option<Revision> {
        self.guards.get(node).copied()
    }

    /// A node's inventory, and when it was written.
    #[must_use]
    pub fn node(&self, name: &NodeName) -> Option<(&Arc<Node>, Revision)> {
        self.nodes.get(name).map(|(node, revision)| (node, *revision))
    }

    /// When the topology was written.
    #[must_use]
    pub fn topology_revision(&self) -> Option<Revision> {
        self.topology.1
    }

    /// All leases, by id.
    #[must_use]
    pub fn leases(&self) -> &BTreeMap<LeaseId, Known> {
        &self.leases
    }

    /// A lease.
    ///
    /// # Errors
    /// There is none.
    pub fn lease(&self, id: &LeaseId) -> Result<&Known, BridgeError> {
        self.leases.get(id).ok_or_else(|| BridgeError::UnknownLease(id.clone()))
    }

    /// The lease that a VM is part of.
    ///
    /// # Errors
    /// There is none.
    pub fn lease_of(&self, vm: &VmName) -> Result<&Known, BridgeError> {
        self.leases
            .values()
            .find(|known| known.lease.home(vm).is_some())
            .ok_or_else(|| BridgeError::UnknownVm(vm.clone()))
    }

    /// Plans as they were written, by id.
    #[must_use]
    pub fn plans(&self) -> &BTreeMap<LeaseId, (Arc<str>, Revision)> {
        &self.plans
    }

    /// What in the store cannot be read, or does not fit together, by key.
    #[must_use]
    pub fn problems(&self) -> &BTreeMap<String, String> {
        &self.problems
    }
}

fn parse<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|e| format!("expected JSON of this version of vbridged, found: {e}"))
}
