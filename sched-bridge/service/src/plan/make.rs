//! Makes plans from who sits where now.
//!
//! Each move is made for the place that a placement of the VM alone finds, as near as possible to the others of its cluster, in the
//! fleet as the moves before it leave it: so each is feasible when its turn comes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use sched_bridge::model::{Assignment, ClusterName, Fleet, NodeName, Occupancy, VmName};
use sched_bridge::place::{ClusterRequest, Compactness, Near, NearTo, Options, Placement, VmGroup, place};

use crate::api::plans::PlanRequest;
use crate::bridge::{Bridge, BridgeError, View};
use crate::lease::{Lease, LeaseId, Part};
use crate::plan::{HopsGain, Plan, PlanState, PlanStep, StepState};
use crate::request_text;

/// Rounds of improvement of `compact`: each VM may move once.
const MOST_MOVES: usize = 256;

/// Who sits where, and what is planned.
#[derive(Debug)]
struct Draft {
    fleet: Arc<Fleet>,
    used: Occupancy,
    leases: Vec<Arc<Lease>>,
    at: BTreeMap<VmName, Assignment>,
    steps: Vec<PlanStep>,
}

/// Makes a plan for what is wanted.
///
/// # Errors
/// There is no way, or the view is old.
pub async fn make(bridge: &Arc<Bridge>, request: &PlanRequest) -> Result<Plan, BridgeError> {
    let view = bridge.view()?;
    let (request, made_wall_ms) = (request.clone(), bridge.clock().stamp().wall_ms);
    let work = move || draft(&view, &request, made_wall_ms);
    match tokio::task::spawn_blocking(work).await {
        Ok(plan) => plan,
        Err(error) => Err(BridgeError::Bad(format!("planning failed inside: {error}"))),
    }
}

fn draft(view: &View, request: &PlanRequest, made_wall_ms: u64) -> Result<Plan, BridgeError> {
    let mut draft = Draft::of(view);
    let before = draft.hops();
    let name = |text: &str| NodeName::new(text).map_err(|e| BridgeError::Bad(e.to_string()));
    let purpose = match request {
        PlanRequest::Evacuate { node } => {
            draft.evacuate(&name(node)?)?;
            format!("evacuate {node}")
        }
        PlanRequest::Compact { cluster } => {
            draft.compact(cluster.as_deref())?;
            format!("compact {}", cluster.as_deref().unwrap_or("all"))
        }
        PlanRequest::MakeRoom { text, cluster } => {
            let cluster = cluster.as_deref().map(ClusterName::new).transpose();
            let cluster = cluster.map_err(|e| BridgeError::Bad(e.to_string()))?;
            let wanted = request_text::parse(text, cluster.as_ref()).map_err(BridgeError::Bad)?;
            draft.make_room(&wanted)?;
            format!("make room for {}", wanted.name)
        }
    };
    let hops = HopsGain { before, after: draft.hops() };
    let state = PlanState::Planned;
    Ok(Plan { id: LeaseId::unique(), purpose, made_wall_ms, steps: draft.steps, hops, state, runner: None })
}

impl Draft {
    fn of(view: &View) -> Self {
        let leases: Vec<Arc<Lease>> = view.leases().values().map(|known| Arc::clone(&known.lease)).collect();
        let home = leases.iter().flat_map(|lease| &lease.held).filter(|held| held.part == Part::Home);
        let at = home.map(|held| (held.assignment.vm.clone(), held.assignment.clone())).collect();
        Self { fleet: Arc::clone(view.fleet()), used: view.occupancy(), leases, at, steps: Vec::new() }
    }

    /// Switches between VMs of the same cluster, over all pairs.
    fn hops(&self) -> u64 {
        self.leases.iter().map(|lease| self.hops_of(lease)).sum()
    }

    fn hops_of(&self, lease: &Lease) -> u64 {
        let nodes: Vec<_> =
            lease.vms().filter_map(|vm| self.fleet.find(self.at.get(vm)?.node.as_str())).collect();
        let pairs = nodes.iter().enumerate().flat_map(|(i, a)| nodes[..i].iter().map(move |b| (*a, *b)));
        pairs.map(|(a, b)| u64::from(self.fleet.hops(a, b).unwrap_or(u32::MAX))).sum()
    }

    /// The best place for one VM elsewhere, beside what is taken now, near to `near`.
    fn elsewhere(
        &self,
        lease: &Lease,
        vm: &VmName,
        near: Option<NodeName>,
        not: &BTreeSet<NodeName>,
    ) -> Result<Assignment, BridgeError> {
        let request = lease.request.as_ref().ok_or_else(|| {
            BridgeError::Bad(format!("VM {vm}: lease {} named its devices itself, so what would do elsewhere is not known; move it by hand", lease.id))
        })?;
        let names = request.vm_names()?;
        let group = names
            .iter()
            .find(|(name, _)| name == vm)
            .map(|(_, group)| *group)
            .ok_or_else(|| BridgeError::UnknownVm(vm.clone()))?;
        let alone = ClusterRequest {
            groups: vec![VmGroup { count: 1, ..request.groups[group].clone() }],
            compactness: Compactness::default(),
            anti_affinity: None,
            near: near.map(|node| Near { to: NearTo::Node(node), max_hops: None }),
            not_nodes: request.not_nodes.union(not).cloned().collect(),
            ..request.clone()
        };
        let Placement { assignments, .. } = place(&self.fleet, &self.used, &alone, &Options::default())?;
        let found = assignments.into_iter().next().ok_or_else(|| BridgeError::UnknownVm(vm.clone()))?;
        Ok(Assignment { vm: vm.clone(), ..found })
    }

