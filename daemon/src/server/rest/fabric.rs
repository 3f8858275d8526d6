//! `/v1/fabric/check`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};

use super::error::Answer;
use crate::api::types::{CheckQuery, FabricCheck};
use crate::server::{App, trial};

/// Tries the fabrics between this node and another: devices, path, latency and bandwidth of READs, and what is wrong.
#[utoipa::path(get, path = "/v1/fabric/check", operation_id = "checkFabric", tag = "node", params(CheckQuery),
    responses((status = 200, body = FabricCheck), (status = 422, body = crate::api::problem::Problem)))]
pub async fn check(State(app): State<Arc<App>>, Query(query): Query<CheckQuery>) -> Answer<FabricCheck> {
    let to = app.target(&query.to)?;
    Ok(Json(trial::check(&app.config.node, &app.fabrics, &app.dialer, &to).await))
}
