//! What a bridge does for a Slurm cluster all the time: it takes over nodes and switches, keeps Slurm's jobs off what was placed, keeps
//! off what Slurm's jobs have, and empties nodes that Slurm drains.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use sched_bridge::model::{Assignment, ClusterName, Granted, Node, NodeName, NodeState, NumaShare, VmName};

use super::{Slurm, SlurmError, read};
use crate::api::plans::PlanRequest;
use crate::bridge::{Ask, Bridge, BridgeError, Want};
use crate::lease::{LeaseId, MAX_TTL_MS};
use crate::plan::mover::Mover;
use crate::plan::run::{Limits, RunError, run};
use crate::plan::{PlanState, make};

/// Names of reservations begin so that stand for leases.
pub(super) const RESERVATION: &str = "vmove-";
/// Ids of leases begin so that stand for nodes on which Slurm's jobs run.
const JOBS: &str = "slurm.";

/// How a cluster is followed.
#[derive(Debug, Clone)]
pub struct Follow {
    /// The cluster.
    pub slurm: Slurm,
    /// Who may use the reservations (`root`, `alice,bob`).
    pub users: String,
    /// Between two looks.
    pub every: Duration,
    /// Whether VMs leave nodes that Slurm drains.
    pub evacuate: bool,
    /// A booking and a look do not come between each other's steps.
    pub alone: Arc<tokio::sync::Mutex<()>>,
}

impl Follow {
    /// Follows it as long as the process lives.
    pub async fn forever(self, bridge: Arc<Bridge>, mover: Arc<dyn Mover>, limits: Limits) {
        let (look, empty) = (self.clone(), self);
        let looking = async {
            let mut said = String::new();
            loop {
                tell(&mut said, look.turn(&bridge).await.map_err(|e| e.to_string()));
                tokio::time::sleep(look.every).await;
            }
        };
        // Migrations take their time; what Slurm does is followed meanwhile.
        let emptying = async {
            let (mut said, mut plans) = (String::new(), BTreeMap::new());
            if !empty.evacuate {
                return;
            }
            loop {
                tell(&mut said, empty.empty(&bridge, &mover, limits, &mut plans).await);
                tokio::time::sleep(empty.every).await;
            }
        };
        tokio::join!(looking, emptying);
    }

    /// One look.
    ///
    /// # Errors
    /// Slurm or the store does not answer.
    pub async fn turn(&self, bridge: &Arc<Bridge>) -> Result<(), SlurmError> {
        let _alone = self.alone.lock().await;
        self.slurm.publish(bridge).await?;
        let known: BTreeSet<NodeName> = self.slurm.nodes().await?.into_iter().map(|node| node.name).collect();
        self.keep_off_jobs(bridge).await?;
        self.keep_jobs_off(bridge, &known).await
    }

    /// A reservation for each lease, on the nodes that it has now.
    async fn keep_jobs_off(&self, bridge: &Bridge, known: &BTreeSet<NodeName>) -> Result<(), SlurmError> {
        let view = bridge.view()?;
        let placed = view.leases().values().filter(|own| !own.lease.id.as_str().starts_with(JOBS));
        let wanted: BTreeMap<String, BTreeSet<NodeName>> = placed
            .map(|own| {
                let nodes = own.lease.nodes().into_iter().filter(|node| known.contains(node)).collect();
                (format!("{RESERVATION}{}", own.lease.id), nodes)
            })
            .filter(|(_, nodes): &(String, BTreeSet<NodeName>)| !nodes.is_empty())
            .collect();
        let there = self.reservations().await?;
        for name in there.keys().filter(|name| !wanted.contains_key(*name)) {
            // As long as jobs of the cluster's own run in it, Slurm keeps it; the next look tries again.
            if let Err(error) = self.slurm.let_go(name).await {
                tracing::debug!(reservation = name, %error, "a reservation stays");
            }
        }
        for (name, nodes) in wanted {
            let list: Vec<NodeName> = nodes.iter().cloned().collect();
            match there.get(&name) {
                Some(held) if *held == nodes => {}
                Some(_) => self.slurm.hold_instead(&name, &list).await?,
                None => self.slurm.hold(&name, &list, &self.users).await?,
            }
        }
        Ok(())
    }

    /// Our reservations, and their nodes.
    async fn reservations(&self) -> Result<BTreeMap<String, BTreeSet<NodeName>>, SlurmError> {
        let text = self.slurm.run(&["scontrol", "-o", "show", "reservation"]).await?;
        let mut found = BTreeMap::new();
        for line in text.lines() {
            let (name, list) = (read::field(line, "ReservationName"), read::field(line, "Nodes"));
            if let Some(name) = name.filter(|name| name.starts_with(RESERVATION)) {
                found.insert(name.to_owned(), self.slurm.hosts(list.unwrap_or_default()).await?);
            }
        }
        Ok(found)
    }

