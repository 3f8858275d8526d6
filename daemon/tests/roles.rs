//! Clients with certificates on the peer port: what each role may do, and who has none.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;
#[path = "common/remote.rs"]
mod remote;

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::{Node, Pki, Shown};
use remote::Remote;
use rustix::process::Signal;

/// A node with TLS and these clients.
struct Served {
    pki: Pki,
    node: Node,
    config: PathBuf,
    _dir: tempfile::TempDir,
}

impl Served {
    fn start(clients: &str) -> Self {
        let (pki, dir) = (Pki::new(), tempfile::tempdir().unwrap());
        let config = dir.path().join("vmoved.toml");
        std::fs::write(&config, clients).unwrap();
        let mut flags = pki.flags();
        flags.extend(["--config".to_owned(), config.display().to_string()]);
        let node = Node::start_with(&flags.iter().map(String::as_str).collect::<Vec<_>>());
        Self { pki, node, config, _dir: dir }
    }

    fn remote(&self, shown: &Shown) -> Remote {
        Remote::http(self.node.listen, shown)
    }

    /// Gives the node other clients, and waits until its log has this word `times` times.
    fn reconfigure(&self, clients: &str, word: &str, times: usize) {
        std::fs::write(&self.config, clients).unwrap();
        common::signal(self.node.pid(), Signal::HUP);
        common::wait(word, || self.node.log().matches(word).count() >= times);
    }
}

fn client(name: &str, role: &str) -> String {
    format!("[[client]]\nname = \"{name}\"\nrole = \"{role}\"\nrequests-per-second = 1000\n")
}

/// Roles of all operations that are not for everybody who may read.
const NEEDED: [(&str, &str); 34] = [
    ("checkFabric", "operator"),
    ("startMigration", "operator"),
    ("cancelMigration", "operator"),
    ("recoverMigration", "operator"),
    ("stayVisitor", "operator"),
    ("turnIntoVisit", "operator"),
    ("startGroup", "operator"),
    ("cancelGroup", "operator"),
    ("createFork", "operator"),
    ("recoverFork", "operator"),
    ("killChild", "operator"),
    ("promoteVm", "operator"),
    ("prepareChildren", "operator"),
    ("saveTemplate", "operator"),
    ("loadTemplate", "operator"),
    ("removeTemplate", "operator"),
    ("setVmState", "operator"),
    ("attachDevice", "operator"),
    ("cancelDiskMove", "operator"),
    ("moveDisk", "admin"),
    ("stopVm", "operator"),
    ("stopVm by force", "admin"),
    ("runVm", "admin"),
    ("adoptVm", "admin"),
    ("forgetVm", "admin"),
    ("applyTuning", "admin"),
    ("reclaimMigration", "admin"),
    ("restoreTemplate", "admin"),
    ("testHook", "admin"),
    ("answerLibvirt", "admin"),
    ("expectProxmoxGuest", "admin"),
    ("metrics", "viewer"),
    ("showVm", "viewer"),
    ("listVms", "viewer"),
];

/// Name, method and path of every operation of the description, and of a stop by force.
fn operations() -> Vec<(String, String, String)> {
    let api: serde_json::Value = serde_json::from_str(include_str!("../../docs/openapi.json")).unwrap();
    let mut all = Vec::new();
    for (path, methods) in api["paths"].as_object().unwrap() {
        let path: String = path
            .split('/')
            .map(|part| if part.starts_with('{') { "nothing" } else { part })
            .collect::<Vec<_>>()
            .join("/");
        for (method, operation) in methods.as_object().unwrap() {
            let name = operation["operationId"].as_str().unwrap().to_owned();
            if name == "stopVm" {
                all.push(("stopVm by force".to_owned(), "DELETE".to_owned(), format!("{path}?force=true")));
            }
            all.push((name, method.to_uppercase(), path.clone()));
        }
    }
    all
}

