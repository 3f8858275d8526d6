//! `/v1/clusters`, `/v1/checkpoints`: virtual clusters as a whole.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use vmove_bridge_types::cluster::{
    CheckpointInfo, CheckpointList, CheckpointRequest, ClusterForked, ClusterInfo, ClusterList,
    ClusterRestored, ForkClusterRequest, ResizeRequest, Resized, RestoreClusterRequest,
};
use vmove_bridge_types::requests::LeaseQuery;
use vmove_http::{Answer, Json, Path, Query, Refusal};

use super::leases::{check_id, without_other_holder};
use super::problem::{Code, Problem};
use super::visible::visible;
use super::vms::checked_start;
use super::{App, to_its_end};
use crate::access::Caller;
use crate::bridge::BridgeError;
use crate::clusters::{self, ClusterError, Clusters};
use crate::lease::LeaseId;
use crate::quota::Quota;

impl App {
    fn clusters(&self) -> Clusters {
        Clusters { bridge: Arc::clone(&self.bridge), driver: Arc::clone(&self.driver) }
    }

    /// The quota of a lease's holder, if the caller may see the lease.
    fn quota_of(&self, caller: &Caller, id: &LeaseId) -> Result<Option<Quota>, BridgeError> {
        let view = self.bridge.view()?;
        Ok(self.quotas.of(&visible(&view, caller, id)?.holder).cloned())
    }

    /// The quota of a checkpoint's holder, if the caller may see the checkpoint. Others are to it as if there were none.
    fn quota_of_checkpoint(&self, caller: &Caller, name: &LeaseId) -> Result<Option<Quota>, BridgeError> {
        let checkpoint = self.bridge.checkpoint(name)?;
        if caller.may_use(&checkpoint.info.holder) {
            Ok(self.quotas.of(&checkpoint.info.holder).cloned())
        } else {
            Err(BridgeError::UnknownCheckpoint(name.clone()))
        }
    }
}

/// All clusters; for a tenant, its own.
#[utoipa::path(get, path = "/v1/clusters", operation_id = "listClusters", tag = "clusters", params(LeaseQuery),
    responses((status = 200, body = ClusterList), (status = "5XX", body = Problem)))]
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<LeaseQuery>,
) -> Answer<ClusterList> {
    let view = app.bridge.view()?;
    let clusters = app.clusters();
    let wanted = view.all_leases().filter(|lease| {
        caller.may_use(&lease.holder) && query.holder.as_ref().is_none_or(|holder| *holder == lease.holder)
    });
    Ok(axum::Json(ClusterList { clusters: wanted.map(|lease| clusters.summary(&view, lease)).collect() }))
}

/// A cluster and its VMs, as their nodes say now.
#[utoipa::path(get, path = "/v1/clusters/{id}", operation_id = "showCluster", tag = "clusters", params(("id" = String, Path, description = "Id of its lease")),
    responses((status = 200, body = ClusterInfo), (status = 404, body = Problem), (status = "5XX", body = Problem)))]
pub async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<LeaseId>,
) -> Answer<ClusterInfo> {
    let view = app.bridge.view()?;
    let lease = visible(&view, &caller, &id)?;
    Ok(axum::Json(app.clusters().info(&view, lease).await))
}

/// Gives a group of a cluster more VMs, or fewer.
#[utoipa::path(post, path = "/v1/clusters/{id}/resize", operation_id = "resizeCluster", tag = "clusters", params(("id" = String, Path, description = "Id of its lease")),
    request_body = ResizeRequest,
    responses((status = 200, body = Resized), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn resize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<LeaseId>,
    Json(request): Json<ResizeRequest>,
) -> Answer<Resized> {
    let quota = app.quota_of(&caller, &id)?;
    let start = request.start.clone().map(|start| checked_start(&app, &caller, &start)).transpose()?;
    let clusters = app.clusters();
    let resize = async move { clusters::resize(&clusters, &id, &request, start, quota).await };
    Ok(axum::Json(to_its_end(resize).await?))
}

