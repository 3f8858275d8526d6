//! What is refused leaves the store as it was, and says why.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame};
use serde_json::{Value, json};
use tower::ServiceExt;

use super::{App, router};
use crate::access::Access;
use crate::driver::VmDriver;
use crate::executor::Limits;
use crate::testing::{FakeDriver, TestBridge, scene};

/// Status, and the problem.
async fn send(app: &Arc<App>, method: &str, path: &str, body: &str) -> (StatusCode, Value) {
    send_as(app, None, method, path, body).await
}

/// A body of which nothing ever arrives.
struct Never;

impl HttpBody for Never {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

/// As [`send`], with a bearer token.
pub(super) async fn send_as(
    app: &Arc<App>,
    token: Option<&str>,
    method: &str,
    path: &str,
    body: &str,
) -> (StatusCode, Value) {
    let mut request =
        Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json");
    if let Some(token) = token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    let request = request.body(Body::from(body.to_owned())).unwrap();
    let response = router(Arc::clone(app)).oneshot(request).await.unwrap();
    let status = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&bytes).unwrap_or_default())
}

/// Method, path and body; the status, and words of the message.
type Case = (&'static str, &'static str, String, u16, &'static str);

fn bad_topologies() -> Vec<Case> {
    let path = "/v1/topology";
    let topology = |text: &str| json!({ "format": "topology.conf", "text": text }).to_string();
    let cycle = topology("SwitchName=a Switches=b\nSwitchName=b Switches=a\n");
    vec![
        ("PUT", path, topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n"), 400, "line 2"),
        ("PUT", path, cycle, 400, "cycle"),
        ("PUT", path, topology("\nSwitchName=a Nodes=n[3-1]\n"), 400, "line 2"),
        ("PUT", path, topology("SwitchName=a Knots=n1\n"), 400, "unknown key"),
        ("PUT", path, topology("\nSwitchName=a Nodes=-oProxyCommand=x\n"), 400, "line 2"),
        ("PUT", path, "{".to_owned(), 400, ""),
    ]
}

fn bad_nodes() -> Vec<Case> {
    let node = |devices: Value| json!({ "name": "n9", "numa": [], "devices": devices }).to_string();
    let gpu = json!({ "address": "0000:01:00.0", "kind": "gpu", "id": "10de:2330" });
    let option = "/v1/nodes/-oProxyCommand=x";
    vec![
        ("PUT", "/v1/nodes/n9", node(json!([gpu, gpu])), 400, "twice"),
        ("PUT", "/v1/nodes/n8", node(json!([])), 400, "n9"),
        ("PUT", "/v1/nodes/n9/state", json!({ "state": "drained" }).to_string(), 404, "n9"),
        ("PUT", "/v1/nodes/n1/state", json!({ "state": "sleepy" }).to_string(), 400, "sleepy"),
        ("DELETE", "/v1/nodes/n0", String::new(), 409, "n0"),
        ("PUT", option, json!({ "name": &option[10..], "numa": [] }).to_string(), 400, "a host name"),
    ]
}

fn bad_lease_requests() -> Vec<Case> {
    let path = "/v1/leases";
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
    let both = cluster(json!({ "only_nodes": ["n4"], "not_nodes": ["n4"] }));
    let near = cluster(json!({ "near": { "to": { "switch": "nowhere" } } }));
    let contradiction = text("vcpus=1; hypervisor_type=kvm; hypervisor_type!=kvm");
    let option = json!({ "format": "instance", "text": "vcpus=1", "count": 1 });
    let option = json!({ "holder": "bob", "cluster": "--config=x", "text": option }).to_string();
    vec![
        ("POST", path, option, 400, "the first is a letter or a digit"),
        ("POST", path, text("vcpus=1; colour=red"), 400, "unknown key"),
        ("POST", path, text("vcpus>one"), 400, "vcpus"),
        ("POST", path, text("memory_mb=5..3"), 400, "empty range"),
        ("POST", path, contradiction, 400, "must not be kvm"),
        ("POST", path, both, 400, "both asked for and excluded"),
        ("POST", path, cluster(json!({ "only_nodes": ["n77"] })), 400, "n77"),
        ("POST", path, near, 400, "nowhere"),
        ("POST", path, json!({ "holder": "bob", "colour": "red" }).to_string(), 400, "colour"),
        ("POST", path, text("vcpus=1; memory_mb=16; gpus=9"), 409, "gpu"),
        ("POST", path, json!({ "holder": "bob" }).to_string(), 400, "exactly one of"),
    ]
}

fn bad_requests_for_a_lease() -> Vec<Case> {
    let unknown_vm = json!({ "vms": [{ "vm": "vc-vm-9", "command_line": ["qemu"] }] }).to_string();
    let vm = |more: Value| {
        let mut vm = json!({ "vm": "vc-vm-0" });
        vm.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({ "vms": [vm] }).to_string()
    };
    let both = vm(json!({ "template": "t", "command_line": ["qemu"] }));
    let backing = vm(json!({ "command_line": ["qemu"], "memory": "--version" }));
    let start = "/v1/leases/vc/vms";
    vec![
        ("POST", start, vm(json!({})), 400, "either a template"),
        ("POST", start, both, 400, "either a template"),
        ("POST", start, vm(json!({ "template": "t" })), 400, "the name of a template"),
        ("POST", start, backing, 400, "hugetlb-2m"),
        ("POST", "/v1/leases/none/renew", String::new(), 404, "none"),
        ("POST", "/v1/leases/vc/vms", unknown_vm, 404, "vc-vm-0"),
        ("POST", "/v1/leases/vc/vms", json!({ "vms": [{ "vm": "a/b" }] }).to_string(), 400, ""),
        ("DELETE", "/v1/leases/none", String::new(), 404, "none"),
    ]
}

fn bad_plans() -> Vec<Case> {
    vec![
        ("POST", "/v1/plans", json!({ "for": "evacuate", "node": "n77" }).to_string(), 404, "n77"),
        ("POST", "/v1/plans", json!({ "for": "tidy" }).to_string(), 400, "tidy"),
        ("POST", "/v1/plans", json!({ "for": "evacuate", "node": "-v" }).to_string(), 400, "a host name"),
    ]
}

/// What the store holds, without heartbeats: a request for VMs is one.
async fn stored(bridge: &TestBridge) -> Vec<(String, String)> {
    let plain = |text: &str| text.split("\"beats\"").next().unwrap_or_default().to_owned();
    let entries = bridge.store().snapshot().await.unwrap().entries.into_iter();
    entries.map(|(key, entry)| (key, plain(&entry.value))).collect()
}

#[tokio::test]
async fn a_cluster_is_placed_and_started_or_its_lease_is_given_back() {
    let (bridge, fake) = scene(1).await;
    let app = app(&bridge, fake.clone());
    let place = |name: &str, start: Value, more: Value| {
        let alternative = json!({ "vcpus": 1, "memory": 64 });
        let request =
            json!({ "name": name, "groups": [{ "name": "vm", "count": 2, "alternatives": [alternative] }] });
        let mut body = json!({ "id": name, "holder": "bob", "request": request, "start": start });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body.to_string()
    };
    let send = async |body: String| send(&app, "POST", "/v1/leases", &body).await;
    let leases = || bridge.view().unwrap().leases().keys().map(ToString::to_string).collect::<Vec<_>>();
    let line = json!({ "command_line": ["qemu", "-smp", "{vcpus}"] });

    let (status, answer) = send(place("good", line.clone(), json!({}))).await;
    assert_eq!((status, answer["vms"].as_array().map(Vec::len)), (StatusCode::CREATED, Some(2)), "{answer}");
    assert!(answer["lease"]["ends_in_ms"].is_null(), "it is kept by its VMs: {answer}");
    // The same again: they run.
    let (status, answer) = send(place("good", line.clone(), json!({}))).await;
    assert_eq!((status, &answer["vms"][0]["again"]), (StatusCode::OK, &json!(true)), "{answer}");

    fake.world().failing.insert("bad-vm-1".to_owned());
    let (status, problem) = send(place("bad", line.clone(), json!({}))).await;
    let message = problem["message"].as_str().unwrap();
    assert_eq!((status, &problem["code"]), (StatusCode::BAD_GATEWAY, &json!("not-started")));
    assert!(
        message.contains("bad-vm-1 does not start") && message.ends_with("lease bad is given back"),
        "{message}"
    );
    assert_eq!(leases(), ["good", "vc"]);
    assert!(!fake.world().running.contains_key("bad-vm-0"));

    // If it is not known whether one runs, its resources stay its own.
    fake.world().unanswered.insert("odd-vm-0".to_owned());
    let (_, problem) = send(place("odd", line.clone(), json!({}))).await;
    assert_eq!(problem["code"], "not-stopped");
    assert!(problem["message"].as_str().unwrap().ends_with("lease odd is kept"), "{problem}");
    assert_eq!(leases(), ["good", "odd", "vc"]);

    // Before anything is leased, it is known that this cannot be started.
    for (start, more, words) in [
        (json!({}), json!({}), "either a template"),
        (json!({ "template": "none" }), json!({}), "the name of a template"),
        (line, json!({ "what_if": true }), "what_if leases nothing"),
    ] {
        let (status, problem) = send(place("new", start, more)).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(problem["message"].as_str().unwrap().contains(words), "{problem}");
    }
    assert_eq!(leases(), ["good", "odd", "vc"]);
}

#[tokio::test]
async fn a_body_that_does_not_come_or_does_not_end_is_refused() {
    let (bridge, fake) = scene(1).await;
    let app = app(&bridge, fake);
    let request = |body: Body| Request::builder().method("POST").uri("/v1/leases").body(body).unwrap();
    let huge = "x".repeat((64 << 20) + 1);
    let response = router(Arc::clone(&app)).oneshot(request(Body::from(huge))).await.unwrap();
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    // As soon as nothing else happens, time passes.
    tokio::time::pause();
    let response = router(app).oneshot(request(Body::new(Never)));
    let response = tokio::time::timeout(Duration::from_secs(600), response).await;
    assert_eq!(response.expect("an answer").unwrap().status(), StatusCode::BAD_REQUEST);
}

fn app(bridge: &TestBridge, fake: FakeDriver) -> Arc<App> {
    let (driver, limits): (Arc<dyn VmDriver>, _) = (Arc::new(fake), Limits::default());
    let (access, templates) = (Access::default(), Arc::default());
    Arc::new(App {
        bridge: Arc::clone(bridge),
        driver,
        listings: Arc::default(),
        limits,
        slurm: None,
        templates,
        types: Arc::default(),
        quotas: Arc::default(),
        explaining: Arc::new(tokio::sync::Semaphore::new(1)),
        access,
    })
}

#[tokio::test]
async fn whatever_is_refused_changes_nothing_and_says_what_was_expected() {
    // Six nodes of 8 GPUs, three of them leased.
    let (bridge, fake) = scene(3).await;
    let app = app(&bridge, fake);
    let cases =
        [bad_topologies(), bad_nodes(), bad_lease_requests(), bad_requests_for_a_lease(), bad_plans()];
    let before = stored(&bridge).await;
    let mut wrong = Vec::new();
    for (method, path, body, status, words) in cases.into_iter().flatten() {
        let (found, problem) = send(&app, method, path, &body).await;
        let message = problem["message"].as_str().unwrap_or_default().to_owned();
        if found.as_u16() != status
            || !message.to_lowercase().contains(&words.to_lowercase())
            || message.is_empty()
        {
            wrong.push(format!("{method} {path} {body}: {found} {problem}; expected {status} {words:?}"));
        }
        assert_eq!(stored(&bridge).await, before, "{method} {path} {body}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
