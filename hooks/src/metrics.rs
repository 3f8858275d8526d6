//! What hooks tell the recorder of metrics, if the process has one.

use std::time::Duration;

use metrics::{Unit, counter, describe_counter, describe_histogram, histogram};

/// How long a run took.
pub const TIME: &str = "vmove_hook_run_seconds";
const RUNS: &str = "vmove_hook_runs_total";
const HELD_BACK: &str = "vmove_hook_held_back_total";
/// Why a hook may not have acted on an event.
const HELD_BACK_BY: [&str; 3] = ["loop", "at-most", "at-work"];
const DROPPED: &str = "vmove_hook_events_dropped_total";

/// Describes the metrics of hooks. Call it when the recorder is there.
pub fn describe() {
    describe_counter!(RUNS, "Runs of hooks that ended, by hook and outcome.");
    describe_counter!(
        HELD_BACK,
        "Events that a hook did not act on: too many, at work already, or of its own making."
    );
    describe_counter!(DROPPED, "Events that no hook heard of, because too many came at once.");
    describe_histogram!(TIME, Unit::Seconds, "How long runs of hooks took, with all attempts.");
    counter!(DROPPED).absolute(0);
}

/// Begins the counts of a hook, and of each way in which its runs may end, at zero: of a series that begins at 1, Prometheus sees no increase.
pub(crate) fn begin(hook: &str, outcomes: [&'static str; 4]) {
    let hook = || hook.to_owned();
    for outcome in outcomes {
        counter!(RUNS, "hook" => hook(), "outcome" => outcome).absolute(0);
    }
    for why in HELD_BACK_BY {
        counter!(HELD_BACK, "hook" => hook(), "why" => why).absolute(0);
    }
    // On the page, with zeros, as soon as it is registered.
    let _ = histogram!(TIME, "hook" => hook());
}

pub(crate) fn ended(hook: &str, outcome: &'static str, took: Duration) {
    counter!(RUNS, "hook" => hook.to_owned(), "outcome" => outcome).increment(1);
    histogram!(TIME, "hook" => hook.to_owned()).record(took.as_secs_f64());
}

pub(crate) fn held_back(hook: &str, why: &'static str) {
    counter!(HELD_BACK, "hook" => hook.to_owned(), "why" => why).increment(1);
}

pub(crate) fn dropped() {
    counter!(DROPPED).increment(1);
}
