//! Metrics: names, units and buckets in one place.
//!
//! Base units, unit last, behind it `_total` for counters. A bucket range covers what the figure can be on real machines.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

use vmove_clone::engine::metrics as fork;
use vmove_hooks::metrics as hook;
use vmove_node::latency::News;
use vmove_types::progress::{Outcome, Progress, Role};
use vmove_types::report::Report;
use vmove_types::spec::Mode;

use super::App;
use super::access::{ORIGINS, OUTCOMES};
use super::traces::{self, Traces};

/// How often sessions are looked at.
const SAMPLE: Duration = Duration::from_millis(500);

const DOWNTIME: &[f64] = &[0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];
const DURATION: &[f64] = &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0];
const FAULT: &[f64] = &[1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.1, 1.0];

/// One sample for each fault, at the node that the guest comes to.
const FAULT_LATENCY: &str = "vmove_fault_latency_seconds";

/// Makes the recorder of this process.
pub fn install(node: &str) -> Result<PrometheusHandle, BuildError> {
    let full = |name: &str| Matcher::Full(name.to_owned());
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(full("vmove_migration_downtime_seconds"), DOWNTIME)?
        .set_buckets_for_metric(full("vmove_migration_duration_seconds"), DURATION)?
        .set_buckets_for_metric(full(FAULT_LATENCY), FAULT)?
        .set_buckets_for_metric(full(hook::TIME), DURATION)?
        .set_buckets_for_metric(full(fork::PARENT_PAUSE), DOWNTIME)?
        .set_buckets_for_metric(full(fork::ALL_RUNNING), DURATION)?
        .install_recorder()?;
    describe();
    fork::describe();
    hook::describe();
    traces::describe();
    gauge!("vmove_build_info", "version" => env!("CARGO_PKG_VERSION"), "node" => node.to_owned()).set(1.0);
    Ok(handle)
}

fn describe() {
    describe_gauge!("vmove_build_info", "Always 1; its labels say version and node.");
    describe_gauge!("vmove_vms", "VMs on this node.");
    describe_gauge!("vmove_migrations_running", "Migrations at work on this node.");
    describe_counter!("vmove_migrations_total", "Migrations that ended on this node.");
    describe_counter!(
        "vmove_migration_sent_bytes_total",
        Unit::Bytes,
        "Bytes on the wire for pages and device state, counted by the source."
    );
    describe_counter!(
        "vmove_migration_faults_total",
        "Guest page faults at the destination, counted by the source when it is told of the end."
    );
    describe_counter!(
        "vmove_migration_recoveries_total",
        "Times a migration lost its peer or daemon and went on."
    );
    describe_histogram!(
        "vmove_migration_downtime_seconds",
        Unit::Seconds,
        "From the source's STOP to the destination's RESUME, observed by the source."
    );
    describe_histogram!(
        "vmove_migration_duration_seconds",
        Unit::Seconds,
        "From the request to the end, observed by the source."
    );
    describe_histogram!(
        FAULT_LATENCY,
        Unit::Seconds,
        "How long guest threads waited for a page that was fetched, of guests on their way to this node."
    );
    describe_counter!("vmove_qemu_ended_total", "QEMUs that ended by themselves.");
    describe_counter!("vmove_peer_connections_total", "Connections from peers.");
    describe_counter!(
        "vmove_requests_total",
        "HTTP requests, by the port that they came to and their outcome."
    );
    describe_counter!("vmove_audit_lost_total", "Lines of the audit log that could not be written.");
    begin_at_zero();
}

/// Of a series that begins at 1, Prometheus sees no increase: an alert would miss the first failure.
fn begin_at_zero() {
    for name in [
        "vmove_qemu_ended_total",
        "vmove_audit_lost_total",
        "vmove_migration_sent_bytes_total",
        "vmove_migration_faults_total",
        "vmove_migration_recoveries_total",
    ] {
        counter!(name).absolute(0);
    }
    for result in ["welcome", "refused", "tls_refused", "crowded_out"] {
        counter!("vmove_peer_connections_total", "result" => result).absolute(0);
    }
    for from in ORIGINS {
        for outcome in OUTCOMES {
            counter!("vmove_requests_total", "from" => from, "outcome" => outcome).absolute(0);
        }
    }
    let modes = [Mode::Precopy, Mode::Postcopy, Mode::Hybrid].map(Mode::as_str);
    for mode in modes.into_iter().chain([UNKNOWN]) {
        for role in [Role::Source, Role::Destination] {
            for outcome in ["done", "refused", "cancelled", "failed"] {
                let labels = [("mode", mode), ("outcome", outcome), ("role", role_word(role))];
                counter!("vmove_migrations_total", &labels).absolute(0);
            }
        }
    }
    // A histogram is on the page, with zeros, as soon as it is registered.
    for mode in modes {
        let _ = histogram!("vmove_migration_downtime_seconds", "mode" => mode);
        let _ = histogram!("vmove_migration_duration_seconds", "mode" => mode);
    }
    let _ = histogram!(FAULT_LATENCY);
}

