//! Keeps a bridge and a Slurm cluster in step: publishes Slurm's nodes and switches, reserves leased nodes in Slurm, leases nodes on
//! which Slurm's jobs run, and evacuates nodes that Slurm drains.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use sched_bridge::model::{
    Assignment, ClusterName, DeviceKind, Granted, Node, NodeName, NodeState, NumaNode, NumaShare, VmName,
};

use super::{Slurm, SlurmError, scontrol};
use crate::bridge::{Bridge, BridgeError, GrantRequest, View, Wanted};
use crate::driver::VmDriver;
use crate::executor::{self, Limits, RunError};
use crate::lease::{LeaseId, MAX_TTL_MS};
use crate::planner::make_plan;
use vmove_bridge_types::plan::{PlanRequest, PlanState};

/// Prefix of the names of reservations that stand for leases.
pub(super) const RESERVATION_PREFIX: &str = "vmove-";
/// Prefix of the ids of leases that stand for nodes on which Slurm's jobs run.
pub(crate) const JOBS_PREFIX: &str = "slurm.";
/// Holder of these leases.
pub(crate) const JOBS_HOLDER: &str = "slurm";

/// Follows one Slurm cluster.
#[derive(Debug, Clone)]
pub struct SlurmFollower {
    /// The cluster.
    pub slurm: Slurm,
    /// Users who may use the reservations (`root`, `alice,bob`).
    pub users: String,
    /// Between two synchronizations.
    pub interval: Duration,
    /// Whether VMs leave nodes that Slurm drains.
    pub evacuate: bool,
    /// Held during a synchronization, and during a booking: neither runs between the steps of the other.
    pub exclusive: Arc<tokio::sync::Mutex<()>>,
}

impl SlurmFollower {
    /// Follows the cluster until the task is dropped.
    pub async fn run(self, bridge: Arc<Bridge>, driver: Arc<dyn VmDriver>, limits: Limits) {
        let synchronizing = async {
            let mut warned = String::new();
            loop {
                warn_once(&mut warned, self.synchronize(&bridge).await.map_err(|e| e.to_string()));
                tokio::time::sleep(self.interval).await;
            }
        };
        // Beside it, because migrations take long.
        let evacuating = async {
            if !self.evacuate {
                return;
            }
            let (mut warned, mut plans) = (String::new(), BTreeMap::new());
            loop {
                warn_once(&mut warned, self.evacuate_drained(&bridge, &driver, limits, &mut plans).await);
                tokio::time::sleep(self.interval).await;
            }
        };
        tokio::join!(synchronizing, evacuating);
    }

    /// Synchronizes once, in both directions.
    ///
    /// # Errors
    /// Slurm or the store does not answer.
    pub async fn synchronize(&self, bridge: &Arc<Bridge>) -> Result<(), SlurmError> {
        let _exclusive = self.exclusive.lock().await;
        self.slurm.publish(bridge).await?;
        let nodes: BTreeSet<NodeName> = self.slurm.nodes().await?.into_iter().map(|node| node.name).collect();
        self.lease_busy_nodes(bridge).await?;
        self.reserve_leased_nodes(bridge, &nodes).await
    }

    /// Makes one reservation for each lease, on those of Slurm's nodes that the lease has now.
    async fn reserve_leased_nodes(
        &self,
        bridge: &Bridge,
        slurm_nodes: &BTreeSet<NodeName>,
    ) -> Result<(), SlurmError> {
        let view = bridge.view()?;
        let wanted: BTreeMap<String, BTreeSet<NodeName>> = leases_of_vms(&view)
            .map(|lease| {
                let nodes = lease.nodes().into_iter().filter(|node| slurm_nodes.contains(node)).collect();
                (format!("{RESERVATION_PREFIX}{}", lease.id), nodes)
            })
            .filter(|(_, nodes): &(String, BTreeSet<NodeName>)| !nodes.is_empty())
            .collect();
        let found = self.reservations().await?;
        for name in found.keys().filter(|name| !wanted.contains_key(*name)) {
            // Slurm keeps it while jobs run in it; the next synchronization tries again.
            if let Err(error) = self.slurm.delete_reservation(name).await {
                tracing::debug!(reservation = name, %error, "could not delete the reservation of an ended lease yet");
            }
        }
        for (name, nodes) in wanted {
            let list: Vec<NodeName> = nodes.iter().cloned().collect();
            match found.get(&name) {
                Some(reserved) if *reserved == nodes => {}
                Some(_) => self.slurm.update_reservation(&name, &list).await?,
                None => self.slurm.create_reservation(&name, &list, &self.users).await?,
            }
        }
        Ok(())
    }

    /// The reservations of leases, and their nodes.
    async fn reservations(&self) -> Result<BTreeMap<String, BTreeSet<NodeName>>, SlurmError> {
        let text = self.slurm.run(&["scontrol", "-o", "show", "reservation"]).await?;
        let mut found = BTreeMap::new();
        for line in text.lines() {
            let (name, list) = (scontrol::field(line, "ReservationName"), scontrol::field(line, "Nodes"));
            if let Some(name) = name.filter(|name| name.starts_with(RESERVATION_PREFIX)) {
                let nodes = self.slurm.expand_hostlist(list.unwrap_or_default()).await?;
                found.insert(name.to_owned(), nodes);
            }
        }
        Ok(found)
    }

    /// Nodes on which Slurm runs jobs outside the reservations of leases.
    pub(super) async fn busy_nodes(&self) -> Result<BTreeSet<NodeName>, SlurmError> {
        let text = self.slurm.run(&["squeue", "-h", "-t", "CF,R,CG,S", "-o", "%v|%N"]).await?;
        let mut busy = BTreeSet::new();
        for line in text.lines() {
            let (reservation, list) = line.split_once('|').unwrap_or(("", line));
            if !reservation.starts_with(RESERVATION_PREFIX) {
                busy.extend(self.slurm.expand_hostlist(list.trim()).await?);
            }
        }
        Ok(busy)
    }

