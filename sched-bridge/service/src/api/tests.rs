//! What is refused leaves the store as it was, and says why.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::{App, router};
use crate::plan::mover::Mover;
use crate::plan::tests::scene;

/// Status, and the problem.
async fn send(app: &Arc<App>, method: &str, path: &str, body: &str) -> (StatusCode, Value) {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body.to_owned()))
        .unwrap();
    let response = router(Arc::clone(app)).oneshot(request).await.unwrap();
    let status = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&bytes).unwrap_or_default())
}

#[tokio::test]
async fn whatever_is_refused_changes_nothing_and_says_what_was_expected() {
    let dir = tempfile::tempdir().unwrap();
    // Six nodes of 8 GPUs, three of them leased.
    let (running, fake) = scene(dir.path(), 3).await;
    let bridge = Arc::clone(&running.0);
    let mover: Arc<dyn Mover> = Arc::new(fake);
    let app = Arc::new(App {
        bridge: Arc::clone(&bridge),
        mover,
        limits: crate::plan::run::Limits::default(),
        slurm: None,
        token: None,
    });
    let topology = |text: &str| json!({ "format": "topology.conf", "text": text }).to_string();
    let cluster = |extra: Value| {
        let alternative = json!({ "vcpus": 1, "memory": 64 });
        let mut request =
            json!({ "name": "c", "groups": [{ "name": "vm", "count": 2, "alternatives": [alternative] }] });
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!({ "holder": "bob", "request": request }).to_string()
    };
    let text = |text: &str| {
        let text = json!({ "format": "instance", "text": text, "count": 1 });
        json!({ "holder": "bob", "cluster": "c", "text": text }).to_string()
    };
    let node = |devices: Value| json!({ "name": "n9", "numa": [], "devices": devices }).to_string();
    let gpu = json!({ "address": "0000:01:00.0", "kind": "gpu", "id": "10de:2330" });
    let cases = [
        ("PUT", "/v1/topology", topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n"), 400, "line 2"),
        (
            "PUT",
            "/v1/topology",
            topology("SwitchName=a Switches=b\nSwitchName=b Switches=a\n"),
            400,
            "circle",
        ),
        ("PUT", "/v1/topology", topology("\nSwitchName=a Nodes=n[3-1]\n"), 400, "line 2"),
        ("PUT", "/v1/topology", topology("SwitchName=a Knots=n1\n"), 400, "unknown key"),
        ("PUT", "/v1/topology", "{".to_owned(), 400, ""),
        ("PUT", "/v1/nodes/n9", node(json!([gpu, gpu])), 400, "twice"),
        ("PUT", "/v1/nodes/n8", node(json!([])), 400, "n9"),
        ("PUT", "/v1/nodes/n9/state", json!({ "state": "drained" }).to_string(), 404, "n9"),
        ("PUT", "/v1/nodes/n1/state", json!({ "state": "sleepy" }).to_string(), 400, "sleepy"),
        ("DELETE", "/v1/nodes/n0", String::new(), 409, "n0"),
        ("POST", "/v1/leases", text("vcpus=1; colour=red"), 400, "unknown key"),
        ("POST", "/v1/leases", text("vcpus>one"), 400, "vcpus"),
        ("POST", "/v1/leases", text("memory_mb=5..3"), 400, "holds nothing"),
        (
            "POST",
            "/v1/leases",
            text("vcpus=1; hypervisor_type=kvm; hypervisor_type!=kvm"),
            400,
            "must not be kvm",
        ),
        (
            "POST",
            "/v1/leases",
            cluster(json!({ "only_nodes": ["n4"], "not_nodes": ["n4"] })),
            400,
            "both asked for and excluded",
        ),
        ("POST", "/v1/leases", cluster(json!({ "only_nodes": ["n77"] })), 400, "n77"),
        ("POST", "/v1/leases", cluster(json!({ "near": { "to": { "switch": "nowhere" } } })), 400, "nowhere"),
        ("POST", "/v1/leases", json!({ "holder": "bob", "colour": "red" }).to_string(), 400, "colour"),
        ("POST", "/v1/leases", text("vcpus=1; memory_mb=16; gpus=9"), 409, "gpu"),
        ("POST", "/v1/leases", json!({ "holder": "bob" }).to_string(), 400, "exactly one of"),
        ("POST", "/v1/leases/none/renew", String::new(), 404, "none"),
        (
            "POST",
            "/v1/leases/vc/vms",
            json!({ "vms": [{ "vm": "vc-vm-9", "command_line": ["qemu"] }] }).to_string(),
            404,
            "vc-vm-0",
        ),
        ("POST", "/v1/leases/vc/vms", json!({ "vms": [{ "vm": "a/b" }] }).to_string(), 400, ""),
        ("DELETE", "/v1/leases/none", String::new(), 404, "none"),
        ("POST", "/v1/plans", json!({ "for": "evacuate", "node": "n77" }).to_string(), 400, "n77"),
        ("POST", "/v1/plans", json!({ "for": "tidy" }).to_string(), 400, "tidy"),
    ];
    let state = async || {
        let snapshot = bridge.store().snapshot().await.unwrap();
        // To ask for VMs is a heartbeat, which changes nothing of what is held.
        let plain = |text: &str| text.split("\"beats\"").next().unwrap_or_default().to_owned();
        let entries = snapshot.entries.into_iter();
        entries.map(|(key, entry)| (key, plain(&entry.value))).collect::<Vec<_>>()
    };
    let before = state().await;
    let mut wrong = Vec::new();
    for (method, path, body, status, words) in cases {
        let (found, problem) = send(&app, method, path, &body).await;
        let message = problem["message"].as_str().unwrap_or_default().to_owned();
        if found.as_u16() != status
            || !message.to_lowercase().contains(&words.to_lowercase())
            || message.is_empty()
        {
            wrong.push(format!("{method} {path} {body}: {found} {problem}; expected {status} {words:?}"));
        }
        assert_eq!(state().await, before, "{method} {path} {body}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
