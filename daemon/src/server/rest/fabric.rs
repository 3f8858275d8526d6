//! `/v1/fabric/check`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmove_http::{Answer, Query};

use crate::server::problem::IntoProblem;
use crate::server::{App, fabric_check};
use vmove_types::migration::CheckQuery;
use vmove_types::node::FabricCheck;

/// Tries the fabrics between this node and another: devices, path, latency and bandwidth of READs, and what is wrong.
#[utoipa::path(get, path = "/v1/fabric/check", operation_id = "checkFabric", tag = "node", params(CheckQuery),
    responses((status = 200, body = FabricCheck), (status = 422, body = vmove_types::problem::Problem)))]
pub async fn check(State(app): State<Arc<App>>, Query(query): Query<CheckQuery>) -> Answer<FabricCheck> {
    let to = app.known.target(&query.to).map_err(IntoProblem::into_problem)?;
    let check = fabric_check::check(&app.config.node, &app.fabrics, &app.dialer, &to).await;
    for tried in &check.fabrics {
        if let Some(rate) = tried.read_bytes_per_s {
            app.engine.link_was_tried(&to.name, &tried.fabric, rate);
        }
    }
    Ok(Json(check))
}