/// The mode of a migration that ended before one was chosen.
const UNKNOWN: &str = "unknown";

/// What of a session was counted already.
#[derive(Debug, Default)]
struct Counted {
    bytes: u64,
    ended: bool,
}

/// Watches all sessions, also those that peers begin. Never returns.
pub async fn sample(app: Arc<App>, handle: PrometheusHandle, traces: Option<Traces>) {
    let mut counted: HashMap<String, Counted> = HashMap::new();
    let mut faults = News::of(app.engine.fault_latencies());
    // A session of an earlier daemon that still holds its guest was counted by that one.
    for old in app.sessions.live().iter().filter(|p| p.outcome.is_end()) {
        counted.insert(key(old), Counted { bytes: old.bytes_sent, ended: true });
    }
    loop {
        let sessions = app.sessions.live();
        for session in &sessions {
            let ended = take(session, counted.entry(key(session)).or_default());
            if let Some(traces) = traces.as_ref().filter(|_| ended) {
                traces.tell(session);
            }
        }
        counted.retain(|id, _| sessions.iter().any(|s| key(s) == *id));
        app.sessions.settle(&sessions);
        if let Some(traces) = &traces {
            app.forks.newly_ended().iter().for_each(|fork| traces.tell_fork(fork));
        }
        set_gauges(&app, &sessions);
        observe_faults(&mut faults);
        handle.run_upkeep();
        tokio::time::sleep(SAMPLE).await;
    }
}

fn key(p: &Progress) -> String {
    format!("{}/{:?}", p.id, p.role)
}

#[expect(clippy::cast_precision_loss, reason = "counts of VMs")]
fn set_gauges(app: &App, sessions: &[Progress]) {
    for adopted in [false, true] {
        let origin = if adopted { "adopted" } else { "vmove" };
        let count = app.registry.records().iter().filter(|r| r.adopted == adopted).count();
        gauge!("vmove_vms", "origin" => origin).set(count as f64);
    }
    for role in [Role::Source, Role::Destination] {
        let count = sessions.iter().filter(|p| p.role == role && !p.outcome.is_end()).count();
        gauge!("vmove_migrations_running", "role" => role_word(role)).set(count as f64);
    }
}

/// Counts what is new. Whether it has ended since.
fn take(p: &Progress, counted: &mut Counted) -> bool {
    if counted.ended && !p.outcome.is_end() {
        // Recovered: it will end once more.
        counted.ended = false;
    }
    let new = p.bytes_sent.saturating_sub(counted.bytes);
    counted.bytes = counted.bytes.max(p.bytes_sent);
    // The source has the whole count, and a sum over nodes shall hold each byte once.
    if p.role == Role::Source {
        counter!("vmove_migration_sent_bytes_total").increment(new);
    }
    if counted.ended || !p.outcome.is_end() {
        return false;
    }
    counted.ended = true;
    let mode = p.mode.clone().unwrap_or_else(|| UNKNOWN.to_owned());
    let labels = [
        ("mode", mode),
        ("outcome", outcome_word(&p.outcome).to_owned()),
        ("role", role_word(p.role).to_owned()),
    ];
    counter!("vmove_migrations_total", &labels).increment(1);
    match &p.outcome {
        Outcome::Done { report } if p.role == Role::Source => observe(report),
        _ => {}
    }
    true
}

fn observe(report: &Report) {
    let mode = || report.mode.clone();
    histogram!("vmove_migration_downtime_seconds", "mode" => mode()).record(report.downtime_ms / 1e3);
    histogram!("vmove_migration_duration_seconds", "mode" => mode()).record(report.total_ms / 1e3);
    counter!("vmove_migration_faults_total").increment(report.faults.count);
    counter!("vmove_migration_recoveries_total").increment(report.recoveries.into());
}

fn observe_faults(faults: &mut News) {
    for (latency, count) in faults.take() {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        histogram!(FAULT_LATENCY).record_many(latency.as_secs_f64(), count);
    }
}