    /// Leases each node on which Slurm's jobs run, so that nothing is placed there; releases it after the jobs.
    pub(super) async fn lease_busy_nodes(&self, bridge: &Bridge) -> Result<(), SlurmError> {
        let busy = self.busy_nodes().await?;
        let view = bridge.view()?;
        for id in view.leases().keys() {
            if let Some(node) = id.as_str().strip_prefix(JOBS_PREFIX)
                && !busy.iter().any(|busy| busy.as_str() == node)
            {
                bridge.release(id).await?;
            }
        }
        let leased = |node: &NodeName| view.leases().values().any(|entry| entry.lease.nodes().contains(node));
        for name in &busy {
            // A node with VMs is reserved: a job that was there before will end, and no other starts.
            let Some((node, _)) = view.node(name).filter(|_| !leased(name)) else { continue };
            let Some(request) = whole_node(node) else { continue };
            match bridge.grant(request).await {
                // Somebody has just placed VMs there: as above.
                Ok(_) | Err(BridgeError::Taken(_) | BridgeError::Place(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Evacuates nodes that Slurm drains. A plan that has stopped is run again by the next call, until it is done or deleted.
    ///
    /// # Errors
    /// Why the first node that is not empty could not be evacuated.
    pub async fn evacuate_drained(
        &self,
        bridge: &Arc<Bridge>,
        driver: &Arc<dyn VmDriver>,
        limits: Limits,
        plans: &mut BTreeMap<NodeName, LeaseId>,
    ) -> Result<(), String> {
        let nodes = self.slurm.nodes().await.map_err(|e| e.to_string())?;
        let mut first = Ok(());
        for node in nodes.into_iter().filter(|node| node.state == NodeState::Drained) {
            if let Err(reason) = evacuate_node(bridge, driver, limits, plans, &node.name).await {
                first = first.and(Err(format!("node {} is drained, but not empty: {reason}", node.name)));
            }
        }
        first
    }
}

/// Evacuates a node by a plan, a new one or the one of an earlier call.
async fn evacuate_node(
    bridge: &Arc<Bridge>,
    driver: &Arc<dyn VmDriver>,
    limits: Limits,
    plans: &mut BTreeMap<NodeName, LeaseId>,
    node: &NodeName,
) -> Result<(), String> {
    let view = bridge.view().map_err(|e| e.to_string())?;
    if !leases_of_vms(&view).any(|lease| lease.nodes().contains(node)) {
        plans.remove(node);
        return Ok(());
    }
    let id = match plans.get(node).filter(|id| view.plans().contains_key(id)) {
        Some(id) => id.clone(),
        None => {
            let request = PlanRequest::Evacuate { node: node.to_string() };
            let plan = make_plan(bridge, &request, &Arc::default()).await.map_err(|e| e.to_string())?;
            bridge.put_plan(&plan, None).await.map_err(|e| e.to_string())?;
            tracing::info!(%node, plan = %plan.id, steps = plan.steps.len(), "Slurm drains a node: its VMs leave");
            plans.insert(node.clone(), plan.id.clone());
            plan.id
        }
    };
    match executor::run(bridge, Arc::clone(driver), &id, limits).await {
        Ok(plan) => match plan.state {
            PlanState::Done => {
                plans.remove(node);
                Ok(())
            }
            PlanState::Stopped { reason } => Err(format!("plan {id} has stopped: {reason}")),
            PlanState::Planned | PlanState::Running => Err(format!("plan {id} has not ended")),
        },
        Err(RunError::AlreadyRunning(_)) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// All leases but those that stand for Slurm's jobs.
fn leases_of_vms(view: &View) -> impl Iterator<Item = &crate::lease::Lease> {
    let leases = view.leases().values().map(|entry| &*entry.lease);
    leases.filter(|lease| !lease.id.as_str().starts_with(JOBS_PREFIX))
}

/// A request for a lease of everything that a node has.
fn whole_node(node: &Node) -> Option<GrantRequest> {
    // With a GPU, its slices and vGPUs are taken. Remote GPUs are of no node.
    let own = node.devices.iter().filter(|own| !own.kind.is_share() && own.kind != DeviceKind::RemoteGpu);
    let devices = own.map(|own| Granted { address: own.address, kind: own.kind }).collect();
    let share =
        |own: &NumaNode| NumaShare { numa: own.id, cores: own.cores, memory: own.memory, huge: own.huge };
    let id = format!("{JOBS_PREFIX}{}", node.name);
    let everything = Assignment {
        vm: VmName::new(&id).ok()?,
        node: node.name.clone(),
        devices,
        shares: node.numa.iter().map(share).collect(),
    };
    let wanted = Wanted::Assignments(ClusterName::new("slurm").ok()?, vec![everything]);
    Some(GrantRequest {
        id: id.parse().ok()?,
        holder: JOBS_HOLDER.to_owned(),
        wanted,
        ttl_ms: MAX_TTL_MS,
        together: false,
        quota: None,
        project: None,
        start: None,
    })
}

/// Logs an error, but not again while it stays the same.
fn warn_once(warned: &mut String, result: Result<(), String>) {
    match result {
        Ok(()) => warned.clear(),
        Err(reason) if reason == *warned => {}
        Err(reason) => {
            tracing::warn!(reason, "cannot follow Slurm; it is tried again");
            *warned = reason;
        }
    }
}