#[test]
fn each_operation_needs_its_role_and_a_viewer_changes_nothing() {
    let roles = ["viewer", "operator", "admin"];
    let served = Served::start(&roles.map(|role| client(&format!("{role}.example"), role)).concat());
    let all = operations();
    for (name, _) in NEEDED {
        assert!(all.iter().any(|(found, ..)| found == name), "no operation {name}");
    }
    for (rank, role) in roles.into_iter().enumerate() {
        let mut remote = served.remote(&served.pki.client(&format!("{role}.example")));
        for (name, method, path) in &all {
            let needed = NEEDED.iter().find(|(found, _)| found == name).map(|(_, role)| *role);
            // What is not listed above is a question.
            let needed = needed.unwrap_or_else(|| {
                assert_eq!(method, "GET", "{name} changes something, so it must be listed");
                "viewer"
            });
            let may = roles.iter().position(|role| *role == needed).unwrap() <= rank;
            let answer = remote.ask(method, path, "{}");
            let what = format!("{role}: {name}: {answer:?}");
            if may {
                assert!(answer.status != 403 && answer.status != 429, "{what}");
                continue;
            }
            assert_eq!((answer.status, answer.code().as_str()), (403, "forbidden"), "{what}");
            let problem = answer.json();
            let message = problem["message"].as_str().unwrap();
            let operation = name.trim_end_matches(" by force");
            for word in [needed, role, operation, "[[client]]", "vmoved.toml", "SIGHUP", "node tester"] {
                assert!(message.contains(word), "{word}: {what}");
            }
            assert_eq!(
                problem["details"],
                serde_json::json!({"role": role, "needed": needed, "operation": operation})
            );
        }
        // The router's own refusals.
        assert_eq!(remote.ask("GET", "/v2/vms", "").code(), "unknown-path");
        assert_eq!(remote.ask("PATCH", "/v1/vms", "").code(), "method-not-allowed");
    }
    let metrics = served.node.http("GET", "/metrics", "").1;
    assert!(metrics.contains("vmove_requests_total{from=\"tls\",outcome=\"forbidden\"}"), "{metrics}");
}

#[test]
fn a_certificate_without_a_role_asks_nothing_and_a_node_asks_a_little() {
    let served = Served::start(&client("shut-out", "none"));
    let mut nobody = served.remote(&served.pki.client("nobody"));
    for (method, path) in
        [("GET", "/v1/vms"), ("GET", "/healthz"), ("POST", "/v1/migrations"), ("GET", "/v2")]
    {
        let answer = nobody.ask(method, path, "{}");
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (403, "forbidden"),
            "{method} {path}: {answer:?}"
        );
        for word in ["no [[client]] entry", "CN=nobody", "vmoved.toml"] {
            assert!(answer.body.contains(word), "{word}: {answer:?}");
        }
    }
    let node = |params: &mut rcgen::CertificateParams| params.extended_key_usages.clear();
    let mut node = served.remote(&served.pki.client_as("node2", node));
    assert_eq!(node.ask("GET", "/v1/vms", "").status, 200);
    for (method, path) in [("GET", "/v1/vms/a"), ("POST", "/v1/vms"), ("DELETE", "/v1/vms/a")] {
        let answer = node.ask(method, path, "{}");
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (403, "forbidden"),
            "{method} {path}: {answer:?}"
        );
    }
    let mut shut_out = served.remote(&served.pki.client("shut-out"));
    assert_eq!(shut_out.ask("GET", "/v1/vms", "").json()["details"]["role"], "none");
}

