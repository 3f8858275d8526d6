//! `/v1/libvirt`.

use std::sync::Arc;

use axum::extract::State;
use vmove_http::{Answer, Json};
use vmove_types::libvirt::{DomainHook, DomainHookDone};
use vmove_types::problem::Problem;

use crate::server::App;

/// What libvirt's hook asks of the node: answered when libvirt may go on. If the caller goes away before that, the guest is no longer waited for.
#[utoipa::path(post, path = "/v1/libvirt/hook", operation_id = "answerLibvirt", tag = "libvirt", request_body = DomainHook,
    responses((status = 200, body = DomainHookDone), (status = 409, body = Problem)))]
pub async fn hook(State(app): State<Arc<App>>, Json(hook): Json<DomainHook>) -> Answer<DomainHookDone> {
    Ok(axum::Json(crate::server::libvirt::hook(&app.carrier, &hook).await?))
}
