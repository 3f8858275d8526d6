//! A fork as spans: one for all of it on each node, below that its phases, the pause of the parent, and each child until it ran.
//!
//! The trace's id follows from the fork's, so what all nodes tell is one trace: the spans of hosts are children of that of the parent's node.

use serde_json::Value;
use uuid::Uuid;
use vmove_types::fork_report::{ForkProgress, ForkReport};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::spans::{SpanId, Step, Trace, count, number, text};

/// Callers may choose any word as the id of a fork.
fn trace_of(id: &str) -> Uuid {
    Uuid::parse_str(id).unwrap_or_else(|_| Uuid::from_u128(xxh3_128(id.as_bytes())))
}

/// The span of the parent's node.
fn root_of(trace: Uuid) -> SpanId {
    trace.simple().to_string()[..16].to_owned()
}

/// That of a host: of both its node and the fork.
fn host_of(trace: Uuid, node: &str) -> SpanId {
    format!("{:016x}", xxh3_64(format!("{trace} {node}").as_bytes()))
}

/// What a fork that has ended was like on this node, for a collector. `None`: its begin is not known any more.
pub(super) fn of(ended: &ForkProgress, node: &str) -> Option<Value> {
    let id = trace_of(&ended.id);
    let mut trace = Trace::begin(id, ended.began_at.as_deref())?;
    let (name, span, parent) = match ended.ordered_by {
        None => ("fork", root_of(id), None),
        Some(_) => ("children", host_of(id, node), Some(root_of(id))),
    };
    let error = ended.error.as_ref().map(|error| error.message.as_str());
    let about = (name, ended.elapsed_ms);
    let root = trace.root(span, parent.as_deref(), about, &attributes(ended), error);
    trace.all_below(&root, &ended.phases, 0.0);
    if let Some(report) = &ended.report {
        if let Some(start_ms) = report.parent_stopped_ms {
            trace.below(&root, Step { name: "pause", start_ms, length_ms: report.parent_pause_ms });
        }
        children(&mut trace, &root, report, ended.elapsed_ms);
    }
    Some(trace.of_node(node))
}

/// Those of this node: hosts tell of their own.
fn children(trace: &mut Trace, root: &str, report: &ForkReport, elapsed_ms: f64) {
    let elsewhere = |node: &str| report.hosts.iter().any(|host| host.node == node);
    for child in report.children.iter().filter(|child| !elsewhere(&child.node)) {
        let length_ms = child.running_ms.unwrap_or(elapsed_ms);
        let step = Step { name: &format!("child {}", child.name), start_ms: 0.0, length_ms };
        match &child.error {
            Some(error) => trace.failed_below(root, step, error),
            None => drop(trace.below(root, step)),
        }
    }
}

fn attributes(ended: &ForkProgress) -> Vec<Value> {
    let asked = u64::try_from(ended.children).unwrap_or(u64::MAX);
    let mut all = vec![text("vmove.parent", &ended.parent), count("vmove.children", asked)];
    all.extend(ended.ordered_by.as_deref().map(|node| text("vmove.peer", node)));
    let Some(report) = &ended.report else {
        all.push(text("vmove.outcome", "failed"));
        return all;
    };
    all.push(text("vmove.outcome", "done"));
    let ran = report.children.iter().filter(|child| child.running_ms.is_some()).count();
    all.push(count("vmove.children_ran", u64::try_from(ran).unwrap_or(u64::MAX)));
    if ended.ordered_by.is_none() {
        all.push(number("vmove.parent_pause_ms", report.parent_pause_ms));
        all.push(number("vmove.parent_stood_still_ms", report.parent_stood_still_ms));
    }
    all
}

#[cfg(test)]
mod tests {
    use vmove_types::fork_report::{ChildReport, ForkFailure, HostReport};
    use vmove_types::report::PhaseTime;

    use super::super::spans::spans_in;
    use super::*;

    fn child(name: &str, node: &str, running_ms: Option<f64>) -> ChildReport {
        let error = running_ms.is_none().then(|| "no memory".to_owned());
        ChildReport {
            name: name.to_owned(),
            node: node.to_owned(),
            running_ms,
            error,
            ..ChildReport::default()
        }
    }

    fn fork(id: &str, children: Vec<ChildReport>) -> ForkProgress {
        let phases = vec![PhaseTime { name: "freeze".to_owned(), start_ms: 1.0, duration_ms: 4.0 }];
        ForkProgress {
            id: id.to_owned(),
            parent: "web".to_owned(),
            began_at: Some("2026-01-02T03:04:05.250Z".to_owned()),
            elapsed_ms: 80.0,
            children: children.len(),
            phases,
            report: Some(ForkReport { children, ..ForkReport::default() }),
            ..ForkProgress::default()
        }
    }

    fn names(spans: &[Value]) -> Vec<&str> {
        spans.iter().map(|span| span["name"].as_str().unwrap()).collect()
    }

    #[test]
    fn all_nodes_tell_one_trace_whatever_the_fork_is_called() {
        for id in ["0123456789abcdef0011223344556677", "sweep-7"] {
            let mut here = fork(id, vec![child("web-1", "a", Some(30.0)), child("web-2", "b", Some(50.0))]);
            if let Some(report) = &mut here.report {
                (report.parent_stopped_ms, report.parent_pause_ms) = (Some(2.0), 1.5);
                report.hosts = vec![HostReport { node: "b".to_owned(), ..HostReport::default() }];
            }
            let here = spans_in(&of(&here, "a").unwrap());
            assert_eq!(names(&here), ["fork", "freeze", "pause", "child web-1"], "b tells of its own");
            assert_eq!(here[2]["startTimeUnixNano"], "1767323045252000000", "2 ms after the begin");
            assert_eq!(here[2]["endTimeUnixNano"], "1767323045253500000", "1.5 ms long");
            let there = fork(id, vec![child("web-2", "b", Some(20.0)), child("web-3", "b", None)]);
            let there = ForkProgress { ordered_by: Some("a".to_owned()), ..there };
            let there = spans_in(&of(&there, "b").unwrap());
            assert_eq!(names(&there), ["children", "freeze", "child web-2", "child web-3"]);
            assert_eq!(there[0]["traceId"], here[0]["traceId"]);
            assert_eq!(there[0]["parentSpanId"], here[0]["spanId"]);
            assert_eq!(there[0]["spanId"].as_str().unwrap().len(), 16);
            assert_eq!(there[3]["status"]["message"], "no memory");
            assert_eq!(there[2]["endTimeUnixNano"], "1767323045270000000", "20 ms after the begin");
        }
    }

    #[test]
    fn one_that_failed_says_why() {
        let error = ForkFailure { code: "busy".to_owned(), message: "at work".to_owned(), exit_code: 1 };
        let failed = ForkProgress { report: None, error: Some(error), ..fork("f", Vec::new()) };
        let spans = spans_in(&of(&failed, "a").unwrap());
        assert_eq!(
            (&spans[0]["status"]["code"], &spans[0]["status"]["message"]),
            (&2.into(), &"at work".into())
        );
        assert!(of(&ForkProgress { began_at: None, ..failed }, "a").is_none());
    }
}