#[test]
fn a_certificate_is_good_while_it_is_in_force_and_of_the_authority() {
    let served = Served::start(&client("ops", "admin"));
    let ends = |seconds: u64| {
        let end = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + Duration::from_secs(seconds);
        move |params: &mut rcgen::CertificateParams| params.not_after = rcgen::date_time_ymd(1970, 1, 1) + end
    };
    let expired = |params: &mut rcgen::CertificateParams| params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let other = Pki::new();
    for stranger in [served.pki.client_as("ops", expired), {
        let other = other.client("ops");
        Shown { ca: served.pki.client("another").ca, ..other }
    }] {
        let refused = served.remote(&stranger).try_ask("GET", "/v1/vms", "");
        assert!(refused.is_err(), "{refused:?}");
    }
    assert!(served.node.log().contains("TLS failed"), "{}", served.node.log());
    // A connection that is kept does not outlive it.
    let mut remote = served.remote(&served.pki.client_as("ops", ends(2)));
    assert_eq!(remote.ask("GET", "/v1/vms", "").status, 200);
    std::thread::sleep(Duration::from_secs(4));
    let late = remote.ask("GET", "/v1/vms", "");
    assert!(late.code() == "forbidden" && late.body.contains("has ended"), "{late:?}");
}

#[test]
fn roles_are_read_again_on_sighup_also_for_connections_that_are_kept() {
    let served = Served::start(&client("sched", "viewer"));
    let by_uri = |params: &mut rcgen::CertificateParams| {
        params.subject_alt_names.push(rcgen::SanType::URI("spiffe://example/sched".try_into().unwrap()));
    };
    let mut remote = served.remote(&served.pki.client_as("sched", by_uri));
    assert_eq!(remote.ask("DELETE", "/v1/vms/a", "").code(), "forbidden");
    served.reconfigure(&client("sched", "operator"), "clients read again", 1);
    assert_eq!(remote.ask("DELETE", "/v1/vms/a", "").code(), "unknown-vm");
    // By its URI, and by the first entry that names it.
    let uri = "[[client]]\nuri = \"spiffe://example/sched\"\nrole = \"viewer\"\n";
    served.reconfigure(&format!("{uri}{}", client("sched", "admin")), "clients read again", 2);
    assert_eq!(remote.ask("DELETE", "/v1/vms/a", "").code(), "forbidden");
    // A mistake takes no rights away and gives none.
    served.reconfigure("[[client]]\nname = \"sched\"\nrole = \"root\"\n", "clients stay as they were", 1);
    assert!(served.node.log().contains("unknown variant `root`"), "{}", served.node.log());
    assert_eq!(remote.ask("DELETE", "/v1/vms/a", "").code(), "forbidden");
    assert_eq!(remote.ask("GET", "/v1/vms", "").status, 200);
    served.reconfigure("", "clients read again", 3);
    assert!(remote.ask("GET", "/v1/vms", "").body.contains("no [[client]] entry"));
}

/// A control connection's greeting.
fn greeting() -> Vec<u8> {
    let mut bytes = vmove_node::peer::hello::MAGIC.to_vec();
    bytes.extend_from_slice(&vmove_node::peer::PROTOCOL_VERSION.to_le_bytes());
    bytes.extend_from_slice(&[1, 0]);
    bytes.extend_from_slice(&[7; 16]);
    bytes.extend_from_slice(&[0; 16]);
    bytes.extend_from_slice(&[1, b'x']);
    bytes
}

#[test]
fn a_client_opens_no_session_between_nodes() {
    let config = format!("{}{}peer = true\n", client("sched", "admin"), client("both", "viewer"));
    let served = Served::start(&config);
    let greet = |shown: &Shown| {
        let answer = Remote::connect(served.node.listen, shown, "vmove/1").say(&greeting()).unwrap();
        (answer[10], String::from_utf8_lossy(&answer[12..]).into_owned())
    };
    let for_both = |params: &mut rcgen::CertificateParams| params.extended_key_usages.clear();
    let (status, why) = greet(&served.pki.client_as("sched", for_both));
    assert!(
        status == 3 && why.contains("that of the client sched") && why.contains("peer = true"),
        "{status} {why}"
    );
    let (status, why) = greet(&served.pki.client("forgotten"));
    assert!(status == 3 && why.contains("for clients only"), "{status} {why}");
    // Nodes are welcome, also those that are clients as well.
    assert_eq!(greet(&served.pki.client_as("node2", for_both)).0, 0);
    assert_eq!(greet(&served.pki.client_as("both", for_both)).0, 0);
    assert!(served.node.log().contains("found that of the client sched"), "{}", served.node.log());
}

