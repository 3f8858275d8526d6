//! Runs a plan: several migrations at once, as many as nodes and uplinks allow. It stops at the first failure, and continues where an
//! earlier run ended.
//!
//! The order in which things are recorded and done lets a bridge die at any point: the destination is leased, the step is marked as
//! moving, the VM is migrated, the source is given back, the step is marked as done. For a step that is found marked as moving, the
//! VM's node tells how it ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sched_bridge::model::NodeName;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use tracing::Instrument;

use crate::bridge::{Arrival, Bridge, BridgeError};
use crate::driver::{MigrationEnd, VmDriver};
use crate::lease::LeaseId;
use crate::metrics;
use crate::planner;
use vmove_bridge_types::plan::{Plan, PlanState, PlanStep, Runner, StepState};

/// A run writes a heartbeat so often.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// A run without a heartbeat for so long is taken over.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(4);
/// Between two looks at a migration that an earlier run began.
const LOOK_INTERVAL: Duration = Duration::from_millis(300);
/// Within it such a migration must have ended.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(1800);

/// How many migrations may run at once.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Migrations that a node is part of, as source or destination.
    pub per_node: usize,
    /// Migrations through the uplink of a leaf switch, in either direction.
    pub per_uplink: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { per_node: 1, per_uplink: 2 }
    }
}

/// Why a plan is not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// There is no such plan, or the store does not answer.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// It is already running.
    #[error("plan {0} is already running: see `vmove plan show {0}`")]
    AlreadyRunning(LeaseId),
}

/// A run of one plan.
#[derive(Debug)]
struct Run {
    bridge: Arc<Bridge>,
    driver: Arc<dyn VmDriver>,
    runner: String,
    plan: Mutex<Plan>,
}

/// Runs a plan to its end, or until a step fails. Returns the plan as it is then.
///
/// # Errors
/// There is no such plan, another run of it is alive, or the store does not answer.
#[tracing::instrument(name = "plan", skip_all, fields(%id))]
pub async fn run(
    bridge: &Arc<Bridge>,
    driver: Arc<dyn VmDriver>,
    id: &LeaseId,
    limits: Limits,
) -> Result<Plan, RunError> {
    let runner = LeaseId::unique().to_string();
    let plan = claim(bridge, id, &runner).await?;
    if plan.state == PlanState::Done {
        return Ok(plan);
    }
    tracing::info!(purpose = plan.purpose, steps = plan.steps.len(), "the plan runs");
    // It may have been resumed since the plan was made.
    let drained = match &plan.drains {
        Some(node) => planner::drain(bridge, node).await.map(drop),
        None => Ok(()),
    };
    let run = Arc::new(Run { bridge: Arc::clone(bridge), driver, runner, plan: Mutex::new(plan) });
    let heartbeat = tokio::spawn(keep_beating(Arc::clone(&run)).in_current_span());
    let ended = match drained {
        Ok(()) => run_steps(&run, limits).await,
        Err(error) => Err(error.to_string()),
    };
    heartbeat.abort();
    let mut plan = run.plan.lock().await;
    plan.state = match ended {
        Ok(()) => PlanState::Done,
        Err(reason) => PlanState::Stopped { reason },
    };
    plan.runner = None;
    let recorded = run.bridge.put_plan(&plan, Some(&run.runner)).await;
    match &plan.state {
        PlanState::Stopped { reason } => {
            metrics::plan_ended("stopped");
            tracing::warn!(reason, "the plan has stopped");
        }
        _ => {
            metrics::plan_ended("done");
            tracing::info!("the plan is done");
        }
    }
    recorded?;
    Ok(plan.clone())
}

