//! Runs a plan: several migrations at once, as many as nodes and uplinks bear; stops on the first failure; goes on where another run
//! ended.
//!
//! What is written down before something is done, and what after, is such that a bridge may die at any point: the new place is
//! leased, then the step is marked as moving, then the VM moves, then it is marked as done, then the old place is given back. A step
//! found marked as moving is decided by where the VM is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sched_bridge::model::NodeName;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use super::mover::{Moved, Mover};
use super::{Plan, PlanState, Runner, StepState};
use crate::bridge::{Arrival, Bridge, BridgeError};
use crate::lease::LeaseId;

/// How often a run says that it is alive, and how long another one waits before it takes over.
const BEAT: Duration = Duration::from_secs(1);
const SILENCE: Duration = Duration::from_secs(4);
/// How often it is looked whether somebody else's migration has ended.
const LOOK: Duration = Duration::from_millis(300);
/// How long it may take.
const LOOKS: u32 = 2000;

/// How much at once.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Migrations that a node takes part in, either way.
    pub per_node: usize,
    /// Migrations through the uplink of a leaf switch, either way.
    pub per_uplink: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { per_node: 1, per_uplink: 2 }
    }
}

/// Why a plan cannot be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The bridge.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// Somebody runs it.
    #[error("plan {0} is being run by another bridge: see `vmove plan show {0}`")]
    Running(LeaseId),
}

/// A run of one plan.
#[derive(Debug)]
struct Run {
    bridge: Arc<Bridge>,
    mover: Arc<dyn Mover>,
    runner: String,
    plan: Mutex<Plan>,
}

/// Runs a plan to its end, or until a step fails. Gives the plan as it is then.
///
/// # Errors
/// There is no such plan, somebody else runs it, or the store does not answer.
pub async fn run(
    bridge: &Arc<Bridge>,
    mover: Arc<dyn Mover>,
    id: &LeaseId,
    limits: Limits,
) -> Result<Plan, RunError> {
    let runner = LeaseId::unique().to_string();
    let plan = claim(bridge, id, &runner).await?;
    if plan.state == PlanState::Done {
        return Ok(plan);
    }
    let run = Arc::new(Run { bridge: Arc::clone(bridge), mover, runner, plan: Mutex::new(plan) });
    let beat = tokio::spawn(beat(Arc::clone(&run)));
    let ended = all_steps(&run, limits).await;
    beat.abort();
    let mut plan = run.plan.lock().await;
    plan.state = match ended {
        Ok(()) => PlanState::Done,
        Err(reason) => PlanState::Stopped { reason },
    };
    plan.runner = None;
    run.bridge.put_plan(&plan, Some(&run.runner)).await?;
    Ok(plan.clone())
}

/// Makes the plan ours, if nobody runs it or whoever did is silent.
async fn claim(bridge: &Arc<Bridge>, id: &LeaseId, runner: &str) -> Result<Plan, RunError> {
    let plan = bridge.plan(id)?;
    if plan.state == PlanState::Done {
        return Ok(plan);
    }
    if let Some(before) = &plan.runner {
        tokio::time::sleep(SILENCE).await;
        if bridge.plan(id)?.runner.as_ref() != Some(before) {
            return Err(RunError::Running(id.clone()));
        }
    }
    let ours = Plan {
        state: PlanState::Running,
        runner: Some(Runner { id: runner.to_owned(), beat: 0 }),
        ..plan.clone()
    };
    let before = plan.runner.as_ref().map(|runner| runner.id.as_str());
    match bridge.put_plan(&ours, before).await {
        Ok(()) => Ok(ours),
        Err(BridgeError::Bad(_)) => Err(RunError::Running(id.clone())),
        Err(error) => Err(error.into()),
    }
}

async fn beat(run: Arc<Run>) {
    loop {
        tokio::time::sleep(BEAT).await;
        let mut plan = run.plan.lock().await;
        if let Some(runner) = &mut plan.runner {
            runner.beat += 1;
        }
        if let Err(error) = run.bridge.put_plan(&plan, Some(&run.runner)).await {
            tracing::warn!(plan = %plan.id, %error, "the plan's heartbeat was not written");
        }
    }
}

impl Run {
    async fn mark(&self, step: usize, state: StepState) -> Result<(), String> {
        let mut plan = self.plan.lock().await;
        plan.steps[step].state = state;
        self.bridge.put_plan(&plan, Some(&self.runner)).await.map_err(|e| e.to_string())
    }
}