fn role_word(role: Role) -> &'static str {
    match role {
        Role::Source => "source",
        Role::Destination => "destination",
    }
}

fn outcome_word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Running | Outcome::Reconnecting { .. } => "running",
        Outcome::Done { .. } => "done",
        Outcome::Refused { .. } => "refused",
        Outcome::Failed { cancelled: true, .. } => "cancelled",
        Outcome::Failed { .. } => "failed",
    }
}

#[cfg(test)]
mod tests {
    use metrics::with_local_recorder;
    use vmove_node::latency::Latencies;
    use vmove_skip::installed::{is_current, metrics_in, text};
    use vmove_skip::reference::{Metric, broken_rules, described, metrics_page};
    use vmove_types::progress::Phase;

    use super::*;

    fn progress(bytes: u64, outcome: Outcome) -> Progress {
        Progress {
            mode: Some("hybrid".to_owned()),
            phase: Phase::Finish,
            bytes_sent: bytes,
            outcome,
            ..Progress::begun("1", "v", Role::Source, "b")
        }
    }

    #[test]
    fn faults_are_counted_in_buckets() {
        let builder = PrometheusBuilder::new();
        let matcher = Matcher::Full(FAULT_LATENCY.to_owned());
        let recorder = builder.set_buckets_for_metric(matcher, FAULT).unwrap().build_recorder();
        let latencies = Arc::new(Latencies::default());
        let mut news = News::of(Arc::clone(&latencies));
        with_local_recorder(&recorder, || {
            for us in [40, 80, 80, 900] {
                latencies.record(Duration::from_micros(us));
            }
            observe_faults(&mut news);
            observe_faults(&mut news);
        });
        let text = recorder.handle().render();
        for (bucket, count) in [("0.000025", 0), ("0.00005", 1), ("0.0001", 3), ("0.001", 4), ("+Inf", 4)] {
            let line = format!("vmove_fault_latency_seconds_bucket{{le=\"{bucket}\"}} {count}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
        assert!(text.contains("vmove_fault_latency_seconds_count 4\n"), "{text}");
    }

    fn all() -> Vec<Metric> {
        described(|| {
            describe();
            fork::describe();
            hook::describe();
            traces::describe();
        })
    }

    #[test]
    fn the_checked_in_page_is_current() {
        let page = metrics_page("vmoved", &all());
        is_current("docs/reference/vmoved-metrics.md", page.as_bytes(), "vmove-daemon");
    }

    #[test]
    fn names_follow_the_rules_of_prometheus_and_are_in_the_guides() {
        let guides = text("docs/operations.md") + &text("docs/hooks.md");
        assert_eq!(broken_rules("vmove_", &all()), [""; 0]);
        for Metric { name, .. } in all() {
            assert!(guides.contains(&format!("`{name}")), "{name} is in no guide");
        }
    }

    /// An alert on a metric that nobody tells never fires, and nobody notices.
    #[test]
    fn alerts_and_dashboard_are_of_metrics_that_there_are() {
        let known = all();
        for file in ["alerts.yml", "alerts-test.yml", "dashboard.json"] {
            let text = text(&format!("examples/monitoring/{file}"));
            let names = metrics_in(&text, "vmove_");
            assert!(names.len() > 10, "{file}: {names:?}");
            let unknown: Vec<_> =
                names.iter().filter(|name| !known.iter().any(|metric| metric.name == **name)).collect();
            assert!(unknown.is_empty(), "{file} has {unknown:?}, which vmoved does not tell");
        }
    }

    #[test]
    fn each_byte_and_each_end_is_counted_once() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        let report = Report { mode: "hybrid".to_owned(), downtime_ms: 5.0, ..Report::default() };
        with_local_recorder(&recorder, || {
            let mut counted = Counted::default();
            take(&progress(100, Outcome::Running), &mut counted);
            take(&progress(150, Outcome::Running), &mut counted);
            let done = progress(150, Outcome::Done { report: Box::new(report) });
            take(&done, &mut counted);
            take(&done, &mut counted);
        });
        let text = handle.render();
        assert!(text.contains("vmove_migration_sent_bytes_total 150"), "{text}");
        assert!(
            text.contains("vmove_migrations_total{mode=\"hybrid\",outcome=\"done\",role=\"source\"} 1"),
            "{text}"
        );
        assert!(text.contains("vmove_migration_downtime_seconds"), "{text}");
    }
}
