//! What Prometheus makes of the metrics, and of the alerts in `examples/monitoring`: its own promtool says.
#![cfg(test)]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use vmove_skip::need;
use vmove_tests::bridge::until;
use vmove_tests::places;
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
