//! Makes move plans from the current leases, by the planner of the library.

use std::collections::BTreeSet;
use std::sync::Arc;

use sched_bridge::model::{Assignment, ClusterName, Fleet, NodeName, NodeState, Occupancy};
use sched_bridge::moves::{self, PlanError, Resident};
use sched_bridge::place::{Alternative, ClusterRequest, VmGroup};
use sched_bridge::request::Catalog;

use crate::bridge::{Bridge, BridgeError, View};
use crate::lease::{Held, Lease, LeaseId, Part};
use crate::request_text;
use crate::together;
use vmove_bridge_types::plan::{HopsGain, Plan, PlanRequest, PlanState, PlanStep, StepState};

/// Makes a plan, without storing it. Requests may name what is in `catalog`.
///
/// # Errors
/// No migrations achieve what is requested, the request is not valid, or the store does not answer.
pub async fn make_plan(
    bridge: &Arc<Bridge>,
    request: &PlanRequest,
    catalog: &Arc<Catalog>,
) -> Result<Plan, BridgeError> {
    let (view, id) = (bridge.view()?, LeaseId::unique());
    let span = tracing::info_span!("plan", %id);
    let (request, made_wall_ms) = (request.clone(), bridge.clock().stamp().wall_ms);
    let catalog = Arc::clone(catalog);
    let work = move || {
        let plan = draft(&view, id, &request, &catalog, made_wall_ms)?;
        span.in_scope(|| {
            tracing::info!(purpose = plan.purpose, steps = plan.steps.len(), "the plan is made");
        });
        Ok(plan)
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(plan) => plan,
        Err(error) => {
            Err(BridgeError::Invalid(format!("the planner failed ({error}): please report this request")))
        }
    }
}

/// Makes a plan and stores it. A node that is to be emptied is drained first, so that it gets no new VMs meanwhile; if there is no plan, it
/// is left as it was.
///
/// # Errors
/// As [`make_plan`].
pub async fn make_and_keep(
    bridge: &Arc<Bridge>,
    request: &PlanRequest,
    catalog: &Arc<Catalog>,
) -> Result<Plan, BridgeError> {
    let drained = match request {
        PlanRequest::Evacuate { node } => {
            let name = NodeName::new(node).map_err(|e| BridgeError::Invalid(e.to_string()))?;
            drain(bridge, &name).await?.then_some(name)
        }
        _ => None,
    };
    let made = async {
        let mut plan = make_plan(bridge, request, catalog).await?;
        if let Some(node) = &plan.drains {
            plan.notes
                .push(format!("node {node} is drained: it takes no VMs until `vmove fleet resume {node}`"));
        }
        bridge.put_plan(&plan, None).await?;
        Ok(plan)
    };
    let made = made.await;
    if let (Err(_), Some(node)) = (&made, drained) {
        bridge.set_node_state(&node, NodeState::Up).await?;
    }
    made
}

/// Lets a node take no more VMs. True if it did until now.
///
/// # Errors
/// There is no such node, or the store does not answer.
pub async fn drain(bridge: &Arc<Bridge>, node: &NodeName) -> Result<bool, BridgeError> {
    let state = bridge.view()?.node(node).map(|(node, _)| node.state);
    let up = state.ok_or_else(|| BridgeError::UnknownNode(node.clone()))? == NodeState::Up;
    if up {
        bridge.set_node_state(node, NodeState::Drained).await?;
    }
    Ok(up)
}

fn draft(
    view: &View,
    id: LeaseId,
    request: &PlanRequest,
    catalog: &Catalog,
    made_wall_ms: u64,
) -> Result<Plan, BridgeError> {
    let fleet = view.fleet();
    let (residents, mut notes) = residents(view);
    let bad = |e: sched_bridge::model::IdError| BridgeError::Invalid(e.to_string());
    let mut drains = None;
    let (purpose, plan) = match request {
        PlanRequest::Evacuate { node } => {
            let name = NodeName::new(node).map_err(bad)?;
            let plan = moves::evacuate(fleet, &residents, &name);
            drains = Some(name);
            (format!("evacuate {node}"), plan)
        }
        PlanRequest::Compact { cluster } => {
            let purpose = format!("compact {}", cluster.as_deref().unwrap_or("all"));
            (purpose, moves::compact(fleet, &residents, cluster.as_deref()))
        }
        PlanRequest::Relocate { cluster, away } => {
            let names = away.iter().map(NodeName::new).collect::<Result<Vec<_>, _>>().map_err(bad)?;
            let plan = moves::relocate(fleet, &residents, cluster, &names);
            (format!("move {cluster} off {}", away.join(", ")), plan)
        }
        PlanRequest::MakeRoom { text, cluster } => {
            let cluster = cluster.as_deref().map(ClusterName::new).transpose().map_err(bad)?;
            let parsed =
                request_text::parse(text, cluster.as_ref(), catalog).map_err(BridgeError::Invalid)?;
            notes.extend(parsed.notes);
            let wanted = parsed.request;
            let room = moves::make_room(fleet, &residents, &wanted).map(|(plan, placement)| {
                let nodes: BTreeSet<&str> = placement.assignments.iter().map(|to| to.node.as_str()).collect();
                let nodes: Vec<&str> = nodes.into_iter().collect();
                notes.push(format!("then {} fits on {}", wanted.name, nodes.join(", ")));
                plan
            });
            (format!("make room for {}", wanted.name), room)
        }
    };
    let plan = plan.map_err(refusal)?;
    notes.extend(plan.notes);
    let step = |step: moves::Step| PlanStep {
        vm: step.to.vm.clone(),
        from: step.from.node,
        to: step.to,
        memory_mib: step.memory.0,
        spare: step.spare,
        group: None,
        outages: Vec::new(),
        state: StepState::Pending,
    };
    let mut plan = Plan {
        id,
        purpose,
        made_wall_ms,
        steps: plan.steps.into_iter().map(step).collect(),
        hops: HopsGain { before: plan.hops.before, after: plan.hops.after },
        drains,
        notes,
        state: PlanState::Planned,
        runner: None,
    };
    together::arrange(view, &mut plan);
    Ok(plan)
}

