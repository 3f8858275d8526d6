//! What each role may do, and whose leases it sees.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::App;
use super::tests::send_as;
use crate::access::{Access, Caller, Role, Token};
use crate::driver::VmDriver;
use crate::executor::Limits;
use crate::template::Templates;
use crate::testing::{FakeDriver, TestBridge, exactly, one_gpu, scene};

/// The bearers of these tokens are of these roles. Lease `vc` is alice's, lease `bobs` is bob's.
async fn shared() -> (TestBridge, Arc<App>, FakeDriver) {
    let (bridge, fake) = scene(3).await;
    let world = fake.clone();
    let mut request = exactly("bobs", vec![one_gpu("bobs-vm", bobs_node(&bridge), 0)]);
    request.holder = "bob".to_owned();
    request.ttl_ms = 600_000;
    bridge.grant(request).await.unwrap();
    let driver: Arc<dyn VmDriver> = Arc::new(fake);
    let bearer = |name: &str, role| (Token::new(format!("token-of-{name}")), Caller::new(name, role));
    let access = Access::new(vec![
        bearer("eve", Role::Viewer),
        bearer("alice", Role::Tenant),
        bearer("bob", Role::Tenant),
        bearer("root", Role::Operator),
    ]);
    let text = "[small]\ncommand = [\"qemu\", \"-smp\", \"{vcpus}\", \"-hda\", \"/s/{disk}\"]\nfields.disk = { is = \"name\" }\n";
    let templates = Arc::new(Templates::new(toml::from_str(text).unwrap()).unwrap());
    let (bridge_of_app, limits) = (Arc::clone(&bridge), Limits::default());
    let app = App {
        bridge: bridge_of_app,
        driver,
        listings: Arc::default(),
        limits,
        slurm: None,
        templates,
        types: Arc::default(),
        quotas: Arc::default(),
        explaining: Arc::new(tokio::sync::Semaphore::new(1)),
        access,
    };
    (bridge, Arc::new(app), world)
}

/// A node without VMs of alice: they have all nodes of one leaf.
fn bobs_node(bridge: &TestBridge) -> &'static str {
    let alices: Vec<String> = (0..3).map(|vm| bridge.home("vc", vm).to_string()).collect();
    if alices.contains(&"n0".to_owned()) { "n5" } else { "n0" }
}

async fn ask(app: &Arc<App>, who: &str, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let token = format!("token-of-{who}");
    let (status, answer): (StatusCode, Value) = send_as(app, Some(&token), method, path, &body).await;
    (status.as_u16(), answer)
}

#[tokio::test]
async fn each_role_does_what_it_may_and_nothing_else() {
    let (bridge, app, _) = shared().await;
    let node = json!({ "name": "n9", "numa": [] });
    let topology = json!({ "format": "topology.conf", "text": "SwitchName=s Nodes=n[0-5]\n" });
    let evacuate = json!({ "for": "evacuate", "node": bridge.home("vc", 0) });
    let drained = json!({ "state": "drained" });
    // Method, path, body; whether a viewer, a tenant and an operator may.
    let cases = [
        ("GET", "/v1/bridge", Value::Null, [true, true, true]),
        ("GET", "/v1/nodes", Value::Null, [true, true, true]),
        ("GET", "/v1/topology", Value::Null, [true, true, true]),
        ("GET", "/v1/leases", Value::Null, [true, true, true]),
        ("GET", "/v1/account", Value::Null, [true, true, true]),
        ("GET", "/v1/plans", Value::Null, [true, false, true]),
        ("POST", "/v1/leases/vc/renew", Value::Null, [false, true, true]),
        ("PUT", "/v1/nodes/n9", node, [false, false, true]),
        ("PUT", "/v1/nodes/n4/state", drained, [false, false, true]),
        ("DELETE", "/v1/nodes/n9", Value::Null, [false, false, true]),
        ("PUT", "/v1/topology", topology, [false, false, true]),
        ("POST", "/v1/plans", evacuate, [false, false, true]),
        ("GET", "/v1/clusters", Value::Null, [true, true, true]),
        ("GET", "/v1/clusters/vc", Value::Null, [true, true, true]),
        ("GET", "/v1/checkpoints", Value::Null, [true, true, true]),
        ("POST", "/v1/clusters/vc/resize", json!({ "count": 3 }), [false, true, true]),
        ("POST", "/v1/leases/vc/vms/stop", json!({}), [false, true, true]),
        ("DELETE", "/v1/leases/vc", Value::Null, [false, true, false]),
    ];
    for (method, path, body, may) in cases {
        for (who, may) in ["eve", "alice", "root"].into_iter().zip(may) {
            let (status, answer) = ask(&app, who, method, path, &body).await;
            let what = format!("{who}: {method} {path}: {status} {answer}");
            if who == "root" && !may {
                // The tenant has released it before.
                assert_eq!((status, &answer["code"]), (404, &json!("unknown-lease")), "{what}");
            } else if may {
                assert!((200..300).contains(&status), "{what}");
            } else {
                assert_eq!((status, &answer["code"]), (403, &json!("forbidden")), "{what}");
                assert!(answer["message"].as_str().unwrap().contains("operator"), "{what}");
            }
        }
    }
    for token in [None, Some("token-of-mallory"), Some("")] {
        let (status, answer) = send_as(&app, token, "GET", "/v1/nodes", "").await;
        assert_eq!((status.as_u16(), &answer["code"]), (401, &json!("unauthorized")), "{token:?}");
    }
}

