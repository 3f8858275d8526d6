//! `/v1/proxmox`.

use std::sync::Arc;

use axum::extract::State;
use vmove_http::{Answer, Json};
use vmove_types::libvirt::DomainHookDone;
use vmove_types::problem::Problem;
use vmove_types::proxmox::ProxmoxArrival;

use crate::server::App;

/// Has the memory of a guest of Proxmox VE come to the QEMU that waits here for it: answered when QEMU's own migration may begin. If the caller goes
/// away before that, the guest is no longer waited for.
#[utoipa::path(post, path = "/v1/proxmox/arrival", operation_id = "expectProxmoxGuest", tag = "proxmox", request_body = ProxmoxArrival,
    responses((status = 200, body = DomainHookDone), (status = 409, body = Problem)))]
pub async fn arrival(
    State(app): State<Arc<App>>,
    Json(arrival): Json<ProxmoxArrival>,
) -> Answer<DomainHookDone> {
    Ok(axum::Json(crate::server::proxmox::arrival(&app.carrier, &arrival).await?))
}
