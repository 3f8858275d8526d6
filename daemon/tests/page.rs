//! The server of `vmove page`, beside a real `vmoved`: who gets what from it. What a browser makes of it is tested by `tests/tests/browser`.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Node, Pki, Shown};
use rustix::process::Signal;
use serde_json::Value;

/// A `vmove page`; dropped, it ends.
struct Page {
    child: Child,
    address: String,
    secret: String,
}

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Page {
    fn of(node: &Node) -> Self {
        Self::start(&mut node.command(&["--json", "page"]))
    }

    fn over_tls(node: &Node, shown: &Shown) -> Self {
        let mut command = Command::new(common::vmove());
        command.args(["--json", "--at", &node.listen.to_string()]).arg("--tls-cert").arg(&shown.cert);
        Self::start(command.arg("--tls-key").arg(&shown.key).arg("--tls-ca").arg(&shown.ca).arg("page"))
    }

    fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap();
        let (address, secret) = said["url"].as_str().unwrap()["http://".len()..].split_once('/').unwrap();
        Self { child, address: address.to_owned(), secret: secret.trim_end_matches('/').to_owned() }
    }

    /// A request as it is, with this `Host` and further header lines.
    fn send(&self, method: &str, path: &str, host: &str, more: &str) -> Answer {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n")
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_lowercase(), body: body.to_owned() }
    }

    /// Something below the secret.
    fn get(&self, path: &str) -> Answer {
        self.send("GET", &format!("/{}/{path}", self.secret), &self.address, "")
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn who_knows_the_secret_is_served_the_page_and_what_it_asks() {
    let node = Node::start();
    let page = Page::of(&node);
    let root = page.get("");
    assert_eq!(root.status, 200, "{root:?}");
    assert!(root.body.contains("<main") && root.head.contains("content-type: text/html"), "{root:?}");
    for name in ["page.css", "page.js", "icon.svg"] {
        assert_eq!(page.get(name).status, 200, "{name}");
    }
    for policy in [
        "default-src 'none'",
        "script-src 'self'",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ] {
        assert!(root.head.contains(policy), "{policy}: {}", root.head);
    }
    for path in ["", "page.js", "v1/vms", "nothing"] {
        let answer = page.get(path);
        for header in ["nosniff", "no-referrer", "no-store", "content-security-policy", "same-origin"] {
            assert!(answer.head.contains(header), "{path}: {header}: {}", answer.head);
        }
    }
    // As the daemon says it.
    for path in ["/v1/vms", "/v1/migrations", "/v1/forks"] {
        let (_, told) = node.http("GET", path, "");
        let answer = page.get(&path[1..]);
        assert_eq!((answer.status, answer.body.as_str()), (200, told.as_str()), "{path}");
    }
    assert_eq!(page.get("v1/node").json()["node"], "tester");
    let unknown = page.get("v1/vms/nobody/tree");
    assert_eq!((unknown.status, &unknown.json()["code"]), (404, &"unknown-vm".into()));
}

#[test]
fn nobody_else_is_served_and_nothing_is_changed() {
    let node = Node::start();
    let page = Page::of(&node);
    let (address, below) = (page.address.clone(), format!("/{}/", page.secret));
    for path in ["/", "/v1/vms", "/page.js", "//", "/0123456789abcdef0123456789abcdef/v1/vms"] {
        let answer = page.send("GET", path, &address, "");
        assert_eq!(answer.status, 404, "{path}: {answer:?}");
        assert!(answer.body.contains("secret"), "{answer:?}");
    }
    // A name of somebody else that leads here, and pages of other sites.
    let port = address.rsplit_once(':').unwrap().1;
    for host in
        [format!("evil.example:{port}"), "evil.example".to_owned(), format!("127.0.0.1.evil.example:{port}")]
    {
        assert_eq!(page.send("GET", &below, &host, "").status, 403, "{host}");
    }
    for more in [
        "Origin: http://evil.example\r\n",
        "Origin: null\r\n",
        "Sec-Fetch-Site: cross-site\r\n",
        "Sec-Fetch-Site: same-site\r\n",
    ] {
        assert_eq!(page.send("GET", &below, &address, more).status, 403, "{more}");
    }
    let same = format!("Origin: http://{address}\r\nSec-Fetch-Site: same-origin\r\n");
    assert_eq!(page.send("GET", &below, &address, &same).status, 200);
    assert_eq!(
        page.send("GET", &below, &format!("localhost:{port}"), "").status,
        200,
        "a port that is forwarded"
    );
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
        for path in ["v1/vms", "v1/migrations", "v1/forks", ""] {
            let answer = page.send(method, &format!("{below}{path}"), &address, "Content-Length: 0\r\n");
            assert_eq!(answer.status, 405, "{method} {path}: {answer:?}");
        }
    }
    // What is asked of the daemon with other paths stays out, as does what loads the network.
    for path in [
        "v1/fabric/check?to=x",
        "v1/hooks",
        "metrics",
        "openapi.json",
        "v1/vms/x",
        "v1/vms/../hooks",
        "../v1/vms",
        "%2e%2e/v1/node",
    ] {
        assert_eq!(page.get(path).status, 404, "{path}");
    }
    let sneaky = page.get("v1/vms/..%2F..%2Fhooks%3Fx/tree?ask=true&x=../y");
    assert_eq!((sneaky.status, &sneaky.json()["code"]), (404, &"unknown-vm".into()), "{sneaky:?}");
}

