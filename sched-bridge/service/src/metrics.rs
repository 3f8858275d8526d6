//! Metrics: names, units and buckets in one place, after the rules of Prometheus (base units, unit last, behind it `_total` for counters).

use std::time::Duration;

use metrics::{
    Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

use crate::account::End;

/// Bounds of the buckets of `vbridged_placement_duration_seconds`: from a few nodes to a search at its limits. Unit: seconds.
const PLACEMENT_BUCKETS: &[f64] =
    &[1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
/// Bounds of the buckets of `vbridged_store_operation_duration_seconds`: from a read of redb to a timeout of etcd. Unit: seconds.
const STORE_BUCKETS: &[f64] =
    &[2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Why leases are refused.
pub(crate) const REASONS: [&str; 7] =
    ["store", "contended", "no-room", "taken", "id-taken", "over-quota", "invalid"];

fn builder() -> Result<PrometheusBuilder, BuildError> {
    let full = |name: &str| Matcher::Full(name.to_owned());
    PrometheusBuilder::new()
        .set_buckets_for_metric(full("vbridged_placement_duration_seconds"), PLACEMENT_BUCKETS)?
        .set_buckets_for_metric(full("vbridged_store_operation_duration_seconds"), STORE_BUCKETS)
}

/// Installs the recorder of this process. The handle renders its metrics.
pub(crate) fn install() -> Result<PrometheusHandle, BuildError> {
    let handle = builder()?.install_recorder()?;
    describe();
    Ok(handle)
}

fn describe() {
    describe_gauge!("vbridged_build_info", "Always 1; the label is the version.");
    gauge!("vbridged_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    describe_gauge!(
        "vbridged_store_reachable",
        "1 while this bridge is in touch with its store, otherwise 0."
    );
    describe_gauge!("vbridged_leases", "Leases in the store; the same number at every bridge of a store.");
    describe_counter!("vbridged_leases_granted_total", "Leases that this bridge granted.");
    describe_counter!(
        "vbridged_leases_refused_total",
        "Requests for leases that this bridge refused, by reason."
    );
    describe_counter!(
        "vbridged_leases_ended_total",
        "Leases that this bridge ended: released by the holder, expired without a heartbeat, or because all VMs had ended."
    );
    describe_histogram!(
        "vbridged_placement_duration_seconds",
        Unit::Seconds,
        "Duration of the search for a placement, by outcome."
    );
    describe_counter!("vbridged_plans_total", "Runs of move plans that ended at this bridge, by outcome.");
    describe_counter!(
        "vbridged_moves_total",
        "Migrations of move plans that ended at this bridge: the VM arrived, stayed on its source, or it is not known which."
    );
    describe_histogram!(
        "vbridged_store_operation_duration_seconds",
        Unit::Seconds,
        "Latency of the store's answers, by operation and outcome."
    );
    begin_at_zero();
}

/// Rates begin at zero, not at nothing: of a series that begins at 1, Prometheus sees no increase.
fn begin_at_zero() {
    counter!("vbridged_leases_granted_total").absolute(0);
    for end in [End::Released, End::Expired, End::VmsEnded] {
        counter!("vbridged_leases_ended_total", "end" => end_word(end)).absolute(0);
    }
    for outcome in ["done", "stopped"] {
        counter!("vbridged_plans_total", "outcome" => outcome).absolute(0);
    }
    for outcome in ["arrived", "stayed", "unknown"] {
        counter!("vbridged_moves_total", "outcome" => outcome).absolute(0);
    }
    for reason in REASONS {
        counter!("vbridged_leases_refused_total", "reason" => reason).absolute(0);
    }
    // A histogram is on the page, with zeros, as soon as it is registered.
    for outcome in [true, false].map(placement_word) {
        let _ = histogram!("vbridged_placement_duration_seconds", "outcome" => outcome);
    }
    for (operation, outcomes) in [("read", &["ok", "error"][..]), ("commit", &["ok", "conflict", "error"])] {
        for outcome in outcomes {
            let _ = store_histogram(operation, outcome);
        }
    }
}

const fn end_word(end: End) -> &'static str {
    match end {
        End::Released => "released",
        End::Expired => "expired",
        End::VmsEnded => "vms-ended",
    }
}

pub(crate) fn set_store_reachable(reachable: bool) {
    gauge!("vbridged_store_reachable").set(f64::from(u8::from(reachable)));
}

#[expect(clippy::cast_precision_loss, reason = "a number of leases")]
pub(crate) fn set_leases(count: usize) {
    gauge!("vbridged_leases").set(count as f64);
}

pub(crate) fn lease_granted() {
    counter!("vbridged_leases_granted_total").increment(1);
}

pub(crate) fn lease_refused(reason: &'static str) {
    counter!("vbridged_leases_refused_total", "reason" => reason).increment(1);
}

pub(crate) fn lease_ended(end: End) {
    counter!("vbridged_leases_ended_total", "end" => end_word(end)).increment(1);
}

pub(crate) fn placement_took(duration: Duration, placed: bool) {
    let outcome = placement_word(placed);
    histogram!("vbridged_placement_duration_seconds", "outcome" => outcome).record(duration.as_secs_f64());
}

const fn placement_word(placed: bool) -> &'static str {
    if placed { "placed" } else { "refused" }
}

/// `outcome`: `done` or `stopped`.
pub(crate) fn plan_ended(outcome: &'static str) {
    counter!("vbridged_plans_total", "outcome" => outcome).increment(1);
}

/// `outcome`: `arrived`, `stayed` or `unknown`.
pub(crate) fn move_ended(outcome: &'static str) {
    counter!("vbridged_moves_total", "outcome" => outcome).increment(1);
}

/// `operation`: `read` or `commit`; `outcome`: `ok`, `conflict` or `error`.
pub(crate) fn store_answered(operation: &'static str, outcome: &'static str, latency: Duration) {
    store_histogram(operation, outcome).record(latency.as_secs_f64());
}

fn store_histogram(operation: &'static str, outcome: &'static str) -> Histogram {
    histogram!("vbridged_store_operation_duration_seconds", "operation" => operation, "outcome" => outcome)
}

#[cfg(test)]
mod tests {
    use vmove_skip::installed::{is_current, metrics_in, text};
    use vmove_skip::reference::{broken_rules, described, metrics_page};

    use super::*;

    #[test]
    fn the_checked_in_page_is_current() {
        let page = metrics_page("vbridged", &described(describe));
        is_current("docs/reference/vbridged-metrics.md", page.as_bytes(), "vmove-bridge");
    }

    /// Every metric has a help text, a type, and, if it has a unit, the unit in its name.
    #[test]
    fn the_page_follows_the_rules_of_prometheus() {
        let recorder = builder().unwrap().build_recorder();
        metrics::with_local_recorder(&recorder, || {
            describe();
            set_store_reachable(true);
            set_leases(2);
            lease_granted();
            lease_refused("no-room");
            lease_ended(End::Expired);
            placement_took(Duration::from_millis(3), true);
            plan_ended("done");
            move_ended("stayed");
            store_answered("commit", "ok", Duration::from_millis(7));
        });
        let page = recorder.handle().render();
        for line in [
            "vbridged_store_reachable 1",
            "vbridged_leases 2",
            "vbridged_leases_granted_total 1",
            "vbridged_leases_refused_total{reason=\"no-room\"} 1",
            "vbridged_leases_ended_total{end=\"expired\"} 1",
            "vbridged_leases_ended_total{end=\"released\"} 0",
            "vbridged_plans_total{outcome=\"done\"} 1",
            "vbridged_moves_total{outcome=\"stayed\"} 1",
            "vbridged_placement_duration_seconds_bucket{outcome=\"placed\",le=\"0.0025\"} 0",
            "vbridged_placement_duration_seconds_bucket{outcome=\"placed\",le=\"0.005\"} 1",
            "vbridged_store_operation_duration_seconds_count{operation=\"commit\",outcome=\"ok\"} 1",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is missing in\n{page}");
        }
        assert_eq!(broken_rules("vbridged_", &described(describe)), [""; 0]);
        let guide = text("docs/sched-bridge.md");
        let names = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let names: Vec<&str> = names.map(|line| line.split_once(' ').unwrap().0).collect();
        // An alert on a metric that nobody tells never fires, and nobody notices.
        for file in ["alerts.yml", "dashboard.json"] {
            let text = text(&format!("examples/monitoring/{file}"));
            let used = metrics_in(&text, "vbridged_");
            assert!(used.len() >= 5, "{file}: {used:?}");
            let unknown: Vec<_> = used.iter().filter(|word| !names.contains(word)).collect();
            assert!(unknown.is_empty(), "{file} has {unknown:?}, which vbridged does not tell");
        }
        for name in names {
            assert!(guide.contains(&format!("| `{name}")), "{name} is not in the guide");
            assert!(page.contains(&format!("# HELP {name} ")), "{name} has no help text");
        }
    }
}
