//! What forks tell the recorder of metrics, if the process has one.

use metrics::{Unit, counter, describe_counter, describe_histogram, histogram};
use vmove_types::fork_report::ForkReport;

use super::error::ForkError;

/// How long the parent stood still.
pub const PARENT_PAUSE: &str = "vmove_fork_parent_pause_seconds";
/// How long a request took until all children ran.
pub const ALL_RUNNING: &str = "vmove_fork_all_running_seconds";
const FORKS: &str = "vmove_forks_total";
const CHILDREN: &str = "vmove_fork_children_total";

/// Describes the metrics of forks, and begins their counts at zero. Call it when the recorder is there.
pub fn describe() {
    describe_counter!(FORKS, "Forks requested from this node that ended, by outcome.");
    describe_counter!(CHILDREN, "Children of these forks on all nodes, by whether they ran.");
    describe_histogram!(
        PARENT_PAUSE,
        Unit::Seconds,
        "How long the parent of a fork stood still, in all steps; not of templates."
    );
    describe_histogram!(ALL_RUNNING, Unit::Seconds, "From the request for a fork until its last child ran.");
    for outcome in ["done", "failed"] {
        counter!(FORKS, "outcome" => outcome).absolute(0);
    }
    for outcome in ["running", "failed"] {
        counter!(CHILDREN, "outcome" => outcome).absolute(0);
    }
    // On the page, with zeros, as soon as they are registered.
    let _ = (histogram!(PARENT_PAUSE), histogram!(ALL_RUNNING));
}

/// Counts a fork of so many children that has ended.
pub(super) fn count(ended: Result<&ForkReport, &ForkError>, children: usize) {
    let Ok(report) = ended else {
        counter!(FORKS, "outcome" => "failed").increment(1);
        return;
    };
    // Of a host that failed as a whole, no child is named.
    let running = report.children.iter().filter(|child| child.error.is_none()).count();
    counter!(FORKS, "outcome" => "done").increment(1);
    counter!(CHILDREN, "outcome" => "running").increment(running as u64);
    counter!(CHILDREN, "outcome" => "failed").increment(children.saturating_sub(running) as u64);
    if report.freeze.is_some() {
        histogram!(PARENT_PAUSE).record(report.parent_stood_still_ms / 1e3);
    }
    if running > 0 {
        histogram!(ALL_RUNNING).record(report.all_running_ms / 1e3);
    }
}