#[tokio::test]
async fn a_tenant_neither_sees_nor_ends_what_another_one_holds() {
    let (bridge, app, _) = shared().await;
    let bob = async |method: &str, path: &str, body: &Value| ask(&app, "bob", method, path, body).await;
    let (_, leases) = bob("GET", "/v1/leases", &Value::Null).await;
    assert_eq!(leases["leases"].as_array().unwrap().len(), 1, "{leases}");
    assert_eq!(leases["leases"][0]["id"], "bobs");
    for (method, path) in [
        ("GET", "/v1/leases/vc"),
        ("DELETE", "/v1/leases/vc"),
        ("POST", "/v1/leases/vc/renew"),
        ("POST", "/v1/leases/vc/vms/stop"),
    ] {
        let (status, problem) = bob(method, path, &json!({})).await;
        assert_eq!((status, &problem["code"]), (404, &json!("unknown-lease")), "{method} {path}: {problem}");
    }
    let made = ask(&app, "alice", "POST", "/v1/clusters/vc/checkpoint", &json!({ "name": "noon" })).await;
    assert_eq!(made.0, 200, "{}", made.1);
    for (method, path, body, code) in [
        ("GET", "/v1/clusters/vc", Value::Null, "unknown-lease"),
        ("POST", "/v1/clusters/vc/resize", json!({ "count": 1 }), "unknown-lease"),
        ("POST", "/v1/clusters/vc/fork", json!({ "name": "mine" }), "unknown-lease"),
        ("POST", "/v1/clusters/vc/checkpoint", json!({ "name": "mine" }), "unknown-lease"),
        ("POST", "/v1/checkpoints/noon/restore", json!({}), "unknown-checkpoint"),
        ("DELETE", "/v1/checkpoints/noon", Value::Null, "unknown-checkpoint"),
    ] {
        let (status, problem) = bob(method, path, &body).await;
        assert_eq!((status, &problem["code"]), (404, &json!(code)), "{method} {path}: {problem}");
    }
    for path in ["/v1/clusters", "/v1/checkpoints"] {
        let (_, list) = bob("GET", path, &Value::Null).await;
        assert!(!list.to_string().contains("vc"), "{list}");
    }
    // Its own words do not say that a node is lost, and its clusters take no id of another one.
    let lost = json!({ "lost": [bridge.home("vc", 0)] });
    let (status, problem) = ask(&app, "alice", "POST", "/v1/checkpoints/noon/restore", &lost).await;
    assert_eq!((status, &problem["code"]), (403, &json!("forbidden")), "{problem}");
    for (name, code) in [("bobs", "id-taken"), ("slurm.n4", "forbidden")] {
        let fork = json!({ "name": name });
        let (_, problem) = ask(&app, "alice", "POST", "/v1/clusters/vc/fork", &fork).await;
        assert_eq!(
            (&problem["code"], problem.to_string().contains("bob\"")),
            (&json!(code), false),
            "{problem}"
        );
    }
    let start = json!({ "vms": [] });
    assert_eq!(bob("POST", "/v1/leases/vc/vms", &start).await.0, 404);
    // Nor does a node tell whose VMs it has.
    let home = bridge.home("vc", 0);
    let (_, node) = bob("GET", &format!("/v1/nodes/{home}"), &Value::Null).await;
    assert_eq!((&node["vms"], &node["held_devices"]), (&json!([]), &json!([])), "{node}");
    let (_, node) = bob("GET", &format!("/v1/nodes/{}", bobs_node(&bridge)), &Value::Null).await;
    assert_eq!(node["vms"], json!(["bobs-vm"]));

    // It holds its leases itself, and takes no id of another one.
    let text = json!({ "format": "instance", "text": "vcpus=1; memory_mb=16", "count": 1 });
    let lease = |id: &str, holder: &str| json!({ "id": id, "holder": holder, "cluster": id, "text": text });
    let (status, problem) = bob("POST", "/v1/leases", &lease("more", "alice")).await;
    assert_eq!((status, &problem["code"]), (403, &json!("forbidden")), "{problem}");
    let (status, problem) = bob("POST", "/v1/leases", &lease("vc", "bob")).await;
    assert_eq!((status, &problem["code"]), (409, &json!("id-taken")), "{problem}");
    assert!(!problem.to_string().contains("alice"), "{problem}");
    let (status, problem) = bob("POST", "/v1/leases", &lease("slurm.n4", "bob")).await;
    assert_eq!(status, 403, "{problem}");
    assert_eq!(bob("POST", "/v1/leases", &lease("more", "bob")).await.0, 201);

    // Nor accounts of others.
    assert_eq!(bob("DELETE", "/v1/leases/more", &Value::Null).await.0, 200);
    assert_eq!(ask(&app, "alice", "DELETE", "/v1/leases/vc", &Value::Null).await.0, 200);
    let (_, record) = bob("GET", "/v1/account", &Value::Null).await;
    assert_eq!(record["lease"], "more", "one record, and it is bob's");
}

