//! What Prometheus makes of the metrics, and of the alerts in `examples/monitoring`: its own promtool says.
#![cfg(test)]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use vmove_skip::installed::text;
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, until};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{Scene, ready};

/// Runs promtool in the folder of the examples. Returns what it says.
fn check(promtool: &Path, arguments: &[&str], input: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/monitoring");
    let mut child = Command::new(promtool)
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool runs");
    child.stdin.take().expect("its input").write_all(input.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let said = [&output.stdout[..], &output.stderr]
        .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        .concat();
    assert!(output.status.success(), "promtool {arguments:?}: {said}");
    said
}

/// A name, and the labels that are told or asked for by `=`. Where Prometheus found it is no part of it.
#[derive(Debug)]
struct Series {
    name: String,
    labels: BTreeMap<String, String>,
}

impl Series {
    /// All that a text names: a page of metrics, an expression, or a series of a test of alerts.
    fn all_in(text: &str) -> Vec<Self> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let begins = ["vmove_", "vbridged_"].into_iter().flat_map(|prefix| text.match_indices(prefix));
        begins
            .filter(|(at, _)| !text[..*at].ends_with(is_name))
            .map(|(at, _)| {
                let (name, rest) =
                    text[at..].split_at(text[at..].find(|c| !is_name(c)).unwrap_or(text.len() - at));
                let labels = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
                let labels = labels.map_or("", |(labels, _)| labels).split(',').filter_map(|label| {
                    let (key, value) = label.split_once("=\"").filter(|(key, _)| !key.ends_with('!'))?;
                    Some((key.trim().to_owned(), value.trim_end_matches('"').to_owned()))
                });
                let labels = labels.filter(|(key, _)| !["instance", "job"].contains(&key.as_str()));
                Self { name: name.to_owned(), labels: labels.collect() }
            })
            .collect()
    }

    /// Whether this one of a page is asked for.
    fn is(&self, asked: &Self) -> bool {
        self.name == asked.name && asked.labels.iter().all(|label| self.labels.get(label.0) == Some(label.1))
    }
}

/// The metrics of a node and of a bridge that have just begun. The node has a hook.
fn fresh_pages(sandbox: &Sandbox) -> [String; 2] {
    let config = "[[hook]]\nname = 'copy'\non = 'GUEST_PANICKED'\ndo = { fork = {} }\n".to_owned();
    let node = Node::start(sandbox, "a", NodeOptions { config, ..NodeOptions::default() }).expect("a daemon");
    until("gauges are set", || node.metrics().is_ok_and(|page| page.contains("\nvmove_vms{")));
    let address = vmove_skip::free_port();
    let _bridge = Bridge::start_with(sandbox, &[], &format!("metrics = \"{address}\"\n")).expect("a bridge");
    [node.metrics().expect("metrics"), page_at(address)]
}

fn page_at(address: SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).expect("a connection");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("it takes a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, page) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.contains(" 200 "), "{head}");
    page.to_owned()
}

/// The lines of a page that are no comments: series and their values.
fn values(page: &str) -> impl Iterator<Item = (&str, f64)> {
    let lines = page.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| {
        let (series, value) = line.rsplit_once(' ').expect("a value");
        (series, value.parse().expect("a number"))
    })
}

/// The labels of daemons whose values are known beforehand.
const CLOSED: [(&str, &str, &[&str]); 19] = [
    ("vmove_migrations_total", "mode", &["precopy", "postcopy", "hybrid", "unknown"]),
    ("vmove_migrations_total", "outcome", &["done", "refused", "failed", "cancelled"]),
    ("vmove_migrations_total", "role", &["source", "destination"]),
    ("vmove_migrations_running", "role", &["source", "destination"]),
    ("vmove_vms", "origin", &["vmove", "adopted"]),
    ("vmove_migration_downtime_seconds_count", "mode", &["precopy", "postcopy", "hybrid"]),
    ("vmove_migration_duration_seconds_count", "mode", &["precopy", "postcopy", "hybrid"]),
    ("vmove_peer_connections_total", "result", &["welcome", "refused", "tls_refused", "crowded_out"]),
    ("vmove_requests_total", "from", &["socket", "tls", "plain"]),
    ("vmove_requests_total", "outcome", &["done", "refused", "forbidden", "limited", "failed"]),
    ("vmove_forks_total", "outcome", &["done", "failed"]),
    ("vmove_fork_children_total", "outcome", &["running", "failed"]),
    ("vmove_hook_runs_total", "outcome", &["done", "failed", "forbidden", "would"]),
    ("vmove_hook_held_back_total", "why", &["loop", "at-most", "at-work"]),
    (
        "vbridged_leases_refused_total",
        "reason",
        &["no-room", "taken", "id-taken", "over-quota", "contended", "store", "invalid"],
    ),
    ("vbridged_leases_ended_total", "end", &["released", "expired", "vms-ended"]),
    ("vbridged_placement_duration_seconds_bucket", "outcome", &["placed", "refused"]),
    ("vbridged_plans_total", "outcome", &["done", "stopped"]),
    ("vbridged_moves_total", "outcome", &["arrived", "stayed", "unknown"]),
];

