//! `/v1/devices`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;

use vmove_http::Answer;
use vmove_types::device::NodeDeviceList;

use crate::server::App;
use crate::server::problem::IntoProblem;

/// The devices of this node: what each is, which VM has it, and whether it can be given to one.
#[utoipa::path(get, path = "/v1/devices", operation_id = "listDevices", tag = "node", responses((status = 200, body = NodeDeviceList)))]
pub async fn list(State(app): State<Arc<App>>) -> Answer<NodeDeviceList> {
    Ok(Json(app.registry.devices().list().await.map_err(IntoProblem::into_problem)?))
}
