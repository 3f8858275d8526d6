//! A migration as spans: one for all of it, below that its phases, and below `switchover` the steps of the pause.
//!
//! The id of the migration is that of the trace, so what both nodes tell is one trace: the span of the destination is a child of that of the source.

use serde_json::Value;
use uuid::Uuid;
use vmove_types::progress::{Outcome, Progress, Role};
use vmove_types::report::Report;

use super::spans::{SpanId, Step, Trace, count, number, text};

/// The span of one side: each half of the migration's id.
fn span_of(id: Uuid, role: Role) -> SpanId {
    let all = id.simple().to_string();
    match role {
        Role::Source => all[..16].to_owned(),
        Role::Destination => all[16..].to_owned(),
    }
}

/// What a migration that has ended was like on this node, for a collector. `None`: its begin is not known any more.
pub(super) fn of(ended: &Progress, node: &str) -> Option<Value> {
    let id = Uuid::parse_str(&ended.id).ok()?;
    let mut trace = Trace::begin(id, ended.began_at.as_deref())?;
    let (total_ms, phases, pause) = match &ended.outcome {
        Outcome::Done { report } => (report.total_ms, &report.phases, report.pause.as_slice()),
        _ => (ended.elapsed_ms, &ended.phases, [].as_slice()),
    };
    let (name, parent) = match ended.role {
        Role::Source => ("migrate", None),
        Role::Destination => ("receive", Some(span_of(id, Role::Source))),
    };
    let error = error(&ended.outcome);
    let span = span_of(id, ended.role);
    let root = trace.root(span, parent.as_deref(), (name, total_ms), &attributes(ended), error.as_deref());
    trace.all_below(&root, phases, 0.0);
    // The guest is stopped when this phase begins.
    if let Some(switchover) = phases.iter().find(|phase| phase.name == "switchover")
        && let Some(last) = pause.last()
    {
        let length_ms = last.start_ms + last.duration_ms;
        let step = Step { name: "pause", start_ms: switchover.start_ms, length_ms };
        let pause_span = trace.below(&root, step);
        trace.all_below(&pause_span, pause, switchover.start_ms);
    }
    Some(trace.of_node(node))
}

fn attributes(ended: &Progress) -> Vec<Value> {
    let mut all = vec![text("vmove.vm", &ended.vm), text("vmove.peer", &ended.peer)];
    all.extend(ended.mode.as_deref().map(|mode| text("vmove.mode", mode)));
    all.extend(ended.group.as_deref().map(|group| text("vmove.group", group)));
    match &ended.outcome {
        Outcome::Done { report } => all.extend(of_report(report)),
        Outcome::Failed { cancelled: true, .. } => all.push(text("vmove.outcome", "cancelled")),
        Outcome::Failed { .. } => all.push(text("vmove.outcome", "failed")),
        _ => all.push(text("vmove.outcome", "refused")),
    }
    all
}

fn of_report(report: &Report) -> Vec<Value> {
    vec![
        text("vmove.outcome", "done"),
        number("vmove.downtime_ms", report.downtime_ms),
        count("vmove.bytes_sent", report.bytes_sent),
        count("vmove.faults", report.faults.count),
        number("vmove.fault_p99_us", report.faults.p99_us),
        count("vmove.recoveries", report.recoveries.into()),
    ]
}

fn error(outcome: &Outcome) -> Option<String> {
    match outcome {
        Outcome::Failed { error, .. } => Some(error.clone()),
        Outcome::Refused { blockers } => {
            let why: Vec<&str> = blockers.iter().map(|blocker| blocker.message.as_str()).collect();
            Some(why.join("; "))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vmove_types::progress::GuestPlace;
    use vmove_types::report::PhaseTime;

    use super::super::spans::spans_in;
    use super::*;

    const ID: &str = "0123456789abcdef0011223344556677";

    fn ended(role: Role, outcome: Outcome) -> Progress {
        let id = Uuid::parse_str(ID).unwrap().to_string();
        let began_at = Some("2026-01-02T03:04:05.250Z".to_owned());
        Progress { began_at, elapsed_ms: 40.0, outcome, ..Progress::begun(id, "web", role, "b") }
    }

    fn phase(name: &str, start_ms: f64, duration_ms: f64) -> PhaseTime {
        PhaseTime { name: name.to_owned(), start_ms, duration_ms }
    }

    fn spans(progress: &Progress) -> Vec<Value> {
        spans_in(&of(progress, "a").unwrap())
    }

    #[test]
    fn both_sides_tell_one_trace_with_phases_and_the_steps_of_the_pause() {
        let report = Report {
            total_ms: 100.0,
            phases: vec![phase("check", 0.0, 10.0), phase("switchover", 10.0, 5.0)],
            pause: vec![phase("drain", 0.0, 1.0), phase("load", 1.0, 3.0)],
            ..Report::default()
        };
        let source = spans(&ended(Role::Source, Outcome::Done { report: Box::new(report) }));
        let names: Vec<_> = source.iter().map(|span| span["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["migrate", "check", "switchover", "pause", "drain", "load"]);
        assert!(source.iter().all(|span| span["traceId"] == ID));
        let (root, pause, load) = (&source[0], &source[3], &source[5]);
        assert_eq!((&root["spanId"], root.get("parentSpanId")), (&json!("0123456789abcdef"), None));
        assert_eq!(pause["parentSpanId"], root["spanId"]);
        assert_eq!(load["parentSpanId"], pause["spanId"]);
        // 10 ms and 1 ms after the begin.
        assert_eq!(load["startTimeUnixNano"], "1767323045261000000");
        assert_eq!(load["endTimeUnixNano"], "1767323045264000000");
        assert_eq!(root["status"], json!({ "code": 1 }));

        let failed =
            Outcome::Failed { error: "lost".to_owned(), guest: GuestPlace::Source, cancelled: false };
        let destination = spans(&ended(Role::Destination, failed));
        assert_eq!(destination[0]["traceId"], ID);
        assert_eq!(destination[0]["parentSpanId"], root["spanId"]);
        assert_eq!(destination[0]["status"], json!({ "code": 2, "message": "lost" }));
        assert_eq!(destination[0]["endTimeUnixNano"], "1767323045290000000");
    }

    #[test]
    fn what_has_no_begin_has_no_trace() {
        let unknown =
            Progress { began_at: None, ..ended(Role::Source, Outcome::Refused { blockers: Vec::new() }) };
        assert!(of(&unknown, "a").is_none());
    }
}