fn refusal(error: PlanError) -> BridgeError {
    match error {
        PlanError::Place(error) => BridgeError::Place(error),
        PlanError::Unknown { .. } => BridgeError::Invalid(error.to_string()),
        other => BridgeError::NoPlan(other.to_string()),
    }
}

/// All leases, as the planner sees them. Whatever a node no longer has although it is leased (a broken device) is left out, with a
/// note: the VM can leave nevertheless.
fn residents(view: &View) -> (Vec<Resident>, Vec<String>) {
    let mut used = Occupancy::new(view.fleet());
    let (mut residents, mut notes) = (Vec::new(), Vec::new());
    for known in view.leases().values() {
        let mut lease = Lease::clone(&known.lease);
        lease.held = lease
            .held
            .into_iter()
            .filter_map(|held| {
                let vm = held.assignment.vm.clone();
                let Some(assignment) = take_existing(view.fleet(), &mut used, &held.assignment) else {
                    notes.push(format!(
                        "VM {vm} is on node {}, which is not in the fleet",
                        held.assignment.node
                    ));
                    return None;
                };
                if assignment != held.assignment {
                    notes.push(format!(
                        "VM {vm} has leased something that node {} no longer has",
                        assignment.node
                    ));
                }
                Some(Held { assignment, ..held })
            })
            .collect();
        residents.extend(as_residents(&lease));
    }
    (residents, notes)
}

/// Takes what still exists of an assignment. None if the node does not.
fn take_existing(fleet: &Fleet, used: &mut Occupancy, held: &Assignment) -> Option<Assignment> {
    fleet.find(held.node.as_str())?;
    if used.take(fleet, held).is_ok() {
        return Some(held.clone());
    }
    let mut existing = Assignment { devices: Vec::new(), shares: Vec::new(), ..held.clone() };
    for device in &held.devices {
        existing.devices.push(*device);
        if used.clone().take(fleet, &existing).is_err() {
            existing.devices.pop();
        }
    }
    for share in &held.shares {
        existing.shares.push(*share);
        if used.clone().take(fleet, &existing).is_err() {
            existing.shares.pop();
        }
    }
    used.take(fleet, &existing).ok().map(|()| existing)
}

/// A lease, as the planner sees it: its remaining VMs, by the groups of its request. The destination of a VM that is being migrated
/// stays as it is, and so does everything that was leased without a request.
fn as_residents(lease: &Lease) -> Vec<Resident> {
    let (mut home, moving): (Vec<&Held>, Vec<&Held>) =
        lease.held.iter().partition(|held| held.part == Part::Home);
    let names = lease.request.as_ref().and_then(|request| request.vm_names().ok()).unwrap_or_default();
    let group = |held: &Held| names.iter().position(|(name, _)| *name == held.assignment.vm);
    let incoming = pinned(lease, &moving);
    let (Some(request), true) = (&lease.request, home.iter().all(|held| group(held).is_some())) else {
        return [pinned(lease, &home), incoming].into_iter().flatten().collect();
    };
    home.sort_by_key(|held| group(held));
    let mut request = request.clone();
    for (at, remaining) in request.groups.iter_mut().enumerate() {
        let left = home.iter().filter_map(|held| group(held)).filter(|name| names[*name].1 == at);
        remaining.count = u32::try_from(left.count()).unwrap_or(u32::MAX);
    }
    request.groups.retain(|group| group.count > 0);
    let movable = Resident {
        request,
        assignments: home.iter().map(|held| held.assignment.clone()).collect(),
        pinned: moving.iter().map(|held| held.assignment.vm.clone()).collect(),
    };
    [Some(movable).filter(|resident| !resident.assignments.is_empty()), incoming]
        .into_iter()
        .flatten()
        .collect()
}

/// VMs that stay where they are.
fn pinned(lease: &Lease, held: &[&Held]) -> Option<Resident> {
    let assignments: Vec<Assignment> = held.iter().map(|held| held.assignment.clone()).collect();
    if assignments.is_empty() {
        return None;
    }
    let pinned = assignments.iter().map(|assignment| assignment.vm.clone()).collect();
    let count = u32::try_from(assignments.len()).unwrap_or(u32::MAX);
    let group = VmGroup { name: "held".to_owned(), count, alternatives: vec![Alternative::default()] };
    let request = ClusterRequest::new(lease.cluster.clone(), vec![group]);
    Some(Resident { request, assignments, pinned })
}