#[test]
fn who_asks_too_often_or_sends_too_much_is_told_so() {
    let limits = "requests-per-second = 2\nburst = 4\n";
    let served = Served::start(&format!(
        "[[client]]\nname = \"busy\"\nrole = \"admin\"\n{limits}{}",
        client("calm", "admin")
    ));
    let mut busy = served.remote(&served.pki.client("busy"));
    let answers: Vec<_> = (0..8).map(|_| busy.ask("GET", "/v1/vms", "")).collect();
    let limited: Vec<_> = answers.iter().filter(|answer| answer.status == 429).collect();
    assert!(answers[..4].iter().all(|answer| answer.status == 200) && !limited.is_empty(), "{answers:?}");
    assert_eq!((limited[0].code().as_str(), limited[0].header("retry-after")), ("rate-limited", Some("1")));
    assert!(limited[0].body.contains("burst of its [[client]] entry"), "{limited:?}");
    // Others, and the control socket, are not held back by that.
    let mut calm = served.remote(&served.pki.client("calm"));
    assert_eq!(calm.ask("GET", "/v1/vms", "").status, 200);
    assert_eq!(served.node.http("GET", "/v1/vms", "").0, 200);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(busy.ask("GET", "/v1/vms", "").status, 200);

    let long = format!("{{\"vm\": \"{}\"}}", "x".repeat(3 << 20));
    let answer = calm.ask("POST", "/v1/migrations", &long);
    assert_eq!((answer.status, answer.code().as_str()), (413, "too-large"), "{answer:?}");
}

/// The lines of an audit log.
fn told(path: &std::path::Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn who_did_what_is_written_down() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("audit.jsonl");
    let clients = client("viewer.example", "viewer") + &client("operator.example", "operator");
    let served = Served::start(&format!("audit-log = \"{}\"\n{clients}", log.display()));
    let viewer = served.pki.client("viewer.example");
    let operator = served.pki.client("operator.example");
    assert_eq!(served.remote(&viewer).ask("GET", "/v1/vms", "").status, 200);
    assert_eq!(served.remote(&viewer).ask("DELETE", "/v1/vms/web", "").status, 403);
    assert_eq!(served.remote(&operator).ask("DELETE", "/v1/vms/web", "").status, 404);
    served.node.problem(&["stop", "web"], 1);
    common::wait("three lines, since an answered question is none", || told(&log).len() == 3);
    let lines = told(&log);
    let column = |key: &str| lines.iter().map(|line| line[key].clone()).collect::<Vec<_>>();
    assert_eq!(column("operation"), ["stopVm", "stopVm", "stopVm"]);
    assert_eq!(column("path"), ["/v1/vms/web", "/v1/vms/web", "/v1/vms/web"]);
    assert_eq!(column("status"), [403, 404, 404]);
    assert_eq!(column("code"), ["forbidden", "unknown-vm", "unknown-vm"]);
    assert_eq!(column("from"), ["tls", "tls", "socket"]);
    assert_eq!((&lines[0]["role"], &lines[1]["role"]), (&"viewer".into(), &"operator".into()), "{lines:?}");
    assert!(lines[0]["client"].as_str().unwrap().contains("viewer.example"), "{lines:?}");
    assert!(lines[0]["address"].as_str().unwrap().starts_with("127.0.0.1:"), "{lines:?}");
    assert_eq!(lines[2]["uid"], rustix::process::getuid().as_raw());
    // logrotate renames it, and tells the daemon.
    let old = dir.path().join("audit.jsonl.1");
    std::fs::rename(&log, &old).unwrap();
    common::signal(served.node.pid(), Signal::HUP);
    common::wait("it is opened anew", || log.exists());
    assert_eq!(served.remote(&viewer).ask("POST", "/v1/vms/web/promote", "").status, 403);
    common::wait("the next line is in the new one", || told(&log).len() == 1);
    assert_eq!(told(&old).len(), 3);
}