/// Of a series that begins at 1, Prometheus sees no increase: no alert fires at the first event, and `rate()` misses it.
#[test]
fn all_that_a_fresh_daemon_will_count_stands_at_zero() {
    need!(ready());
    need!(places::product("vbridged"));
    let promtool = need!(places::promtool());
    let sandbox = Sandbox::new().expect("a sandbox");
    let pages = fresh_pages(&sandbox);
    for (page, program) in pages.iter().zip(["vmoved", "vbridged"]) {
        assert_eq!(check(&promtool, &["check", "metrics"], page), "", "{page}");
        let reference = text(&format!("docs/reference/{program}-metrics.md"));
        let rows = reference.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
        let rows: Vec<_> = rows.collect();
        assert!(rows.len() >= 10, "{reference}");
        for (name, row) in rows {
            let told = if row.starts_with("histogram") { format!("{name}_count") } else { name.to_owned() };
            let found = || values(page).filter(|(series, _)| series.split('{').next() == Some(&told));
            assert!(found().next().is_some(), "{told} is not on the page of a fresh {program}:\n{page}");
            // It was asked, and has asked, before it could tell.
            let begun = ["vmove_requests_total", "vbridged_store_operation_duration_seconds"].contains(&name);
            let counted = found().find(|(_, value)| !row.starts_with("gauge") && !begun && *value != 0.0);
            assert_eq!(counted, None);
        }
    }
    let told = Series::all_in(&pages.concat());
    let expect = |asked: &str| {
        let asked = &Series::all_in(asked)[0];
        assert!(told.iter().any(|one| one.is(asked)), "{asked:?} is not told by a fresh daemon");
    };
    for (name, label, values) in CLOSED {
        values.iter().for_each(|value| expect(&format!("{name}{{{label}=\"{value}\"}}")));
    }
    for (operation, outcomes) in [("read", &["ok", "error"][..]), ("commit", &["ok", "conflict", "error"])] {
        for outcome in outcomes {
            expect(&format!(
                "vbridged_store_operation_duration_seconds_count{{operation=\"{operation}\",outcome=\"{outcome}\"}}"
            ));
        }
    }
}

/// Expressions of a dashboard's panels, as Grafana asks Prometheus for them, by title.
fn expressions(panels: &Value) -> Vec<(&str, String)> {
    let of = |panel: &'_ Value| -> Vec<String> {
        let targets = panel["targets"].as_array().into_iter().flatten();
        targets.map(|target| target["expr"].as_str().expect("an expression").to_owned()).collect()
    };
    let mut all = Vec::new();
    for panel in panels.as_array().into_iter().flatten() {
        let title = panel["title"].as_str().expect("a title");
        all.extend(of(panel).into_iter().map(|expr| (title, with_values(&expr))));
        all.extend(expressions(&panel["panels"]));
    }
    all
}

/// An expression with values in the place of Grafana's variables.
fn with_values(expr: &str) -> String {
    let variables = [("$__rate_interval", "1m"), ("$node", "a|b"), ("$bridge", "a")];
    let expr = variables.iter().fold(expr.to_owned(), |expr, (name, value)| expr.replace(name, value));
    assert!(!expr.contains('$'), "{expr}: give a value for this variable");
    expr
}

/// Rules and tests of `examples/monitoring`.
fn yaml(file: &str) -> Value {
    serde_yaml_ng::from_str(&text(&format!("examples/monitoring/{file}"))).expect("YAML")
}

/// All items of a list in each item of another.
fn each<'a>(all: &'a Value, list: &str, of_each: &'a str) -> impl Iterator<Item = (&'a Value, &'a Value)> {
    let outer = all[list].as_array().expect("a list").iter();
    outer.flat_map(move |one| one[of_each].as_array().expect("a list").iter().map(move |inner| (one, inner)))
}