/// Makes this run the plan's runner, unless another one is alive.
async fn claim(bridge: &Arc<Bridge>, id: &LeaseId, runner: &str) -> Result<Plan, RunError> {
    let plan = bridge.plan(id)?;
    if plan.state == PlanState::Done {
        return Ok(plan);
    }
    if let Some(before) = &plan.runner {
        tokio::time::sleep(HEARTBEAT_TIMEOUT).await;
        if bridge.plan(id)?.runner.as_ref() != Some(before) {
            return Err(RunError::AlreadyRunning(id.clone()));
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
        Err(BridgeError::Invalid(_)) => Err(RunError::AlreadyRunning(id.clone())),
        Err(error) => Err(error.into()),
    }
}

async fn keep_beating(run: Arc<Run>) {
    loop {
        tokio::time::sleep(HEARTBEAT_INTERVAL).await;
        let mut plan = run.plan.lock().await;
        if let Some(runner) = &mut plan.runner {
            runner.beat += 1;
        }
        if let Err(error) = run.bridge.put_plan(&plan, Some(&run.runner)).await {
            tracing::warn!(%error, "could not write the heartbeat of the plan");
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

async fn run_steps(run: &Arc<Run>, limits: Limits) -> Result<(), String> {
    let mut running: JoinSet<(usize, Result<(), String>)> = JoinSet::new();
    let mut begun = std::collections::BTreeSet::new();
    let mut failed: Option<String> = None;
    loop {
        if failed.is_none() {
            for step in startable(run, &begun, limits).await {
                begun.insert(step);
                let run = Arc::clone(run);
                running.spawn(async move { (step, run_step(&run, step).await) }.in_current_span());
            }
        }
        match running.join_next().await {
            Some(Ok((step, Ok(())))) => drop(begun.remove(&step)),
            Some(Ok((step, Err(reason)))) => {
                begun.remove(&step);
                let vm = run.plan.lock().await.steps[step].vm.clone();
                failed.get_or_insert_with(|| format!("step {} (VM {vm}): {reason}", step + 1));
            }
            Some(Err(error)) => drop(failed.get_or_insert_with(|| format!("a step panicked: {error}"))),
            None => break,
        }
    }
    match failed {
        Some(reason) => {
            Err(format!("{reason}; later steps were not begun. `vmove plan run` continues the plan"))
        }
        None if run.plan.lock().await.steps.iter().all(PlanStep::is_done) => Ok(()),
        None => Err("no step can begin, although some are left: the plan contradicts itself".to_owned()),
    }
}

/// Steps that can begin while others run.
async fn startable(run: &Run, begun: &std::collections::BTreeSet<usize>, limits: Limits) -> Vec<usize> {
    let plan = run.plan.lock().await;
    let Ok(view) = run.bridge.view() else { return Vec::new() };
    let topology = view.fleet().topology();
    let mut busy: BTreeMap<String, usize> = BTreeMap::new();
    // What a step loads, with the limit of each.
    let loads = |step: &PlanStep| {
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

async fn run_step(run: &Run, at: usize) -> Result<(), String> {
    let step = run.plan.lock().await.steps[at].clone();
    let span = tracing::info_span!("step", vm = %step.vm, from = %step.from, to = %step.to.node);
    run_step_of(run, at, step).instrument(span).await
}

async fn run_step_of(run: &Run, at: usize, step: PlanStep) -> Result<(), String> {
    let ended = match step.state {
        StepState::Done { .. } => return Ok(()),
        // An earlier run began it.
        StepState::Moving => wait_for_end(run, &step).await?,
        StepState::Pending | StepState::Failed { .. } => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => migrate(run, at, &step).await?,
    };
    let (state, arrival, result) = match ended {
        MigrationEnd::Arrived { total_ms, downtime_us } => {
            metrics::move_ended("arrived");
            (StepState::Done { total_ms, downtime_us }, Arrival::Arrived, Ok(()))
        }
        MigrationEnd::Stayed(reason) | MigrationEnd::Unknown(reason) => {
            metrics::move_ended("stayed");
            (StepState::Failed { reason: reason.clone() }, Arrival::Stayed, Err(reason))
        }
    };
    // The lease comes before the mark: a later run that does not find the mark can settle the lease again.
    run.bridge.settle_move(&step.vm, &step.to.node, arrival).await.map_err(|e| e.to_string())?;
    run.mark(at, state).await?;
    match &result {
        Ok(()) => tracing::info!("the VM has arrived"),
        Err(reason) => tracing::warn!(reason, "the VM has stayed on its source"),
    }
    result
}

/// Leases the destination, and migrates the VM of step `at`.
async fn migrate(run: &Run, at: usize, step: &PlanStep) -> Result<MigrationEnd, String> {
    run.bridge.reserve_move(&step.to).await.map_err(|e| e.to_string())?;
    run.mark(at, StepState::Moving).await?;
    if !may_run(run, step).await? {
        // Only its place moves.
        return Ok(MigrationEnd::Arrived { total_ms: 0, downtime_us: 0 });
    }
    match run.driver.migrate(&step.vm, &step.from, &step.to.node).await {
        // The command was killed, or lost its daemon: the VM's node tells how it ended.
        MigrationEnd::Unknown(reason) => {
            Ok(wait_for_end(run, step).await?.unwrap_or(MigrationEnd::Stayed(reason)))
        }
        ended => Ok(ended),
    }
}

/// Whether a VM runs on its source, or might.
async fn may_run(run: &Run, step: &PlanStep) -> Result<bool, String> {
    let view = run.bridge.view().map_err(|e| e.to_string())?;
    let entry = view.lease_of(&step.vm).map_err(|e| e.to_string())?;
    if entry.lease.home(&step.vm).is_some_and(|home| home.seen) {
        return Ok(true);
    }
    // It was not started, as far as the bridge knows.
    let listed = run.driver.list(&step.from).await;
    Ok(listed.map_or(true, |listed| listed.contains_key(step.vm.as_str())))
}

/// Waits for the end of a migration whose command does not report it. None if the VM is on the source and not being migrated.
async fn wait_for_end(run: &Run, step: &PlanStep) -> Result<Option<MigrationEnd>, String> {
    let end = look_for_end(run, step).await;
    if let Err(reason) = &end {
        metrics::move_ended("unknown");
        tracing::warn!(reason, "it is not known where the VM runs");
    }
    end
}

/// As [`wait_for_end`], by looking for the VM on both nodes.
async fn look_for_end(run: &Run, step: &PlanStep) -> Result<Option<MigrationEnd>, String> {
    let deadline = tokio::time::Instant::now() + MIGRATION_TIMEOUT;
    while tokio::time::Instant::now() < deadline {
        let (on_source, on_destination) =
            tokio::try_join!(run.driver.list(&step.from), run.driver.list(&step.to.node))?;
        match (on_source.get(step.vm.as_str()), on_destination.get(step.vm.as_str())) {
            (None, Some(vm)) if !vm.migrating => {
                return Ok(Some(MigrationEnd::Arrived { total_ms: 0, downtime_us: 0 }));
            }
            (Some(vm), None) if !vm.migrating => return Ok(None),
            (None, None) => {
                return Err(format!(
                    "VM {} is neither on {} nor on {}: look at `vmove list` of both, and at `vmove recover`",
                    step.vm, step.from, step.to.node
                ));
            }
            _ => tokio::time::sleep(LOOK_INTERVAL).await,
        }
    }
    Err(format!(
        "the migration of VM {} from {} to {} has not ended after {MIGRATION_TIMEOUT:?}",
        step.vm, step.from, step.to.node
    ))
}

#[cfg(test)]
pub(crate) mod tests;
