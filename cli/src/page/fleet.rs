//! The questions of the fleet's page, passed on to the bridge. Of its interface these, and no others: nothing that changes anything.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use axum::routing::get;
use serde::Deserialize;
use vmove_client::bridge::Bridge;
use vmove_client::encoded;

use super::asked::Asked;

type Fleet = State<Arc<Asked<Bridge>>>;

pub(super) fn router(bridge: Asked<Bridge>) -> Router {
    let plain = ["/v1/bridge", "/v1/nodes", "/v1/topology", "/v1/clusters", "/v1/leases", "/v1/plans"];
    let router = plain.into_iter().fold(Router::new(), |router, path| {
        router.route(path, get(move |State(bridge): Fleet| async move { bridge.ask(path).await }))
    });
    router
        .route("/v1/nodes/{name}", get(node))
        .route("/v1/leases/{id}", get(lease))
        .route("/v1/plans/{id}", get(plan))
        .route("/v1/account", get(account))
        .with_state(Arc::new(bridge))
}

async fn node(State(bridge): Fleet, Path(name): Path<String>) -> Response {
    bridge.ask(&format!("/v1/nodes/{}", encoded(&name))).await
}

async fn lease(State(bridge): Fleet, Path(id): Path<String>) -> Response {
    bridge.ask(&format!("/v1/leases/{}", encoded(&id))).await
}

async fn plan(State(bridge): Fleet, Path(id): Path<String>) -> Response {
    bridge.ask(&format!("/v1/plans/{}", encoded(&id))).await
}

#[derive(Debug, Deserialize)]
struct Since {
    #[serde(default)]
    since_ms: u64,
}

/// Records are lines of JSON; the page takes them as one object.
async fn account(State(bridge): Fleet, Query(Since { since_ms }): Query<Since>) -> Response {
    bridge.ask_and(&format!("/v1/account?since_ms={since_ms}"), |lines: Bytes| records(&lines)).await
}

fn records(lines: &[u8]) -> Bytes {
    let lines: Vec<&[u8]> = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).collect();
    [b"{\"records\":[".as_slice(), &lines.join(b",".as_slice()), b"]}"].concat().into()
}

#[cfg(test)]
mod tests {
    use super::records;

    #[test]
    fn lines_of_records_become_one_object() {
        assert_eq!(&records(b"")[..], b"{\"records\":[]}");
        assert_eq!(
            &records(b"{\"lease\":\"a\"}\n{\"lease\":\"b\"}\n")[..],
            b"{\"records\":[{\"lease\":\"a\"},{\"lease\":\"b\"}]}"
        );
    }
}
