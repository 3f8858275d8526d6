//! Traces of a migration and of a fork, at a collector that takes OTLP over HTTP in JSON.
#![cfg(test)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::light;
use vmove_tests::forks::{Parent, done};
use vmove_tests::guest::{Accel, Guest};
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, Scene, memory_mib, ready};

/// A request that was refused comes again after 5 s.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where a collector is, and the spans that it takes. It refuses the first request.
fn collector() -> (SocketAddr, Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let (tell, spans) = channel();
    std::thread::spawn(move || {
        let mut refuse = true;
        for stream in listener.incoming().flatten() {
            let (tell, first) = (tell.clone(), std::mem::take(&mut refuse));
            std::thread::spawn(move || serve(stream, &tell, first));
        }
    });
    (address, spans)
}

fn serve(stream: TcpStream, tell: &Sender<Value>, mut refuse: bool) -> Option<()> {
    let mut to = stream.try_clone().ok()?;
    let mut from = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if from.read_line(&mut head).ok()? == 0 {
                return None;
            }
        }
        assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
        let lower = head.to_ascii_lowercase();
        assert!(lower.contains("content-type: application/json"), "{head}");
        let length = lower.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
        let mut body = vec![0; length.parse().expect("a number")];
        from.read_exact(&mut body).ok()?;
        let status = if std::mem::take(&mut refuse) { "503 Service Unavailable" } else { "200 OK" };
        if status.starts_with("200") {
            let told: Value = serde_json::from_slice(&body).expect("JSON");
            tell.send(told["resourceSpans"][0].clone()).ok()?;
        }
        write!(to, "HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}").ok()?;
    }
}

fn nanoseconds(span: &Value, key: &str) -> u64 {
    span[key].as_str().expect("a text").parse().expect("a number")
}

#[allow(clippy::cast_precision_loss)]
fn ms(span: &Value) -> f64 {
    (nanoseconds(span, "endTimeUnixNano") - nanoseconds(span, "startTimeUnixNano")) as f64 / 1e6
}

fn tracing_to(collector: SocketAddr) -> NodeOptions {
    NodeOptions { config: format!("[traces]\notlp = \"http://{collector}\"\n"), ..NodeOptions::default() }
}

/// What two nodes have told of one trace, by the name of their first span: that one, and all others below it and within its time.
fn told_by_two(told: &Receiver<Value>, id: &str) -> [Vec<Value>; 2] {
    let id = id.replace('-', "");
    let mut nodes = [(); 2].map(|()| {
        let node = told.recv_timeout(PATIENCE).expect("a trace of each node");
        let spans = node["scopeSpans"][0]["spans"].as_array().expect("spans").clone();
        assert!(spans.iter().all(|span| span["traceId"] == id.as_str()), "{spans:#?}");
        let root = &spans[0];
        let (begin, end) = (nanoseconds(root, "startTimeUnixNano"), nanoseconds(root, "endTimeUnixNano"));
        for span in &spans[1..] {
            assert!(spans.iter().any(|parent| parent["spanId"] == span["parentSpanId"]), "{span}");
            let within = nanoseconds(span, "startTimeUnixNano") >= begin
                && nanoseconds(span, "endTimeUnixNano") <= end + 1_000_000;
            assert!(within, "{span} is not within {root}");
        }
        spans
    });
    nodes.sort_by_key(|spans| spans[0]["name"].as_str().map(str::to_owned));
    nodes
}

fn attribute<'a>(span: &'a Value, key: &str) -> &'a Value {
    let all = span["attributes"].as_array().expect("attributes");
    &all.iter().find(|one| one["key"] == key).unwrap_or_else(|| panic!("no {key} in {span}"))["value"]
}