#[test]
fn dashboard_and_alerts_ask_for_what_there_is() {
    need!(ready());
    need!(places::product("vbridged"));
    let promtool = need!(places::promtool());
    let sandbox = Sandbox::new().expect("a sandbox");
    let told = Series::all_in(&fresh_pages(&sandbox).concat());
    let dashboard: Value = serde_json::from_str(&text("examples/monitoring/dashboard.json")).expect("JSON");
    let mut asked = expressions(&dashboard["panels"]);
    assert!(asked.len() > 30, "{asked:?}");
    let rules: Vec<_> = asked
        .iter()
        .enumerate()
        .map(|(number, (_, expr))| json!({ "record": format!("panel:{number}"), "expr": expr }))
        .collect();
    let file = sandbox.path().join("dashboard-rules.yml");
    let groups = json!({ "groups": [{ "name": "dashboard", "rules": rules }] });
    std::fs::write(&file, groups.to_string()).expect("a file");
    let said = check(&promtool, &["check", "rules", &file.display().to_string()], "");
    assert!(said.contains(&format!("SUCCESS: {} rules found", rules.len())), "{said}");

    for variable in dashboard["templating"]["list"].as_array().expect("variables") {
        asked.extend(variable["definition"].as_str().map(|definition| ("variables", definition.to_owned())));
    }
    let (alerts, tests) = (yaml("alerts.yml"), yaml("alerts-test.yml"));
    for (_, rule) in each(&alerts, "groups", "rules") {
        let name = rule["alert"].as_str().expect("an alert");
        asked.push((name, rule["expr"].as_str().expect("an expression").to_owned()));
    }
    for (_, input) in each(&tests, "tests", "input_series") {
        asked.push(("alerts-test.yml", input["series"].as_str().expect("a series").to_owned()));
    }
    for (place, expr) in &asked {
        for one in Series::all_in(expr) {
            assert!(
                told.iter().any(|told| told.is(&one)),
                "{place} asks for {one:?}, which no daemon tells: {expr}"
            );
        }
    }
}

#[test]
fn each_alert_is_shown_to_fire_and_not_to_fire() {
    let (alerts, tests) = (yaml("alerts.yml"), yaml("alerts-test.yml"));
    let names = |text: &Value| -> Vec<String> {
        Series::all_in(text.as_str().expect("a text")).into_iter().map(|series| series.name).collect()
    };
    let mut count = 0;
    for (_, rule) in each(&alerts, "groups", "rules") {
        let name = rule["alert"].as_str().expect("an alert");
        let of_it = || {
            each(&tests, "tests", "alert_rule_test")
                .filter(|(_, shown)| shown["alertname"] == name)
                .map(|(test, shown)| (test, shown["exp_alerts"].as_array().expect("what fires").is_empty()))
        };
        for quiet in [false, true] {
            assert!(
                of_it().any(|(_, is_quiet)| is_quiet == quiet),
                "{name} is not shown with quiet = {quiet}"
            );
        }
        // What has no series is quiet, too, and shows nothing.
        for (test, _) in of_it() {
            let given =
                test["input_series"].as_array().expect("series").iter().flat_map(|s| names(&s["series"]));
            let given: Vec<String> = given.collect();
            let wanted = names(&rule["expr"]);
            assert!(wanted.is_empty() || wanted.iter().any(|name| given.contains(name)), "{name}: {test}");
        }
        count += 1;
    }
    assert!(
        text("docs/operations.md").contains(&format!("({count} alerts,")),
        "the guide counts {count} alerts"
    );
}

#[test]
fn alerts_fire_when_they_should() {
    let promtool = need!(places::promtool());
    check(&promtool, &["check", "config", "prometheus.yml"], "");
    check(&promtool, &["check", "rules", "alerts.yml"], "");
    check(&promtool, &["test", "rules", "alerts-test.yml"], "");
}

#[test]
fn metrics_are_as_prometheus_wants_them() {
    need!(ready());
    let promtool = need!(places::promtool());
    let scene = Scene::new().expect("a guest");
    let failed = "vmove_migrations_total{mode=\"postcopy\",outcome=\"failed\",role=\"source\"} 0\n";
    let page = scene.a.metrics().expect("metrics");
    assert!(page.contains(failed), "the count of failures begins at zero: {page}");
    let end = scene.migrate_to(&scene.b.listen().to_string(), &["--mode", "postcopy"]).expect("an answer");
    assert_eq!(end.code, 0, "{}", end.answer);
    for (node, role) in [(&scene.a, "source"), (&scene.b, "destination")] {
        let page = node.metrics().expect("metrics");
        assert_eq!(check(&promtool, &["check", "metrics"], &page), "", "{page}");
        // A destination does not know the mode.
        let done = format!("outcome=\"done\",role=\"{role}\"}} 1");
        let is_told =
            |line: &str| line.starts_with("vmove_migrations_total{") && line.ends_with(done.as_str());
        until("the migration is counted", || node.metrics().is_ok_and(|page| page.lines().any(is_told)));
    }
}