#[test]
fn other_addresses_than_those_of_this_host_are_refused() {
    let node = Node::start();
    let refused = node.command(&["page", "--listen", "0.0.0.0:0"]);
    let ended = common::Ended::of(&mut { refused }).expect(2);
    assert!(ended.err.contains("ssh -L"), "{ended:?}");
    let first = Page::of(&node);
    let taken = node.command(&["page", "--listen", &first.address]);
    let ended = common::Ended::of(&mut { taken }).expect(1);
    assert!(ended.err.contains("cannot listen at") && ended.err.contains("--listen"), "{ended:?}");
}

#[test]
fn a_daemon_that_is_gone_is_told_and_comes_back() {
    let mut node = Node::start();
    let page = Page::of(&node);
    assert_eq!(page.get("v1/vms").status, 200);
    node.kill();
    let gone = page.get("v1/vms");
    assert_eq!((gone.status, &gone.json()["code"]), (502, &"daemon-unreachable".into()), "{gone:?}");
    assert!(gone.json()["message"].as_str().unwrap().contains("systemctl start vmoved"));
    node.run();
    assert_eq!(page.get("v1/vms").status, 200);
}

#[test]
fn events_go_on_behind_the_last_one() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("vmoved.toml");
    std::fs::write(&config, format!("[nodes]\nb = \"{}\"\n", vmove_skip::free_port())).unwrap();
    let node = Node::start_with(&["--insecure", "--config", &config.display().to_string()]);
    let page = Page::of(&node);
    assert_eq!(page.get("v1/migrations/7/events").status, 404);
    let qemu = vmove_skip::need!(vmove_skip::qemu());
    let line =
        ["run", "--name", "web", "--", &qemu, "-accel", "tcg", "-m", "32", "-nodefaults", "-display", "none"];
    common::Ended::of(&mut node.command(&line)).expect(0);
    // There is nobody at b: the migration fails, and its end is all that there is to tell.
    common::Ended::of(&mut node.command(&["migrate", "web", "--to", "b"])).expect(1);
    let listed = page.get("v1/migrations").json();
    let id = listed["migrations"][0]["id"].as_str().unwrap();
    let path = format!("/{}/v1/migrations/{id}/events", page.secret);
    let told = page.send("GET", &path, &page.address, "Accept: text/event-stream\r\n");
    assert!(told.status == 200 && told.head.contains("content-type: text/event-stream"), "{told:?}");
    let event = told.body.lines().find_map(|line| line.strip_prefix("id: ")).unwrap();
    assert!(told.body.contains(r#""state":"failed""#), "{told:?}");
    let last = format!("Accept: text/event-stream\r\nLast-Event-ID: {event}\r\n");
    assert_eq!(page.send("GET", &path, &page.address, &last).status, 204);
}

#[test]
fn over_tls_the_role_of_the_certificate_counts() {
    let pki = Pki::new();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("vmoved.toml");
    let entry = |name: &str, role: &str| format!("[[client]]\nname = \"{name}\"\nrole = \"{role}\"\n");
    std::fs::write(&config, entry("eyes", "viewer") + &entry("nothing", "none")).unwrap();
    let mut flags = pki.flags();
    flags.extend(["--config".to_owned(), config.display().to_string()]);
    let node = Node::start_with(&flags.iter().map(String::as_str).collect::<Vec<_>>());

    let eyes = Page::over_tls(&node, &pki.client("eyes"));
    for path in ["v1/node", "v1/vms", "v1/migrations", "v1/forks"] {
        assert_eq!(eyes.get(path).status, 200, "{path}");
    }
    let nothing = Page::over_tls(&node, &pki.client("nothing"));
    let refused = nothing.get("v1/vms");
    assert_eq!((refused.status, &refused.json()["code"]), (403, &"forbidden".into()), "{refused:?}");

    // The entry is taken away.
    std::fs::write(&config, "").unwrap();
    common::signal(node.pid(), Signal::HUP);
    common::wait("the role has gone", || eyes.get("v1/vms").status == 403);
    assert!(eyes.get("v1/vms").body.contains("no [[client]] entry"));
    std::fs::write(&config, entry("eyes", "viewer")).unwrap();
    common::signal(node.pid(), Signal::HUP);
    common::wait("the role is back", || eyes.get("v1/vms").status == 200);
}

#[test]
fn a_certificate_that_has_ended_is_told_and_one_that_was_renewed_is_read() {
    let pki = Pki::new();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("vmoved.toml");
    std::fs::write(&config, "[[client]]\nname = \"eyes\"\nrole = \"viewer\"\n").unwrap();
    let mut flags = pki.flags();
    flags.extend(["--config".to_owned(), config.display().to_string()]);
    let node = Node::start_with(&flags.iter().map(String::as_str).collect::<Vec<_>>());
    let late = pki.client_as("eyes", |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    let page = Page::over_tls(&node, &late);
    let refused = page.get("v1/vms");
    assert_eq!(refused.status, 502, "{refused:?}");
    let told = refused.json();
    assert_eq!(told["code"], "own-certificate-expired", "{refused:?}");
    let message = told["message"].as_str().unwrap();
    assert!(message.contains("out of date") && message.contains("CN=eyes"), "{refused:?}");
    assert!(message.contains("eyes.pem") && message.contains("2020"), "{refused:?}");
    // In the same files.
    pki.client("eyes");
    common::wait("the new one is read", || page.get("v1/vms").status == 200);
}
