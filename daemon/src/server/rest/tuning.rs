//! `/v1/tuning`.

use std::sync::Arc;

use axum::extract::State;
use vmove_http::{Answer, Json, Query};
use vmove_types::problem::Problem;
use vmove_types::tuning::{TuningQuery, TuningReport};

use crate::server::{App, detached};

/// Compares this node and its VMs with what is advised. Changes nothing.
#[utoipa::path(get, path = "/v1/tuning", operation_id = "showTuning", tag = "node", params(TuningQuery),
    responses((status = 200, body = TuningReport), (status = 404, body = Problem), (status = "5XX", body = Problem)))]
pub async fn show(State(app): State<Arc<App>>, Query(query): Query<TuningQuery>) -> Answer<TuningReport> {
    Ok(axum::Json(app.tuning.report(&app.registry, query.vm.as_deref(), false).await?))
}

/// Does what can be done now, and tells how things are afterwards: of one VM, or of the node and all its VMs.
#[utoipa::path(post, path = "/v1/tuning", operation_id = "applyTuning", tag = "node", request_body = TuningQuery,
    responses((status = 200, body = TuningReport), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn apply(State(app): State<Arc<App>>, Json(query): Json<TuningQuery>) -> Answer<TuningReport> {
    let work = async move { app.tuning.report(&app.registry, query.vm.as_deref(), true).await };
    Ok(axum::Json(detached(work).await?))
}
