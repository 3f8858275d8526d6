//! Runs a plan: several migrations at once, as many as nodes and uplinks allow. It stops at the first failure, and continues where an
//! earlier run ended.
//!
//! The order in which things are recorded and done lets a bridge die at any point: the destination is leased, the step is marked as
//! moving, the VM is migrated, the source is given back, the step is marked as done. For a step that is found marked as moving, the
//! VM's node tells how it ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use sched_bridge::model::NodeName;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use tracing::Instrument;

use crate::bridge::{Arrival, Bridge, BridgeError};
use crate::driver::{MigrationEnd, VmDriver, VmMove};
use crate::lease::LeaseId;
use crate::metrics;
use crate::planner;
use crate::together::in_their_roles;
use crate::vms::grant_of;
use vmove_bridge_types::plan::{Plan, PlanState, PlanStep, Runner, StepState};
use vmove_grant::Grant;

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

/// Steps that go at one barrier, or one that goes alone.
type Unit = Vec<usize>;

async fn run_steps(run: &Arc<Run>, limits: Limits) -> Result<(), String> {
    let mut running: JoinSet<(Unit, Result<(), String>)> = JoinSet::new();
    let mut begun = BTreeSet::new();
    let mut failed: Option<String> = None;
    loop {
        if failed.is_none() {
            for unit in startable(run, &begun, limits).await {
                begun.extend(unit.iter().copied());
                let run = Arc::clone(run);
                running.spawn(
                    async move {
                        let ended = run_unit(&run, &unit).await;
                        (unit, ended)
                    }
                    .in_current_span(),
                );
            }
        }
        match running.join_next().await {
            Some(Ok((unit, ended))) => {
                begun.retain(|step| !unit.contains(step));
                if let Err(reason) = ended {
                    failed = failed.or(Some(reason));
                }
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

/// Steps that can begin while others run. A group counts once on each node and uplink that it loads: its members go side by side.
async fn startable(run: &Run, begun: &BTreeSet<usize>, limits: Limits) -> Vec<Unit> {
    let plan = run.plan.lock().await;
    let Ok(view) = run.bridge.view() else { return Vec::new() };
    let topology = view.fleet().topology();
    let mut busy: BTreeMap<String, usize> = BTreeMap::new();
    // What a unit loads, with the limit of each.
    let loads = |unit: &[usize]| {
        let mut loads = BTreeMap::new();
        for step in unit.iter().map(|at| &plan.steps[*at]) {
            let leaf = |node: &NodeName| topology.leaf_of(node.as_str());
            let (from, to) = (leaf(&step.from), leaf(&step.to.node));
            loads.extend([&step.from, &step.to.node].map(|node| (format!("node {node}"), limits.per_node)));
            let uplinks = [from, to].into_iter().flatten().filter(|_| from != to);
            loads.extend(
                uplinks.map(|leaf| (format!("uplink {}", topology.switch(leaf).name), limits.per_uplink)),
            );
        }
        loads
    };
    let units = units(&plan);
    for unit in units.iter().filter(|unit| unit.iter().any(|step| begun.contains(step))) {
        for what in loads(unit).into_keys() {
            *busy.entry(what).or_default() += 1;
        }
    }
    let mut start = Vec::new();
    for unit in units {
        let waits = |at: &usize| plan.before(*at).any(|earlier| !plan.steps[earlier].is_done());
        if unit.iter().any(|at| begun.contains(at) || waits(at)) {
            continue;
        }
        let loads = loads(&unit);
        if loads.iter().all(|(what, most)| busy.get(what).copied().unwrap_or(0) < *most) {
            for what in loads.into_keys() {
                *busy.entry(what).or_default() += 1;
            }
            start.push(unit);
        }
    }
    start
}

/// The steps that are left, each with those that it goes with.
fn units(plan: &Plan) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    for (at, step) in plan.steps.iter().enumerate().filter(|(_, step)| !step.is_done()) {
        let same = |unit: &&mut Unit| step.group.is_some() && plan.steps[unit[0]].group == step.group;
        match units.iter_mut().find(same) {
            Some(unit) => unit.push(at),
            None => units.push(vec![at]),
        }
    }
    units
}

/// Runs steps at one barrier. The first that fails is told.
async fn run_unit(run: &Run, unit: &[usize]) -> Result<(), String> {
    let steps: Vec<PlanStep> = {
        let plan = run.plan.lock().await;
        unit.iter().map(|at| plan.steps[*at].clone()).collect()
    };
    let Some(first) = steps.first() else { return Ok(()) };
    let vms = steps.iter().map(|step| step.vm.as_str()).collect::<Vec<_>>().join(", ");
    let span = tracing::info_span!("step", vm = vms, from = %first.from, to = %first.to.node);
    let ended = run_unit_of(run, unit, &steps).instrument(span).await;
    ended.map_err(|reason| match unit {
        [at] => format!("step {} (VM {vms}): {reason}", at + 1),
        _ => format!("VMs {vms}, which move at one barrier: {reason}"),
    })
}

async fn run_unit_of(run: &Run, unit: &[usize], steps: &[PlanStep]) -> Result<(), String> {
    let mut ends: Vec<Option<MigrationEnd>> = Vec::new();
    for step in steps {
        ends.push(match step.state {
            // An earlier run began it.
            StepState::Moving => wait_for_end(run, step).await?,
            _ => None,
        });
    }
    let left: Vec<usize> = (0..unit.len()).filter(|index| ends[*index].is_none()).collect();
    if !left.is_empty() {
        let of = |index: &usize| (unit[*index], &steps[*index]);
        let ended = migrate(run, &left.iter().map(of).collect::<Vec<_>>()).await?;
        left.into_iter().zip(ended).for_each(|(index, end)| ends[index] = Some(end));
    }
    let mut first = Ok(());
    for ((at, step), end) in unit.iter().zip(steps).zip(ends.into_iter().flatten()) {
        let settled = settle(run, *at, step, end).await;
        first = first.and(settled);
    }
    first
}

/// Records how one ended.
async fn settle(run: &Run, at: usize, step: &PlanStep, end: MigrationEnd) -> Result<(), String> {
    let (state, arrival, result) = match end {
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
        Ok(()) => tracing::info!(vm = %step.vm, "the VM has arrived"),
        Err(reason) => tracing::warn!(vm = %step.vm, reason, "the VM has stayed on its source"),
    }
    result
}

/// Leases the destinations, and migrates the VMs of these steps, which leave one node.
async fn migrate(run: &Run, steps: &[(usize, &PlanStep)]) -> Result<Vec<MigrationEnd>, String> {
    for (at, step) in steps {
        if let Err(error) = run.bridge.reserve_move(&step.to).await {
            give_back_places(run, steps).await;
            return Err(error.to_string());
        }
        run.mark(*at, StepState::Moving).await?;
    }
    // Only the place of a VM that does not run moves.
    let mut ends = vec![MigrationEnd::Arrived { total_ms: 0, downtime_us: 0 }; steps.len()];
    let mut running = Vec::new();
    for (index, (_, step)) in steps.iter().enumerate() {
        if may_run(run, step).await? {
            running.push(index);
        }
    }
    let Some(from) = running.first().map(|index| steps[*index].1.from.clone()) else { return Ok(ends) };
    let moved: Vec<&PlanStep> = running.iter().map(|index| steps[*index].1).collect();
    let moves = moves_of(run, &from, &moved).await?;
    for (index, end) in running.into_iter().zip(run.driver.migrate(&from, &moves).await) {
        ends[index] = match end {
            // The command was killed, or lost its daemon: the VM's node tells how it ended.
            MigrationEnd::Unknown(reason) => {
                wait_for_end(run, steps[index].1).await?.unwrap_or(MigrationEnd::Stayed(reason))
            }
            ended => ended,
        };
    }
    Ok(ends)
}

/// None of them was begun: those that have a place at their destination give it back.
async fn give_back_places(run: &Run, steps: &[(usize, &PlanStep)]) {
    for (at, step) in steps {
        let back = run.bridge.settle_move(&step.vm, &step.to.node, Arrival::Stayed).await;
        let marked = run.mark(*at, StepState::Pending).await;
        if let Err(error) = back.map_err(|error| error.to_string()).and(marked) {
            tracing::warn!(error, vm = %step.vm, "its place at the destination is not given back yet");
        }
    }
}

/// Where VMs go, each with the devices that its lease has there, in the roles that it knows.
async fn moves_of(run: &Run, from: &NodeName, steps: &[&PlanStep]) -> Result<Vec<VmMove>, String> {
    let view = run.bridge.view().map_err(|e| e.to_string())?;
    let home = |step: &PlanStep| {
        view.lease_of(&step.vm).ok()?.lease.home(&step.vm).map(|home| home.assignment.clone())
    };
    let any = steps.iter().any(|step| home(step).is_some_and(|home| home.plugged().next().is_some()));
    let owned = if any { run.driver.owned(from).await? } else { BTreeMap::new() };
    let one = |step: &&PlanStep| {
        let roles = owned.get(step.vm.as_str()).zip(home(step));
        let devices = roles.map(|(owned, home)| in_their_roles(owned, &home, &step.to)).unwrap_or_default();
        let entry = view.lease_of(&step.vm).map_err(|e| e.to_string())?;
        // Its roles are those that the guest knows.
        let grant = Grant { devices, ..grant_of(&entry.lease, &step.to) };
        Ok(VmMove { vm: step.vm.clone(), to: step.to.node.clone(), grant })
    };
    steps.iter().map(one).collect()
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
