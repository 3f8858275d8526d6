//! `/v1/bridge`, `/v1/nodes`, `/v1/topology`, `/healthz`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use sched_bridge::model::{DeviceKind, Node, NodeName};
use sched_bridge::topology::Topology;
use vmove_http::{Answer, Json, Path, Refusal};

use super::App;
use super::problem::{Code, Problem};
use crate::access::Caller;
use crate::bridge::View;
use crate::listing::Listings;
use vmove_bridge_types::requests::{
    BridgeInfo, LookAnswer, LookRequest, NodeDetail, NodeList, NodeStateRequest, NodeSummary, TopologyText,
};
use vmove_bridge_types::topology_text;

/// Whether the bridge is in touch with its store.
#[utoipa::path(get, path = "/healthz", operation_id = "health", tag = "bridge",
    responses((status = 200, body = String, content_type = "text/plain"), (status = 503, body = Problem)))]
pub async fn health(State(app): State<Arc<App>>) -> Result<&'static str, Refusal> {
    app.bridge.view()?;
    Ok("ok\n")
}

/// Status of the bridge and its store.
#[utoipa::path(get, path = "/v1/bridge", operation_id = "showBridge", tag = "bridge", responses((status = 200, body = BridgeInfo)))]
pub async fn bridge(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> axum::Json<BridgeInfo> {
    let state = app.bridge.state();
    let view = app.bridge.view().unwrap_or_default();
    // They name leases of everybody.
    let problems =
        if matches!(caller, Caller::Tenant(_)) { BTreeMap::new() } else { view.problems().clone() };
    axum::Json(BridgeInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        store: app.bridge.store().name(),
        revision: state.revision.0,
        out_of_touch: state.out_of_touch,
        nodes: view.fleet().nodes().len(),
        switches: view.fleet().topology().switches().len(),
        leases: view.leases().len(),
        problems,
    })
}

/// All nodes with their free resources.
#[utoipa::path(get, path = "/v1/nodes", operation_id = "listNodes", tag = "nodes",
    responses((status = 200, body = NodeList), (status = "5XX", body = Problem)))]
pub async fn list(State(app): State<Arc<App>>) -> Answer<NodeList> {
    let view = app.bridge.view()?;
    let occupancy = view.occupancy();
    let fleet = view.fleet();
    let leased = leased_vms(&view);
    let summary = |node: &Node| {
        let at = fleet.find(node.name.as_str())?;
        let of_kind = |wanted: fn(DeviceKind) -> bool| -> Vec<usize> {
            (0..node.devices.len()).filter(|device| wanted(node.devices[*device].kind)).collect()
        };
        let gpus = of_kind(|kind| kind == DeviceKind::Gpu);
        let shares = of_kind(DeviceKind::is_share);
        let adapters = of_kind(DeviceKind::is_network);
        let is_free = |device: &&usize| {
            !occupancy.device_taken(at, **device) && !occupancy.overlaps_taken(fleet, at, **device)
        };
        let free = occupancy.free(fleet, at);
        Some(NodeSummary {
            name: node.name.to_string(),
            state: node.state,
            gpus: gpus.len(),
            gpus_free: gpus.iter().filter(is_free).count(),
            gpu_shares: shares.len(),
            gpu_shares_free: shares.iter().filter(is_free).count(),
            adapters: adapters.len(),
            adapters_free: adapters.iter().filter(is_free).count(),
            cores: node.cores(),
            cores_free: free.iter().map(|share| share.cores).sum(),
            memory_mib: node.memory().0,
            memory_free_mib: free.iter().map(|share| share.memory.0).sum(),
            vms: occupancy.vms(at),
            vms_without_lease: without_lease(&app.listings, &leased, &node.name).ok().map(|vms| vms.len()),
        })
    };
    Ok(axum::Json(NodeList { nodes: fleet.nodes().iter().filter_map(summary).collect() }))
}

/// The VMs for which something is leased on each node.
fn leased_vms(view: &View) -> BTreeMap<&NodeName, BTreeSet<&str>> {
    let mut leased: BTreeMap<&NodeName, BTreeSet<&str>> = BTreeMap::new();
    for held in view.leases().values().flat_map(|known| &known.lease.held) {
        leased.entry(&held.assignment.node).or_default().insert(held.assignment.vm.as_str());
    }
    leased
}

/// VMs that run on a node although nothing is leased for them there; or why that is not known.
fn without_lease(
    listings: &Listings,
    leased: &BTreeMap<&NodeName, BTreeSet<&str>>,
    node: &NodeName,
) -> Result<Vec<String>, String> {
    let listed = listings.of(node).unwrap_or_else(|| {
        Err(format!("this bridge does not ask node {node}: no daemon of it is configured (see [daemons])"))
    })?;
    let has_lease = |vm: &String| leased.get(node).is_some_and(|vms| vms.contains(vm.as_str()));
    Ok(listed.into_iter().filter(|vm| !has_lease(vm)).collect())
}