    /// Nodes on which jobs of Slurm's run that belong to no lease.
    pub(super) async fn busy(&self) -> Result<BTreeSet<NodeName>, SlurmError> {
        let text = self.slurm.run(&["squeue", "-h", "-t", "CF,R,CG,S", "-o", "%v|%N"]).await?;
        let mut busy = BTreeSet::new();
        for line in text.lines() {
            let (reservation, list) = line.split_once('|').unwrap_or(("", line));
            if !reservation.starts_with(RESERVATION) {
                busy.extend(self.slurm.hosts(list.trim()).await?);
            }
        }
        Ok(busy)
    }

    /// A lease for each node on which Slurm's jobs run, so that nothing is placed there.
    pub(super) async fn keep_off_jobs(&self, bridge: &Bridge) -> Result<(), SlurmError> {
        let busy = self.busy().await?;
        let view = bridge.view()?;
        for id in view.leases().keys() {
            if let Some(node) = id.as_str().strip_prefix(JOBS)
                && !busy.iter().any(|busy| busy.as_str() == node)
            {
                bridge.release(id).await?;
            }
        }
        let held = |node: &NodeName| {
            let mut leases = view.leases().values();
            leases.any(|own| own.lease.held.iter().any(|held| held.assignment.node == *node))
        };
        for name in &busy {
            // Where VMs are, there is a reservation; a job that was there before it ends some day.
            let Some((node, _)) = view.node(name).filter(|_| !held(name)) else { continue };
            let Some(ask) = whole(node) else { continue };
            match bridge.grant(ask).await {
                // Somebody was faster: the same as above.
                Ok(_) | Err(BridgeError::Taken(_) | BridgeError::Place(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Empties nodes that Slurm drains. A plan that stops is run again at the next look, until it is done or somebody deletes it.
    ///
    /// # Errors
    /// What the first that could not be emptied says.
    pub async fn empty(
        &self,
        bridge: &Arc<Bridge>,
        mover: &Arc<dyn Mover>,
        limits: Limits,
        plans: &mut BTreeMap<NodeName, LeaseId>,
    ) -> Result<(), String> {
        let nodes = self.slurm.nodes().await.map_err(|e| e.to_string())?;
        let mut first = Ok(());
        for node in nodes.into_iter().filter(|node| node.state == NodeState::Drained) {
            if let Err(reason) = one_node(bridge, mover, limits, plans, &node.name).await {
                first = first.and(Err(format!("node {} is drained, but not empty: {reason}", node.name)));
            }
        }
        first
    }
}

async fn one_node(
    bridge: &Arc<Bridge>,
    mover: &Arc<dyn Mover>,
    limits: Limits,
    plans: &mut BTreeMap<NodeName, LeaseId>,
    node: &NodeName,
) -> Result<(), String> {
    let view = bridge.view().map_err(|e| e.to_string())?;
    let placed = view.leases().values().filter(|own| !own.lease.id.as_str().starts_with(JOBS));
    let here = |held: &crate::lease::Held| held.assignment.node == *node;
    if !placed.into_iter().any(|own| own.lease.held.iter().any(here)) {
        plans.remove(node);
        return Ok(());
    }
    let id = match plans.get(node).filter(|id| view.plans().contains_key(id)) {
        Some(id) => id.clone(),
        None => {
            let wanted = PlanRequest::Evacuate { node: node.to_string() };
            let plan = make::make(bridge, &wanted).await.map_err(|e| e.to_string())?;
            bridge.put_plan(&plan, None).await.map_err(|e| e.to_string())?;
            tracing::info!(%node, plan = %plan.id, steps = plan.steps.len(), "Slurm drains a node: its VMs leave");
            plans.insert(node.clone(), plan.id.clone());
            plan.id
        }
    };
    match run(bridge, Arc::clone(mover), &id, limits).await {
        Ok(plan) if plan.state == PlanState::Done => {
            plans.remove(node);
            Ok(())
        }
        Ok(plan) => Err(match plan.state {
            PlanState::Stopped { reason } => format!("plan {id}: {reason}"),
            other => format!("plan {id} is {other:?}"),
        }),
        Err(RunError::Running(_)) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// A lease on all of a node.
fn whole(node: &Node) -> Option<Ask> {
    let devices = node.devices.iter().map(|own| Granted { address: own.address, kind: own.kind }).collect();
    let share = |own: &sched_bridge::model::NumaNode| NumaShare {
        numa: own.id,
        cores: own.cores,
        memory: own.memory,
        huge: own.huge,
    };
    let id = format!("{JOBS}{}", node.name);
    let all = Assignment {
        vm: VmName::new(&id).ok()?,
        node: node.name.clone(),
        devices,
        shares: node.numa.iter().map(share).collect(),
    };
    let want = Want::Exactly(ClusterName::new("slurm").ok()?, vec![all]);
    Some(Ask { id: id.parse().ok()?, holder: "slurm".to_owned(), want, ttl_ms: MAX_TTL_MS })
}

/// Says what went wrong, once, as long as it stays the same.
fn tell(said: &mut String, result: Result<(), String>) {
    match result {
        Ok(()) => said.clear(),
        Err(reason) if reason == *said => {}
        Err(reason) => {
            tracing::warn!(reason, "Slurm is not followed");
            *said = reason;
        }
    }
}