/// Forks a running cluster: each VM once, behind one barrier, to where a cluster of its shape is placed now.
#[utoipa::path(post, path = "/v1/clusters/{id}/fork", operation_id = "forkCluster", tag = "clusters", params(("id" = String, Path, description = "Id of its lease")),
    request_body = ForkClusterRequest,
    responses((status = 200, body = ClusterForked), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn fork(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<LeaseId>,
    Json(request): Json<ForkClusterRequest>,
) -> Answer<ClusterForked> {
    let quota = app.quota_of(&caller, &id)?;
    check_id(&caller, request.id.as_ref().map_or(request.name.as_str(), LeaseId::as_str))?;
    let clusters = app.clusters();
    let fork = async move { clusters::fork(&clusters, &id, &request, quota).await };
    let done = to_its_end(fork).await.map_err(|problem| without_other_holder(&caller, problem))?;
    Ok(axum::Json(done))
}

/// Keeps a running cluster as it is now: a template of each VM, all frozen behind one barrier.
#[utoipa::path(post, path = "/v1/clusters/{id}/checkpoint", operation_id = "makeCheckpoint", tag = "clusters", params(("id" = String, Path, description = "Id of its lease")),
    request_body = CheckpointRequest,
    responses((status = 200, body = CheckpointInfo), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn checkpoint(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<LeaseId>,
    Json(request): Json<CheckpointRequest>,
) -> Answer<CheckpointInfo> {
    app.quota_of(&caller, &id)?;
    let clusters = app.clusters();
    let make = async move { clusters::make_checkpoint(&clusters, &id, &request).await };
    Ok(axum::Json(to_its_end(make).await?))
}

/// All checkpoints; for a tenant, those of its clusters.
#[utoipa::path(get, path = "/v1/checkpoints", operation_id = "listCheckpoints", tag = "clusters",
    responses((status = 200, body = CheckpointList), (status = "5XX", body = Problem)))]
pub async fn checkpoints(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Answer<CheckpointList> {
    let view = app.bridge.view()?;
    let all = view.checkpoints().values().map(|(checkpoint, _)| &checkpoint.info);
    let checkpoints = all.filter(|info| caller.may_use(&info.holder)).cloned().collect();
    Ok(axum::Json(CheckpointList { checkpoints }))
}

/// Lets a cluster run again as it was at its checkpoint, on nodes that there are now. Refused (409) while a VM of it may still run.
#[utoipa::path(post, path = "/v1/checkpoints/{name}/restore", operation_id = "restoreCluster", tag = "clusters", params(("name" = String, Path, description = "Name of the checkpoint")),
    request_body = RestoreClusterRequest,
    responses((status = 200, body = ClusterRestored), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn restore(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<LeaseId>,
    Json(request): Json<RestoreClusterRequest>,
) -> Answer<ClusterRestored> {
    let quota = app.quota_of_checkpoint(&caller, &name)?;
    if !request.lost.is_empty() && !caller.is_operator() {
        let message =
            format!("{caller} may not say which nodes are lost: use a token with the role operator");
        return Err(Problem::new(Code::Forbidden, message).into());
    }
    let clusters = app.clusters();
    let restore = async move { clusters::restore(&clusters, &name, &request, quota).await };
    Ok(axum::Json(to_its_end(restore).await?))
}

/// Deletes a checkpoint and its templates. Nodes that do not answer keep theirs.
#[utoipa::path(delete, path = "/v1/checkpoints/{name}", operation_id = "removeCheckpoint", tag = "clusters", params(("name" = String, Path, description = "Name of the checkpoint")),
    responses((status = 204), (status = 404, body = Problem), (status = "5XX", body = Problem)))]
pub async fn remove(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<LeaseId>,
) -> Result<StatusCode, Refusal> {
    app.quota_of_checkpoint(&caller, &name)?;
    let clusters = app.clusters();
    to_its_end(async move { clusters::remove_checkpoint(&clusters, &name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl From<ClusterError> for Problem {
    fn from(error: ClusterError) -> Self {
        let code = match error {
            ClusterError::Bridge(error) => return error.into(),
            ClusterError::Start(error) => return error.into(),
            ClusterError::Invalid(_) => Code::BadRequest,
            ClusterError::Node(_) => Code::NodeFailed,
            ClusterError::StillRuns(_) => Code::Busy,
        };
        Self::new(code, error.to_string())
    }
}