#[test]
fn both_nodes_tell_one_trace_of_a_migration() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (address, told) = collector();
    let guest =
        payload::guest(sandbox.path(), Accel::Tcg, &payload::light(), KvmPages::None).expect("a guest");
    let scene = Scene::with_options(sandbox, &tracing_to(address), "thp", &guest).expect("a guest");
    let end = scene.migrate_to("b", &["--mode", "hybrid"]).expect("an answer");
    assert_eq!(end.code, 0, "{}", end.answer);
    let [spans, there] = told_by_two(&told, end.answer["id"].as_str().expect("an id"));
    let (source, destination) = (&spans[0], &there[0]);
    assert_eq!((source["name"].as_str(), destination["name"].as_str()), (Some("migrate"), Some("receive")));
    assert_eq!(destination["parentSpanId"], source["spanId"]);
    assert_eq!(attribute(source, "vmove.mode")["stringValue"], "hybrid");
    // Phases and steps as in the report.
    let report = &end.answer;
    for list in ["phases", "pause"] {
        for part in report[list].as_array().expect("parts") {
            assert!(
                spans.iter().any(|span| span["name"] == part["name"]),
                "{part} of {list} is not in {spans:#?}"
            );
        }
    }
    let pause = spans.iter().find(|span| span["name"] == "pause").expect("the pause");
    let last = report["pause"].as_array().and_then(|steps| steps.last()).expect("steps");
    let wanted = last["start_ms"].as_f64().expect("ms") + last["duration_ms"].as_f64().expect("ms");
    assert!((ms(pause) - wanted).abs() < 0.01, "{pause} and {wanted} ms");
}

#[test]
fn both_hosts_tell_one_trace_of_a_fork() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (address, told) = collector();
    let (a, _b) = Node::pair(&sandbox, &tracing_to(address)).expect("two daemons");
    let guest = Guest::new(memory_mib(&light()), light()).expect("a QEMU");
    let _parent = Parent::start(&a, NAME, "thp", guest).expect("the guest runs");
    let answer = done(&a, &["create", NAME, "--count", "3", "--to", "b", "--here", "1"]).expect("a fork");
    let id = answer["id"].as_str().expect("an id");
    let [there, here] = told_by_two(&told, id);
    assert_eq!((&here[0]["name"], &there[0]["name"]), (&"fork".into(), &"children".into()));
    assert_eq!(there[0]["parentSpanId"], here[0]["spanId"]);
    assert!(here[0]["parentSpanId"].is_null(), "{}", here[0]);
    assert_eq!(attribute(&here[0], "vmove.children_ran")["intValue"], "3");
    assert_eq!(attribute(&there[0], "vmove.children_ran")["intValue"], "2");
    assert_eq!(attribute(&there[0], "vmove.peer")["stringValue"], "a");

    // Each child once, below the span of its host.
    let children = answer["children"].as_array().expect("children");
    assert_eq!(children.len(), 3, "{answer}");
    for child in children {
        let name = format!("child {}", child["name"].as_str().expect("a name"));
        let of_it = |spans: &[Value]| -> Vec<Value> {
            spans.iter().filter(|span| span["name"] == name.as_str()).cloned().collect()
        };
        let (mine, others) = if child["node"] == "a" { (&here, &there) } else { (&there, &here) };
        let (of_mine, of_others) = (of_it(mine), of_it(others));
        assert!(of_mine.len() == 1 && of_others.is_empty(), "{child}: {of_mine:#?} {of_others:#?}");
        assert_eq!(of_mine[0]["parentSpanId"], mine[0]["spanId"], "{child}");
        if child["node"] == "a" {
            is_as_long(&of_mine[0], &child["running_ms"]);
        }
    }

    // Phases as the daemon tells them, and the pause within them.
    let (_, fork) = a.rest("GET", &format!("/v1/forks/{id}"), &Value::Null).expect("the fork");
    let span = |name: &str| {
        here.iter().find(|span| span["name"] == name).unwrap_or_else(|| panic!("no {name} in {here:#?}"))
    };
    let phases = fork["phases"].as_array().expect("phases");
    assert!(phases.iter().any(|phase| phase["name"] == "freeze"), "{fork}");
    for phase in phases {
        is_as_long(span(phase["name"].as_str().expect("a name")), &phase["duration_ms"]);
    }
    assert!(there.iter().any(|span| span["name"] == "load"), "phases of the other host: {there:#?}");
    let (pause, freeze) = (span("pause"), span("freeze"));
    is_as_long(pause, &answer["parent_pause_ms"]);
    for (outer, inner, key) in [(freeze, pause, "startTimeUnixNano"), (pause, freeze, "endTimeUnixNano")] {
        assert!(nanoseconds(outer, key) <= nanoseconds(inner, key), "{pause} is not within {freeze}");
    }
    assert!(ms(pause) > 0.0, "{pause}");
}

/// To the microsecond.
fn is_as_long(span: &Value, wanted_ms: &Value) {
    let wanted = wanted_ms.as_f64().expect("milliseconds");
    assert!((ms(span) - wanted).abs() < 0.001, "{span} is not {wanted} ms long");
}
