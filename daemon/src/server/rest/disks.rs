//! `/v1/vms/{name}/disks`: the disks of a VM, and their moves to other images on this node.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use vmove_http::{Answer, Json, Path, Refusal};
use vmove_types::disk_move::{DiskMove, MoveDiskRequest, VmDisks};
use vmove_types::problem::Problem;

use crate::server::problem::IntoProblem;
use crate::server::{App, detached};

/// The disks of a VM, and the moves of its disks to other images since the daemon was started.
#[utoipa::path(get, path = "/v1/vms/{name}/disks", operation_id = "listDisks", tag = "vms",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, body = VmDisks), (status = 404, body = Problem), (status = 502, body = Problem)))]
pub async fn list(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer<VmDisks> {
    Ok(axum::Json(app.engine.disks(&name).await.map_err(IntoProblem::into_problem)?))
}

/// Moves a disk to another image on this node while its guest runs. Answers once QEMU copies; `listDisks` tells the rest.
#[utoipa::path(post, path = "/v1/vms/{name}/disks/{disk}/move", operation_id = "moveDisk", tag = "vms",
    params(("name" = String, Path, description = "Name of the VM"), ("disk" = String, Path, description = "Any name of the disk")),
    request_body = MoveDiskRequest,
    responses((status = 202, body = DiskMove), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn begin(
    State(app): State<Arc<App>>,
    Path((name, disk)): Path<(String, String)>,
    Json(request): Json<MoveDiskRequest>,
) -> Result<(StatusCode, axum::Json<DiskMove>), Refusal> {
    let begin = async move {
        // Before it is asked whether a fork is at work: one that begins later finds this.
        let hold = app.engine.hold_disk(&name, &disk).map_err(IntoProblem::into_problem)?;
        app.forks.not_at_work(&name).map_err(IntoProblem::into_problem)?;
        let begun = hold.begin(request).await.map_err(IntoProblem::into_problem)?;
        // They lie over the old image. No fork takes them meanwhile: the move holds the VM.
        app.forks.end_prepared_of(&name).await;
        Ok::<_, Problem>(begun)
    };
    Ok((StatusCode::ACCEPTED, axum::Json(detached(begin).await?)))
}

/// Calls the move of a disk off: the guest has its disk as before, and nothing is left of the new image.
#[utoipa::path(delete, path = "/v1/vms/{name}/disks/{disk}/move", operation_id = "cancelDiskMove", tag = "vms",
    params(("name" = String, Path, description = "Name of the VM"), ("disk" = String, Path, description = "Any name of the disk")),
    responses((status = 202, body = DiskMove), (status = 404, body = Problem), (status = 409, body = Problem)))]
pub async fn cancel(
    State(app): State<Arc<App>>,
    Path((name, disk)): Path<(String, String)>,
) -> Result<(StatusCode, axum::Json<DiskMove>), Refusal> {
    let called_off = app.engine.cancel_disk_move(&name, &disk).map_err(IntoProblem::into_problem)?;
    Ok((StatusCode::ACCEPTED, axum::Json(called_off)))
}