#[tokio::test]
async fn a_free_command_line_needs_an_operator() {
    let (_bridge, app, fake) = shared().await;
    let vms = json!({ "vms": [{ "vm": "bobs-vm", "command_line": ["sh", "-c", "id"] }] });
    let (status, problem) = ask(&app, "bob", "POST", "/v1/leases/bobs/vms", &vms).await;
    assert_eq!((status, &problem["code"]), (403, &json!("forbidden")), "{problem}");
    assert!(problem["message"].as_str().unwrap().contains("root"), "{problem}");
    // A template does not; and what it lets the tenant choose cannot be more than it says.
    let by_template =
        |disk: &str| json!({ "vms": [{ "vm": "bobs-vm", "template": "small", "fields": { "disk": disk } }] });
    let evil = by_template("a,if=none -chardev x");
    let (status, problem) = ask(&app, "bob", "POST", "/v1/leases/bobs/vms", &evil).await;
    assert_eq!((status, &problem["code"]), (400, &json!("bad-request")), "{problem}");
    assert_eq!(fake.world().log, Vec::<String>::new());
    let (status, started) = ask(&app, "bob", "POST", "/v1/leases/bobs/vms", &by_template("a.img")).await;
    assert_eq!(status, 200, "{started}");
    assert_eq!(fake.world().log, ["qemu -smp 1 -hda /s/a.img"]);
    assert_eq!(ask(&app, "bob", "POST", "/v1/leases/bobs/vms/stop", &json!({})).await.0, 200);
    let (status, started) = ask(&app, "root", "POST", "/v1/leases/bobs/vms", &vms).await;
    assert_eq!(status, 200, "{started}");
}
