//! The HTTP interface of `vbridged`.

mod clusters;
mod glue2;
mod leases;
mod nearest;
mod nodes;
pub mod openapi;
pub mod plans;
pub mod problem;
mod types;
mod visible;
mod vms;

#[cfg(test)]
mod role_tests;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::Response;
use axum::routing::{delete, get, post, put};

use tokio::sync::Semaphore;
use tracing::Instrument;
use vmove_http::{Refusal, fallback, span};

use self::problem::{Code, Problem};
use crate::access::Access;
use crate::bridge::Bridge;
use crate::driver::VmDriver;
use crate::executor::Limits;
use crate::instance_types::InstanceTypes;
use crate::listing::Listings;
use crate::quota::Quotas;
use crate::slurm::follower::SlurmFollower;
use crate::template::Templates;

/// Largest request: the topology of 10,000 nodes is some hundred kilobytes.
const LARGEST_BODY: usize = 64 << 20;
/// The same of callers who publish no topology.
const LARGEST_BODY_OF_OTHERS: usize = 1 << 20;
/// Within it, the whole body must have arrived.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// What handlers use.
#[derive(Debug, Clone)]
pub struct App {
    /// The bridge.
    pub bridge: Arc<Bridge>,
    /// Controls the VMs.
    pub driver: Arc<dyn VmDriver>,
    /// What the daemons of nodes listed last.
    pub listings: Arc<Listings>,
    /// How many migrations may run at once.
    pub limits: Limits,
    /// The Slurm cluster that is followed, if any.
    pub slurm: Option<SlurmFollower>,
    /// Command lines of VMs that anybody with a lease may use.
    pub templates: Arc<Templates>,
    /// Instance types that requests may name.
    pub types: Arc<InstanceTypes>,
    /// What holders may have leased at once.
    pub quotas: Arc<Quotas>,
    /// Turns to search for what is the nearest that would fit.
    pub explaining: Arc<Semaphore>,
    /// Who may send requests, and which.
    pub access: Access,
}

/// The router of all paths.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/bridge", get(nodes::bridge))
        .route("/v1/nodes", get(nodes::list))
        .route("/v1/nodes/{name}", get(nodes::show).put(nodes::publish).delete(nodes::remove))
        .route("/v1/nodes/{name}/state", put(nodes::set_state))
        .route("/v1/nodes/{name}/look", post(nodes::look))
        .route("/v1/glue2", get(glue2::show))
        .route("/v1/topology", get(nodes::topology).put(nodes::put_topology))
        .route("/v1/leases", get(leases::list).post(leases::grant))
        .route("/v1/leases/{id}", get(leases::show).delete(leases::release))
        .route("/v1/leases/{id}/renew", post(leases::renew))
        .route("/v1/leases/{id}/vms", post(vms::start))
        .route("/v1/leases/{id}/vms/stop", post(vms::stop))
        .route("/v1/clusters", get(clusters::list))
        .route("/v1/clusters/{id}", get(clusters::show))
        .route("/v1/clusters/{id}/resize", post(clusters::resize))
        .route("/v1/clusters/{id}/fork", post(clusters::fork))
        .route("/v1/clusters/{id}/checkpoint", post(clusters::checkpoint))
        .route("/v1/checkpoints", get(clusters::checkpoints))
        .route("/v1/checkpoints/{name}", delete(clusters::remove))
        .route("/v1/checkpoints/{name}/restore", post(clusters::restore))
        .route("/v1/types", get(types::list))
        .route("/v1/account", get(leases::account))
        .route("/v1/plans", get(plans::list).post(plans::make))
        .route("/v1/plans/{id}", get(plans::show).delete(plans::remove))
        .route("/v1/plans/{id}/run", post(plans::run))
        .route_layer(axum::middleware::from_fn_with_state(Arc::clone(&app), authorized))
        .route("/healthz", get(nodes::health))
        .route("/openapi.json", get(openapi::serve))
        .fallback(fallback::unknown_path)
        .method_not_allowed_fallback(fallback::wrong_method)
        .layer(axum::middleware::from_fn(span::of_request))
        .layer(DefaultBodyLimit::max(LARGEST_BODY))
        .with_state(app)
}

/// Finds out who sent a request, tells the handler by an extension, and refuses what its role does not allow.
async fn authorized(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Result<Response, Refusal> {
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.strip_prefix("Bearer "));
    let Some(caller) = app.access.caller(given) else {
        let found = if given.is_some() { "an unknown one" } else { "none" };
        let message = format!(
            "expected a bearer token of this bridge (token-file or [tokens] in its configuration), found {found}: give it by --token-file or VBRIDGE_TOKEN_FILE"
        );
        return Err(Problem::new(Code::Unauthorized, message).into());
    };
    let (method, path) = (request.method(), request.uri().path());
    if !caller.may(method, path) {
        let message = format!("{caller} may not {method} {path}: use a token with the role operator");
        return Err(Problem::new(Code::Forbidden, message).into());
    }
    let largest = if caller.is_operator() { LARGEST_BODY } else { LARGEST_BODY_OF_OTHERS };
    request.extensions_mut().insert(caller);
    Ok(next.run(with_whole_body(request, largest).await?).await)
}

/// Finishes what was begun even if the client hangs up.
async fn to_its_end<T, E>(work: impl Future<Output = Result<T, E>> + Send + 'static) -> Result<T, Problem>
where
    T: Send + 'static,
    E: Send + 'static,
    Problem: From<E>,
{
    let done = tokio::spawn(work.in_current_span()).await;
    Ok(done.map_err(|error| Problem::new(Code::Internal, error.to_string()))??)
}

/// Takes the body before the handler begins, so that no client lets it wait.
async fn with_whole_body(request: Request, largest: usize) -> Result<Request, Problem> {
    let (head, body) = request.into_parts();
    match tokio::time::timeout(BODY_TIMEOUT, axum::body::to_bytes(body, largest)).await {
        Ok(Ok(body)) => Ok(Request::from_parts(head, body.into())),
        Ok(Err(error)) => Err(Problem::bad_request(format!(
            "expected a whole body of at most {largest} bytes, found another one: {error}"
        ))),
        Err(_) => Err(Problem::bad_request(format!(
            "expected a body within {} s, found only a part of it: send it again",
            BODY_TIMEOUT.as_secs()
        ))),
    }
}