/// A node, with what the caller may know of the leases there.
fn detail(app: &App, view: &View, node: &Node, caller: &Caller) -> NodeDetail {
    let visible = view.leases().values().filter(|known| caller.may_use(&known.lease.holder));
    let (mut vms, mut held_devices) = (Vec::new(), Vec::new());
    for held in visible.flat_map(|known| &known.lease.held) {
        if held.assignment.node != node.name {
            // VMs of all nodes have remote GPUs.
            held_devices.extend(held.assignment.remote().map(|device| device.address.to_string()));
            continue;
        }
        vms.push(held.assignment.vm.to_string());
        held_devices.extend(held.assignment.devices.iter().map(|device| device.address.to_string()));
    }
    let strangers = without_lease(&app.listings, &leased_vms(view), &node.name);
    let not_listed = strangers.as_ref().err().cloned();
    let vms_without_lease =
        strangers.ok().filter(|_| !matches!(caller, Caller::Tenant(_))).unwrap_or_default();
    NodeDetail { node: node.clone(), vms, held_devices, vms_without_lease, not_listed }
}

/// A node: its inventory, its VMs and its held devices; for a tenant, those of its own leases.
#[utoipa::path(get, path = "/v1/nodes/{name}", operation_id = "showNode", tag = "nodes", params(("name" = String, Path, description = "Name of the node")),
    responses((status = 200, body = NodeDetail), (status = 404, body = Problem), (status = "5XX", body = Problem)))]
pub async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<NodeName>,
) -> Answer<NodeDetail> {
    let view = app.bridge.view()?;
    let (node, _) = view.node(&name).ok_or_else(|| unknown(&name))?;
    Ok(axum::Json(detail(&app, &view, node, &caller)))
}

fn unknown(name: &NodeName) -> Problem {
    crate::bridge::BridgeError::UnknownNode(name.clone()).into()
}

/// Publishes a node's inventory (`vmove inventory --publish`). The state that an operator has set stays.
#[utoipa::path(put, path = "/v1/nodes/{name}", operation_id = "publishNode", tag = "nodes", params(("name" = String, Path, description = "Name of the node")),
    request_body = Object, responses((status = 200, body = NodeDetail), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn publish(
    State(app): State<Arc<App>>,
    Path(name): Path<NodeName>,
    Json(node): Json<Node>,
) -> Answer<NodeDetail> {
    if node.name != name {
        return Err(Problem::bad_request(format!(
            "the inventory is of node {}, the path of node {name}",
            node.name
        ))
        .into());
    }
    let node = app.bridge.put_node(node).await?;
    Ok(axum::Json(detail(&app, &*app.bridge.view()?, &node, &Caller::Operator)))
}

/// Removes a node of which nothing is held.
#[utoipa::path(delete, path = "/v1/nodes/{name}", operation_id = "removeNode", tag = "nodes", params(("name" = String, Path, description = "Name of the node")),
    responses((status = 204), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn remove(
    State(app): State<Arc<App>>,
    Path(name): Path<NodeName>,
) -> Result<axum::http::StatusCode, Refusal> {
    app.bridge.remove_node(&name).await?;
    Ok(axum::http::StatusCode::NO_CONTENT)
}

/// Has the bridge list the VMs of a node now: what those had that have ended is free at once, and not after the next list. A node says so by a hook
/// (`examples/hooks/tell-bridge.toml`). Viewers may: what counts is what the node lists.
#[utoipa::path(post, path = "/v1/nodes/{name}/look", operation_id = "lookAtNode", tag = "nodes", params(("name" = String, Path, description = "Name of the node")),
    request_body = LookRequest, responses((status = 202, body = LookAnswer), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn look(
    State(app): State<Arc<App>>,
    Path(name): Path<NodeName>,
    Json(request): Json<LookRequest>,
) -> Result<(axum::http::StatusCode, axum::Json<LookAnswer>), Refusal> {
    let view = app.bridge.view()?;
    let (node, _) = view.node(&name).ok_or_else(|| unknown(&name))?;
    if app.listings.look(&node.name, request.ended) {
        let answer = LookAnswer { node: node.name.to_string() };
        return Ok((axum::http::StatusCode::ACCEPTED, axum::Json(answer)));
    }
    Err(Problem::bad_request(format!(
        "this bridge does not ask node {name}: no daemon of it is configured (see [daemons]), or look_s is 0"
    ))
    .into())
}

/// Sets whether a node takes VMs.
#[utoipa::path(put, path = "/v1/nodes/{name}/state", operation_id = "setNodeState", tag = "nodes", params(("name" = String, Path, description = "Name of the node")),
    request_body = NodeStateRequest, responses((status = 200, body = NodeDetail), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn set_state(
    State(app): State<Arc<App>>,
    Path(name): Path<NodeName>,
    Json(request): Json<NodeStateRequest>,
) -> Answer<NodeDetail> {
    let node = app.bridge.set_node_state(&name, request.state).await?;
    Ok(axum::Json(detail(&app, &*app.bridge.view()?, &node, &Caller::Operator)))
}

/// The topology as JSON.
#[utoipa::path(get, path = "/v1/topology", operation_id = "showTopology", tag = "topology",
    responses((status = 200, body = Object), (status = "5XX", body = Problem)))]
pub async fn topology(State(app): State<Arc<App>>) -> Answer<Topology> {
    Ok(axum::Json(app.bridge.view()?.fleet().topology().clone()))
}

/// Replaces the topology. A malformed text is refused, with the line of the error.
#[utoipa::path(put, path = "/v1/topology", operation_id = "importTopology", tag = "topology", request_body = TopologyText,
    responses((status = 200, body = Object), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn put_topology(State(app): State<Arc<App>>, Json(text): Json<TopologyText>) -> Answer<Topology> {
    let topology = topology_text::import(text.format, &text.text)
        .map_err(|message| Problem::new(Code::BadRequest, message))?;
    app.bridge.put_topology(&topology).await?;
    Ok(axum::Json(topology))
}
