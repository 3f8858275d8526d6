//! Traces of a migration, at a collector that takes OTLP over HTTP in JSON.
#![cfg(test)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::daemon::NodeOptions;
use vmove_tests::guest::Accel;
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{Scene, ready};

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

#[test]
fn both_nodes_tell_one_trace_of_a_migration() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (address, told) = collector();
    let options =
        NodeOptions { config: format!("[traces]\notlp = \"http://{address}\"\n"), ..NodeOptions::default() };
    let guest =
        payload::guest(sandbox.path(), Accel::Tcg, &payload::light(), KvmPages::None).expect("a guest");
    let scene = Scene::with_options(sandbox, &options, "thp", &guest).expect("a guest");
    let end = scene.migrate_to("b", &["--mode", "hybrid"]).expect("an answer");
    assert_eq!(end.code, 0, "{}", end.answer);
    let id = end.answer["id"].as_str().expect("an id").replace('-', "");

    let mut roots = Vec::new();
    for _ in 0..2 {
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
        roots.push((root.clone(), spans));
    }
    roots.sort_by_key(|(root, _)| root["name"].as_str().map(str::to_owned));
    let [(source, spans), (destination, _)] = &roots[..] else { panic!("two nodes") };
    assert_eq!((source["name"].as_str(), destination["name"].as_str()), (Some("migrate"), Some("receive")));
    assert_eq!(destination["parentSpanId"], source["spanId"]);
    let mode =
        source["attributes"].as_array().expect("attributes").iter().find(|one| one["key"] == "vmove.mode");
    assert_eq!(mode.expect("a mode")["value"]["stringValue"], "hybrid");
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
    #[allow(clippy::cast_precision_loss)]
    let ms = (nanoseconds(pause, "endTimeUnixNano") - nanoseconds(pause, "startTimeUnixNano")) as f64 / 1e6;
    let last = report["pause"].as_array().and_then(|steps| steps.last()).expect("steps");
    let wanted = last["start_ms"].as_f64().expect("ms") + last["duration_ms"].as_f64().expect("ms");
    assert!((ms - wanted).abs() < 0.01, "{ms} and {wanted} ms");
}