async fn all_steps(run: &Arc<Run>, limits: Limits) -> Result<(), String> {
    let mut at_work: JoinSet<(usize, Result<(), String>)> = JoinSet::new();
    let mut begun = std::collections::BTreeSet::new();
    let mut failed: Option<String> = None;
    loop {
        if failed.is_none() {
            for step in startable(run, &begun, limits).await {
                begun.insert(step);
                let run = Arc::clone(run);
                at_work.spawn(async move { (step, one_step(&run, step).await) });
            }
        }
        match at_work.join_next().await {
            Some(Ok((step, Ok(())))) => drop(begun.remove(&step)),
            Some(Ok((step, Err(reason)))) => {
                begun.remove(&step);
                let vm = run.plan.lock().await.steps[step].vm.clone();
                failed.get_or_insert_with(|| format!("step {} (VM {vm}): {reason}", step + 1));
            }
            Some(Err(error)) => drop(failed.get_or_insert_with(|| format!("a step failed inside: {error}"))),
            None => break,
        }
    }
    match failed {
        Some(reason) => {
            Err(format!("{reason}; the steps after it were not begun. `vmove plan run` goes on with it"))
        }
        None if run.plan.lock().await.steps.iter().all(super::PlanStep::is_done) => Ok(()),
        None => Err("no step can be begun, though some are left: the plan contradicts itself".to_owned()),
    }
}

/// Steps that can begin beside those at work.
async fn startable(run: &Run, begun: &std::collections::BTreeSet<usize>, limits: Limits) -> Vec<usize> {
    let plan = run.plan.lock().await;
    let Ok(view) = run.bridge.view() else { return Vec::new() };
    let topology = view.fleet().topology();
    let mut busy: BTreeMap<String, usize> = BTreeMap::new();
    // What a step loads, and how much of that is allowed.
    let loads = |step: &super::PlanStep| {
        let leaf = |node: &NodeName| topology.leaf_of(node.as_str());
        let (from, to) = (leaf(&step.from), leaf(&step.to.node));
        let nodes = [&step.from, &step.to.node].map(|node| (format!("node {node}"), limits.per_node));
        let uplinks = [from, to].into_iter().flatten().filter(|_| from != to);
        let uplinks =
            uplinks.map(|leaf| (format!("uplink {}", topology.switch(leaf).name), limits.per_uplink));
        nodes.into_iter().chain(uplinks).collect::<Vec<_>>()
    };
    for step in begun {
        for (what, _) in loads(&plan.steps[*step]) {
            *busy.entry(what).or_default() += 1;
        }
    }
    let mut start = Vec::new();
    for (at, step) in plan.steps.iter().enumerate() {
        let waits = plan.before(at).any(|earlier| !plan.steps[earlier].is_done());
        if step.is_done() || begun.contains(&at) || waits {
            continue;
        }
        let loads = loads(step);
        if loads.iter().all(|(what, most)| busy.get(what).copied().unwrap_or(0) < *most) {
            for (what, _) in loads {
                *busy.entry(what).or_default() += 1;
            }
            start.push(at);
        }
    }
    start
}

async fn one_step(run: &Run, at: usize) -> Result<(), String> {
    let step = run.plan.lock().await.steps[at].clone();
    let moved = match step.state {
        StepState::Done { .. } => return Ok(()),
        // An earlier run began it.
        StepState::Moving => found(run, &step).await?,
        StepState::Pending | StepState::Failed { .. } => None,
    };
    let moved = match moved {
        Some(moved) => moved,
        None => {
            run.bridge.reserve_move(&step.to).await.map_err(|e| e.to_string())?;
            run.mark(at, StepState::Moving).await?;
            let moved = run.mover.migrate(&step.vm, &step.from, &step.to.node).await;
            match moved {
                // The command was killed, or lost its daemon: where the VM is, tells.
                Moved::Unclear(reason) => found(run, &step).await?.unwrap_or(Moved::Stayed(reason)),
                moved => moved,
            }
        }
    };
    let (state, arrival, result) = match moved {
        Moved::Arrived { total_ms, downtime_us } => {
            (StepState::Done { total_ms, downtime_us }, Arrival::Arrived, Ok(()))
        }
        Moved::Stayed(reason) | Moved::Unclear(reason) => {
            (StepState::Failed { reason: reason.clone() }, Arrival::Stayed, Err(reason))
        }
    };
    // First the lease, then the mark: a run that finds the mark missing finds the lease settled already, which is fine.
    run.bridge.settle_move(&step.vm, &step.to.node, arrival).await.map_err(|e| e.to_string())?;
    run.mark(at, state).await?;
    result
}

/// Looks where a VM is whose migration somebody else began; waits while it is on its way. `None`: it is still where it was, and not
/// on its way.
async fn found(run: &Run, step: &super::PlanStep) -> Result<Option<Moved>, String> {
    for _ in 0..LOOKS {
        let (from, to) = (run.mover.list(&step.from).await?, run.mover.list(&step.to.node).await?);
        let (from, to) = (from.get(step.vm.as_str()), to.get(step.vm.as_str()));
        match (from, to) {
            (None, Some(there)) if !there.moving => {
                return Ok(Some(Moved::Arrived { total_ms: 0, downtime_us: 0 }));
            }
            (Some(here), None) if !here.moving => return Ok(None),
            (None, None) => {
                return Err(format!(
                    "VM {} is neither on {} nor on {}: look at `vmove list` of both, and at `vmove recover`",
                    step.vm, step.from, step.to.node
                ));
            }
            _ => tokio::time::sleep(LOOK).await,
        }
    }
    Err(format!("VM {} is on its way from {} to {} and does not arrive", step.vm, step.from, step.to.node))
}
