//! What operators see of a `vbridged`: its log, in both forms, and its metrics.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{DEADLINE, Vbridged};
use hyper::Method;
use serde_json::{Value, json};
use test_servers::Ports;
use vmove_http::client::{Endpoint, HttpClient};

struct Client(HttpClient);

impl Client {
    fn of(bridge: &Vbridged) -> Self {
        Self(HttpClient::new(Endpoint::Unix(bridge.socket()), DEADLINE))
    }

    /// The status and the answer; null without one.
    async fn send(&self, method: Method, path: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, answer) = self.0.send(method, path, body.into()).await.unwrap();
        (status.as_u16(), serde_json::from_slice(&answer).unwrap_or_default())
    }

    /// Requests a lease of one VM with so many processors.
    async fn grant(&self, id: &str, vcpus: u32, ttl_ms: u64) -> (u16, Value) {
        let text =
            json!({ "format": "instance", "text": format!("vcpus={vcpus}; memory_mb=64"), "count": 1 });
        let request = json!({ "id": id, "holder": "alice", "cluster": id, "ttl_ms": ttl_ms, "text": text });
        self.send(Method::POST, "/v1/leases", &request).await
    }
}

/// One lease is released, one expires, one is refused and one is moved by a plan. Returns the id of the plan.
async fn work(client: &Client) -> String {
    for name in ["n1", "n2"] {
        let numa = json!({ "id": 0, "socket": 0, "cores": 4, "memory": 1024 });
        let node = json!({ "name": name, "numa": [numa] });
        let (status, answer) = client.send(Method::PUT, &format!("/v1/nodes/{name}"), &node).await;
        assert_eq!(status, 200, "{answer}");
    }
    let topology = json!({ "format": "topology.conf", "text": "SwitchName=s Nodes=n1,n2\n" });
    assert_eq!(client.send(Method::PUT, "/v1/topology", &topology).await.0, 200);
    assert_eq!(client.grant("released", 1, 60_000).await.0, 201);
    assert_eq!(client.send(Method::DELETE, "/v1/leases/released", &Value::Null).await.0, 200);
    assert_eq!(client.grant("expired", 1, 500).await.0, 201);
    let start = Instant::now();
    while client.send(Method::GET, "/v1/leases/expired", &Value::Null).await.0 == 200 {
        assert!(start.elapsed() < DEADLINE, "a lease without heartbeats has not ended");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(client.grant("refused", 64, 60_000).await.0, 409);
    let (status, granted) = client.grant("moved", 1, 3_600_000).await;
    assert_eq!(status, 201, "{granted}");
    let evacuate = json!({ "for": "evacuate", "node": granted["lease"]["held"][0]["node"] });
    let (status, plan) = client.send(Method::POST, "/v1/plans", &evacuate).await;
    assert_eq!(status, 201, "{plan}");
    let id = plan["id"].as_str().unwrap().to_owned();
    let (_, done) = client.send(Method::POST, &format!("/v1/plans/{id}/run"), &Value::Null).await;
    assert_eq!(done["state"]["is"], "done", "{done}");
    id
}

/// A configuration whose `vmove` always succeeds.
fn configuration(folder: &Path, more: &str) -> String {
    let vmove = folder.join("vmove");
    std::fs::write(&vmove, "#!/bin/sh\necho '{\"total_ms\": 10, \"downtime_ms\": 0.5, \"vms\": []}'\n")
        .unwrap();
    std::fs::set_permissions(&vmove, std::fs::Permissions::from_mode(0o755)).unwrap();
    let file = folder.join("vbridged.toml");
    std::fs::write(
        &file,
        format!("{more}\n[moves]\ncommand = [{:?}, \"{{node}}\"]\n", vmove.display().to_string()),
    )
    .unwrap();
    file.display().to_string()
}

async fn page(port: u16) -> String {
    let client = HttpClient::new(Endpoint::Tcp(format!("127.0.0.1:{port}")), DEADLINE);
    let (status, page) = client.send(Method::GET, "/metrics", Default::default()).await.unwrap();
    assert!(status.is_success(), "{status}");
    String::from_utf8(page.to_vec()).unwrap()
}

#[tokio::test]
async fn a_json_log_has_spans_with_ids_and_the_metrics_count() {
    let folder = tempfile::tempdir().unwrap();
    let ports = Ports::take();
    let config = configuration(
        folder.path(),
        &format!("log-format = \"json\"\nmetrics = \"127.0.0.1:{}\"", ports.first),
    );
    // At the level that it has by itself.
    let bridge = Vbridged::start(&["--config", &config], &[]);
    let plan = work(&Client::of(&bridge)).await;

    let page = page(ports.first).await;
    for line in [
        "vbridged_store_reachable 1",
        "vbridged_leases 1",
        "vbridged_leases_granted_total 3",
        "vbridged_leases_refused_total{reason=\"no-room\"} 1",
        "vbridged_leases_ended_total{end=\"released\"} 1",
        "vbridged_leases_ended_total{end=\"expired\"} 1",
        "vbridged_placement_duration_seconds_count{outcome=\"placed\"} 3",
        "vbridged_placement_duration_seconds_bucket{outcome=\"refused\",le=\"+Inf\"} 1",
        "vbridged_plans_total{outcome=\"done\"} 1",
        "vbridged_moves_total{outcome=\"arrived\"} 1",
    ] {
        assert!(page.lines().any(|found| found == line), "{line} is missing in\n{page}");
    }
    let commits =
        "vbridged_store_operation_duration_seconds_bucket{operation=\"commit\",outcome=\"ok\",le=\"+Inf\"} ";
    let commits = page.lines().find_map(|line| line.strip_prefix(commits)).unwrap();
    assert!(commits.parse::<u32>().unwrap() > 10, "{commits} commits");

    let log = bridge.log();
    assert!(!log.contains('\u{1b}'), "{log}");
    let events: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    // The names of the spans around an event, and the ids in them.
    let has = |message: &str, spans: &[(&str, &str, &str)]| {
        events.iter().any(|event| {
            let around = event["spans"].as_array();
            let found = around.is_some_and(|around| {
                around.iter().map(|span| &span["name"]).eq(spans.iter().map(|(name, ..)| *name))
                    && around.iter().zip(spans).all(|(span, (_, key, id))| key.is_empty() || span[key] == *id)
            });
            event["fields"]["message"] == message && found
        })
    };
    let request = |path| ("request", "path", path);
    let placement = |lease| [request("/v1/leases"), ("placement", "lease", lease)];
    assert!(has("the lease is granted", &placement("released")), "{log}");
    assert!(has("no lease is granted", &placement("refused")), "{log}");
    let fields = |message: &str| {
        let found = events.iter().find(|event| event["fields"]["message"] == message);
        found.map(|event| event["fields"].clone()).unwrap_or_default()
    };
    let nodes = fields("the lease is granted")["nodes"].clone();
    assert!(nodes.as_str().is_some_and(|nodes| !nodes.is_empty()), "{log}");
    assert_eq!(fields("the lease is released")["lease"], "released", "{log}");
    let expired = "the lease has ended: no heartbeat came in time";
    assert!(has(expired, &[("sweep", "", ""), ("lease", "id", "expired")]), "{log}");
    let path = format!("/v1/plans/{plan}/run");
    assert!(has("the plan is done", &[request(&path), ("plan", "id", &plan)]), "{log}");
    let step = [request(&path), ("plan", "id", &plan), ("step", "vm", "moved-vm-0")];
    assert!(has("the VM has arrived", &step), "{log}");
}

#[tokio::test]
async fn a_text_log_in_a_file_has_no_colours() {
    let folder = tempfile::tempdir().unwrap();
    let config = configuration(folder.path(), "");
    let bridge = Vbridged::start(&["--config", &config], &[("VBRIDGE_LOG", "debug")]);
    let plan = work(&Client::of(&bridge)).await;
    let log = bridge.log();
    assert!(!log.contains('\u{1b}'), "{log}");
    let line = log.lines().find(|line| line.contains("the plan is done")).unwrap();
    assert!(line.contains(&format!("plan{{id={plan}}}")), "{line}");
}
