//! REST: one router for the control socket and the peer port. Who may ask what is decided before a handler begins.

mod devices;
mod disks;
mod fabric;
mod forks;
mod groups;
mod hooks;
mod libvirt;
mod migrations;
mod node;
pub mod openapi;
mod proxmox;
mod tuning;
mod vms;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{delete, get, post};

use vmove_http::{fallback, span};

use super::App;
use super::access::{LARGEST_BODY, admit};

/// All paths. Each request passes [`admit`] first.
pub fn router(app: Arc<App>) -> Router {
    let access = app.access.clone();
    Router::new()
        .route("/healthz", get(node::health))
        .route("/openapi.json", get(openapi::serve))
        .route("/metrics", get(node::metrics))
        .route("/v1/node", get(node::node))
        .route("/v1/devices", get(devices::list))
        .route("/v1/tuning", get(tuning::show).post(tuning::apply))
        .route("/v1/fabric/check", get(fabric::check))
        .route("/v1/vms", get(vms::list).post(vms::run))
        .route("/v1/vms:adopt", post(vms::adopt))
        .route("/v1/vms/{name}", get(vms::show).delete(vms::stop))
        .route("/v1/vms/{name}/forget", post(vms::forget))
        .route("/v1/vms/{name}/state", axum::routing::put(vms::set_state))
        .route("/v1/vms/{name}/check", get(vms::check))
        .route("/v1/vms/{name}/devices/{role}/attach", post(vms::attach_device))
        .route("/v1/vms/{name}/disks", get(disks::list))
        .route("/v1/vms/{name}/disks/{disk}/move", post(disks::begin).delete(disks::cancel))
        .route("/v1/vms/{name}/tree", get(forks::tree))
        .route("/v1/children/{name}", delete(forks::kill))
        .route("/v1/vms/{name}/promote", post(forks::promote))
        .route("/v1/vms/{name}/warm", axum::routing::put(forks::warm))
        .route("/v1/forks", get(forks::list).post(forks::create))
        .route("/v1/forks/{id}/recover", post(forks::recover))
        .route("/v1/forks/{id}", get(forks::show))
        .route("/v1/templates", get(forks::templates).post(forks::save))
        .route("/v1/templates/{name}", axum::routing::delete(forks::remove))
        .route("/v1/templates/{name}/load", post(forks::load))
        .route("/v1/templates/{name}/restore", post(forks::restore))
        .route("/v1/hooks", get(hooks::list))
        .route("/v1/hooks/{name}/test", post(hooks::test))
        .route("/v1/libvirt/hook", post(libvirt::hook))
        .route("/v1/proxmox/arrival", post(proxmox::arrival))
        .route("/v1/groups", get(groups::list).post(groups::start))
        .route("/v1/groups/{id}", get(groups::show).delete(groups::cancel))
        .route("/v1/groups/{id}/events", get(groups::events))
        .route("/v1/migrations", get(migrations::list).post(migrations::start))
        .route("/v1/migrations/{id}", get(migrations::show).delete(migrations::cancel))
        .route("/v1/migrations/{id}/recover", post(migrations::recover))
        .route("/v1/migrations/{id}/stay", post(migrations::stay))
        .route("/v1/migrations/{id}/visit", post(migrations::turn_into_visit))
        .route("/v1/migrations/{id}/reclaim", post(migrations::reclaim))
        .route("/v1/migrations/{id}/events", get(migrations::events))
        .fallback(fallback::unknown_path)
        .method_not_allowed_fallback(fallback::wrong_method)
        .layer(axum::middleware::from_fn_with_state(access, admit))
        .layer(DefaultBodyLimit::max(LARGEST_BODY))
        .layer(axum::middleware::from_fn(span::of_request))
        .with_state(app)
}
