//! The server of `vmove fleet page`: who gets what from it. What a browser makes of it is tested by `tests/tests/browser`.
#![cfg(test)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::bridge::Bridge;
use vmove_tests::places;
use vmove_tests::process::Guarded;
use vmove_tests::sandbox::Sandbox;

use crate::commands::{fleet, ready};

/// Where a page is; dropped, its server ends.
struct Page {
    host: String,
    path: String,
    _process: Guarded,
}

impl Page {
    fn by(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("vmove fleet page");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("an address");
        let said: Value = serde_json::from_str(&line).expect("JSON");
        let url = said["url"].as_str().expect("an address");
        let (host, path) = url.trim_start_matches("http://").split_once('/').expect("a path");
        Self { host: host.to_owned(), path: path.trim_end_matches('/').to_owned(), _process: child.into() }
    }

    /// Status and body of the answer.
    fn send(&self, method: &str, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.host).expect("the page");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.host);
        stream.write_all(head.as_bytes()).expect("it is sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        (head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status"), body.to_owned())
    }

    fn get(&self, question: &str) -> (u16, Value) {
        let (status, body) = self.send("GET", &format!("/{}/{question}", self.path));
        (status, serde_json::from_str(&body).unwrap_or(Value::String(body)))
    }
}

#[test]
fn the_page_of_the_fleet_asks_the_bridge_and_changes_nothing() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = fleet(&sandbox, "");
    let text = ["place", "--text", "vcpus=2; memory_mb=512; gpus=1", "--count", "2", "--cluster", "c"];
    bridge.ask(&[&text[..], &["--id", "job", "--holder", "alice", "--ttl", "10m"]].concat()).expect("leased");
    let page = Page::by(bridge.command(&["fleet", "page"]).expect("vmove"));
    assert_eq!(page.get("v1/bridge").1["nodes"], 4);
    assert_eq!(page.get("v1/nodes").1["nodes"][0]["gpus_free"], 0);
    assert_eq!(page.get("v1/topology").1["switches"][0]["name"], "l1");
    assert_eq!(page.get("v1/clusters").1["clusters"][0]["cluster"], "c");
    assert_eq!(page.get("v1/leases").1["leases"][0]["id"], "job");
    assert_eq!(page.get("v1/leases/job").1["holder"], "alice");
    assert_eq!(page.get("v1/nodes/n1").1["node"]["name"], "n1");
    let plan = bridge.ask(&["plan", "evacuate", "n1"]).expect("a plan");
    let id = plan["id"].as_str().expect("an id");
    assert_eq!(page.get(&format!("v1/plans/{id}")).1["purpose"], "evacuate n1");
    assert_eq!(page.get("v1/plans").1["plans"][0]["id"], id);
    assert_eq!(page.get("v1/account?since_ms=0"), (200, json!({ "records": [] })));
    bridge.ask(&["lease", "release", "job"]).expect("released");
    assert_eq!(page.get("v1/account?since_ms=0").1["records"][0]["holder"], "alice");
    for (file, has) in
        [("", "data-asked=\"vbridged\""), ("switches.js", "export class Switches"), ("page.css", ":root")]
    {
        let (status, body) = page.send("GET", &format!("/{}/{file}", page.path));
        assert!(status == 200 && body.contains(has), "{file}: {status} {body}");
    }

    // Names lead nowhere else, and nothing else is asked.
    let (status, said) = page.get("v1/nodes/none");
    assert_eq!((status, said["code"].as_str()), (404, Some("unknown-node")));
    let (status, said) = page.get("v1/nodes/..%2Fleases");
    assert_eq!((status, said["code"].as_str()), (400, Some("bad-request")));
    for other in
        ["v1/types", "v1/glue2", "v1/account?since_ms=0%26holder=bob", "v1/plans/p/run", "openapi.json"]
    {
        let status = page.get(other).0;
        assert!((400..500).contains(&status), "{other}: {status}");
    }
    for (method, question) in [("POST", "v1/leases"), ("PUT", "v1/nodes/n1/state"), ("DELETE", "v1/plans/p")]
    {
        assert_eq!(page.send(method, &format!("/{}/{question}", page.path)).0, 405, "{method} {question}");
    }
    assert_eq!(page.send("GET", "/v1/nodes").0, 404, "without the secret");
}

#[test]
fn the_page_of_the_fleet_shows_what_its_token_may_see_and_takes_a_new_one() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (bridge, at, token) = Bridge::with_tenant(&sandbox).expect("a bridge");
    for (id, holder) in [("hers", "alice"), ("his", "bob")] {
        let text = [
            "place",
            "--text",
            "vcpus=1; memory_mb=64",
            "--cluster",
            id,
            "--id",
            id,
            "--holder",
            holder,
            "--ttl",
            "10m",
        ];
        bridge.ask(&text).expect("leased");
    }
    let mine = sandbox.path().join("mine.token");
    std::fs::write(&mine, "0123456789abcdef-eve\n").expect("a file");
    let mut command = Command::new(places::product("vmove").expect("vmove"));
    command.args(["--json", "fleet", "--bridge", &at, "--token-file"]).arg(&mine).arg("page");
    let page = Page::by(command);
    assert_eq!(page.get("v1/leases").0, 401, "nobody has this token");
    std::fs::copy(&token, &mine).expect("a new token");
    assert_eq!(page.get("v1/leases").0, 401, "it is read after a refusal");
    let (status, leases) = page.get("v1/leases");
    let ids: Vec<_> = leases["leases"].as_array().into_iter().flatten().map(|lease| &lease["id"]).collect();
    assert_eq!((status, ids), (200, vec![&json!("his")]));
    assert_eq!(page.get("v1/plans").0, 403, "tenants see no plans");
    assert_eq!(page.get("v1/leases").0, 200, "and keep their token");
    drop(bridge);
    let (status, said) = page.get("v1/leases");
    assert_eq!((status, said["code"].as_str()), (502, Some("bridge-unreachable")), "{said}");
}