    /// Plans a move, and does it in the draft.
    fn go(&mut self, to: Assignment) -> Result<(), BridgeError> {
        let Some(from) = self.at.insert(to.vm.clone(), to.clone()) else { return Ok(()) };
        self.used.take(&self.fleet, &to)?;
        self.used.release(&self.fleet, &from)?;
        let memory_mib = to.memory().0;
        self.steps.push(PlanStep {
            vm: to.vm.clone(),
            from: from.node,
            to,
            memory_mib,
            state: StepState::Pending,
        });
        Ok(())
    }

    /// The node on which most of a VM's cluster sits, itself aside.
    fn middle(&self, lease: &Lease, vm: &VmName) -> Option<NodeName> {
        let others: Vec<&NodeName> = lease
            .vms()
            .filter(|other| *other != vm)
            .filter_map(|other| Some(&self.at.get(other)?.node))
            .collect();
        let distance = |node: &NodeName| -> Option<u64> {
            let at = self.fleet.find(node.as_str())?;
            let hops =
                others.iter().filter_map(|other| self.fleet.hops(at, self.fleet.find(other.as_str())?));
            Some(hops.map(u64::from).sum())
        };
        others.iter().min_by_key(|node| distance(node)).map(|node| NodeName::clone(node))
    }

    fn evacuate(&mut self, node: &NodeName) -> Result<(), BridgeError> {
        if self.fleet.find(node.as_str()).is_none() {
            return Err(BridgeError::UnknownNode(node.clone()));
        }
        for lease in self.leases.clone() {
            for vm in lease.vms() {
                if self.at.get(vm).is_some_and(|at| at.node == *node) {
                    let near = self.middle(&lease, vm).filter(|near| near != node);
                    let to = self.elsewhere(&lease, vm, near, &BTreeSet::from([node.clone()]))?;
                    self.go(to)?;
                }
            }
        }
        Ok(())
    }

    /// Moves, again and again, the VM whose move gains most, as long as one gains.
    fn compact(&mut self, cluster: Option<&str>) -> Result<(), BridgeError> {
        let leases: Vec<Arc<Lease>> =
            self.leases.iter().filter(|l| cluster.is_none_or(|c| l.cluster.as_str() == c)).cloned().collect();
        if let (Some(cluster), true) = (cluster, leases.is_empty()) {
            return Err(BridgeError::Bad(format!(
                "there is no cluster {cluster} (`vmove lease list` shows all)"
            )));
        }
        let mut moved = BTreeSet::new();
        for lease in leases.iter().filter(|lease| lease.request.is_some()) {
            while self.steps.len() < MOST_MOVES {
                let before = self.hops_of(lease);
                let mut best: Option<(u64, Assignment)> = None;
                for vm in lease.vms().filter(|vm| !moved.contains(*vm)).cloned().collect::<Vec<_>>() {
                    let Some(here) = self.at.get(&vm).cloned() else { continue };
                    let Ok(to) = self.elsewhere(
                        lease,
                        &vm,
                        self.middle(lease, &vm),
                        &BTreeSet::from([here.node.clone()]),
                    ) else {
                        continue;
                    };
                    self.at.insert(vm.clone(), to.clone());
                    let after = self.hops_of(lease);
                    self.at.insert(vm, here);
                    if after < best.as_ref().map_or(before, |(hops, _)| *hops) {
                        best = Some((after, to));
                    }
                }
                let Some((_, to)) = best else { break };
                moved.insert(to.vm.clone());
                self.go(to)?;
            }
        }
        Ok(())
    }

    /// Moves VMs off one node after another, the emptiest first, until the request fits.
    fn make_room(&mut self, wanted: &ClusterRequest) -> Result<(), BridgeError> {
        let mut last = match place(&self.fleet, &self.used, wanted, &Options::default()) {
            Ok(_) => return Ok(()),
            Err(error) => error,
        };
        let mut nodes: Vec<(u32, NodeName)> = (self.fleet.nodes().iter())
            .filter_map(|node| Some((self.used.vms(self.fleet.find(node.name.as_str())?), node.name.clone())))
            .filter(|(vms, _)| *vms > 0)
            .collect();
        nodes.sort();
        for (_, node) in nodes {
            let (used, at, steps) = (self.used.clone(), self.at.clone(), self.steps.len());
            if self.evacuate(&node).is_err() {
                (self.used, self.at) = (used, at);
                self.steps.truncate(steps);
                continue;
            }
            match place(&self.fleet, &self.used, wanted, &Options::default()) {
                Ok(_) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last.into())
    }
}
