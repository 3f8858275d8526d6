//! Answers of the bridge, for people.

use sched_bridge::blueprint::Decomposed;
use sched_bridge::model::{Assignment, Device, DeviceKind};
use sched_bridge::place::{Explanation, NodeVerdict, Score, Verdict};
use serde::Serialize;
use serde_json::Value;
use vmove_bridge_types::plan::{DeviceOutage, Plan, PlanState, PlanStep, StepState};
use vmove_bridge_types::problem::Code;
use vmove_bridge_types::requests::{
    LeaseInfo, LeaseList, NodeDetail, NodeList, NodeSummary, PlanList, StartedVm,
};

use crate::failure::Failure;
use crate::output::{End, fields, say, say_either, table};

/// A value as it is in JSON, without quotes.
pub fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(text)) => text,
        Ok(other) => other.to_string(),
        Err(_) => String::new(),
    }
}

pub fn nodes(list: &NodeList) -> String {
    let row = |node: &NodeSummary| {
        vec![
            node.name.clone(),
            node.state.to_string(),
            format!("{}/{}", node.gpus_free, node.gpus),
            format!("{}/{}", node.gpu_shares_free, node.gpu_shares),
            format!("{}/{}", node.cores_free, node.cores),
            format!("{}/{}", node.memory_free_mib, node.memory_mib),
            node.vms.to_string(),
            node.vms_without_lease.map_or_else(|| "-".to_owned(), |count| count.to_string()),
        ]
    };
    let rows: Vec<_> = list.nodes.iter().map(row).collect();
    table(&["NODE", "STATE", "GPUS", "GPU SHARES", "CORES", "MEMORY (MIB)", "VMS", "WITHOUT LEASE"], &rows)
}

/// One node: what it has, and what of it is held.
pub fn node(detail: &NodeDetail) -> String {
    let node = &detail.node;
    let or_none = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let numa = node.numa.iter().map(|numa| {
        let mut text = format!("{}: {} cores, {}", numa.id, numa.cores, numa.memory);
        for (pages, size) in [(numa.huge.pages_2m, "2 MiB"), (numa.huge.pages_1g, "1 GiB")] {
            if pages > 0 {
                text.push_str(&format!(", {pages} huge pages of {size}"));
            }
        }
        text
    });
    let without_lease = detail
        .not_listed
        .clone()
        .map_or_else(|| or_none(&detail.vms_without_lease), |reason| format!("not known: {reason}"));
    let mut out = fields(&[
        ("node", node.name.to_string()),
        ("state", node.state.to_string()),
        ("processors", format!("{} {}", node.cpu.arch, node.cpu.model)),
        ("NUMA nodes", numa.collect::<Vec<_>>().join("; ")),
        ("VMs", or_none(&detail.vms)),
        ("without lease", without_lease),
    ]);
    let row = |device: &Device| {
        let address = device.address.to_string();
        let held = if detail.held_devices.contains(&address) { "held" } else { "free" };
        let numa = device.numa.map_or_else(|| "-".to_owned(), |numa| numa.to_string());
        let model = if device.model.is_empty() { "-".to_owned() } else { device.model.to_string() };
        vec![address, word(&device.kind), device.id.to_string(), model, numa, held.to_owned()]
    };
    let rows: Vec<_> = node.devices.iter().map(row).collect();
    if !rows.is_empty() {
        out.push_str(&table(&["DEVICE", "KIND", "ID", "TYPE", "NUMA", "STATE"], &rows));
    }
    out
}

/// When a lease ends.
fn end(lease: &LeaseInfo) -> String {
    match lease.ends_in_ms {
        Some(ms) => format!("in {} s", ms.div_ceil(1000)),
        None => "with its VMs".to_owned(),
    }
}

/// VMs that run: one line each.
pub fn started(vms: &[StartedVm]) -> String {
    vms.iter().map(|own| format!("{} runs on {}\n", own.vm, own.node)).collect()
}

/// The parts of a blueprint: one line an environment.
pub fn parts(parts: &Decomposed) -> String {
    let mut rows = Vec::new();
    for (number, together) in parts.together.iter().enumerate() {
        for name in &together.environments {
            let group = parts.groups.iter().find(|group| group.environments.contains(name));
            let kind = group.map_or_else(String::new, |group| word(&group.kind));
            let adapter = group.and_then(|group| group.adapter.clone()).unwrap_or_else(|| "-".to_owned());
            let of_request = together.request.iter().flat_map(|request| &request.groups);
            let vms = of_request.filter(|group| group.name == *name).map(|group| group.count).sum::<u32>();
            let vms = if vms == 0 { "-".to_owned() } else { vms.to_string() };
            let networks = together.networks.iter().filter(|network| network.environments.contains(name));
            let networks: Vec<&str> = networks.map(|network| network.name.as_str()).collect();
            rows.push(vec![number.to_string(), name.clone(), kind, adapter, vms, networks.join(", ")]);
        }
    }
    table(&["TOGETHER", "ENVIRONMENT", "KIND", "ADAPTER", "VMS", "NETWORKS"], &rows)
}

pub fn leases(list: &LeaseList) -> String {
    let row = |lease: &LeaseInfo| {
        let gpus: usize = lease.held.iter().map(|held| held.assignment.count(DeviceKind::Gpu)).sum();
        vec![
            lease.id.to_string(),
            lease.holder.clone(),
            lease.cluster.to_string(),
            lease.held.len().to_string(),
            gpus.to_string(),
            end(lease),
        ]
    };
    let rows: Vec<_> = list.leases.iter().map(row).collect();
    table(&["LEASE", "HOLDER", "CLUSTER", "VMS", "GPUS", "ENDS"], &rows)
}

/// A lease: one line a VM.
pub fn lease(lease: &LeaseInfo) -> String {
    let head = format!("lease {} of {}, cluster {}\n", lease.id, lease.holder, lease.cluster);
    let end = match lease.ends_in_ms {
        Some(_) => {
            format!("ends {}, unless `vmove lease keep {}` runs or a VM of it does\n", end(lease), lease.id)
        }
        None => "kept as long as a VM of it runs\n".to_owned(),
    };
    head + &end + &assignment_table(lease.held.iter().map(|held| &held.assignment))
}

/// One line a VM.
pub fn assignments(list: &[Assignment]) -> String {
    assignment_table(list.iter())
}

fn assignment_table<'a>(list: impl Iterator<Item = &'a Assignment>) -> String {
    let row = |assignment: &Assignment| {
        let devices = assignment.devices.iter().map(|d| format!("{} {}", word(&d.kind), d.address));
        let numa = assignment.shares.iter().map(|s| format!("{}: {} cores", s.numa, s.cores));
        vec![
            assignment.vm.to_string(),
            assignment.node.to_string(),
            numa.collect::<Vec<_>>().join(", "),
            devices.collect::<Vec<_>>().join(", "),
        ]
    };
    let rows: Vec<_> = list.map(row).collect();
    table(&["VM", "NODE", "NUMA", "DEVICES"], &rows)
}

pub fn plan(plan: &Plan) -> String {
    let row = |step: &PlanStep| {
        let state = match &step.state {
            StepState::Failed { reason } => format!("failed: {reason}"),
            state => state_word(state),
        };
        vec![
            step.vm.to_string(),
            step.from.to_string(),
            step.to.node.to_string(),
            format!("{} MiB", step.memory_mib),
            step.group.map_or_else(|| "-".to_owned(), |group| group.to_string()),
            outages(step),
            state,
        ]
    };
    let state = match &plan.state {
        PlanState::Stopped { reason } => stopped_at(plan, reason),
        state => state_word(state),
    };
    let rows: Vec<_> = plan.steps.iter().map(row).collect();
    let notes: String = plan.notes.iter().map(|note| format!("note: {note}\n")).collect();
    format!(
        "plan {}: {}, {state}; hops {} -> {}\n{}{notes}",
        plan.id,
        plan.purpose,
        plan.hops.before,
        plan.hops.after,
        table(&["VM", "FROM", "TO", "MEMORY", "BARRIER", "WITHOUT DEVICES", "STATE"], &rows)
    )
}

/// Where a plan has stopped. Why is in the rows of the steps, if it was at some.
fn stopped_at(plan: &Plan, reason: &str) -> String {
    let failed: Vec<String> = failed(plan).map(|(at, _, _)| at.to_string()).collect();
    match &failed[..] {
        [] => format!("stopped: {reason}"),
        [step] => format!("stopped at step {step}"),
        steps => format!("stopped at steps {}", steps.join(", ")),
    }
}

/// Steps that have failed: number, VM and why.
fn failed(plan: &Plan) -> impl Iterator<Item = (usize, &PlanStep, &String)> {
    plan.steps.iter().enumerate().filter_map(|(at, step)| match &step.state {
        StepState::Failed { reason } => Some((at + 1, step, reason)),
        _ => None,
    })
}

/// Says how a plan was run. One that has stopped is a failure, of which programs get one object with the plan in it.
pub fn ran(plan: &Plan, json: bool) -> Result<(), End> {
    let PlanState::Stopped { reason } = &plan.state else { return say_either(plan, json, self::plan) };
    let reason = reason.replace("`vmove plan run`", &format!("`vmove plan run {}`", plan.id));
    if json {
        let mut failure = Failure::new(Code::Busy, format!("the plan has stopped: {reason}"));
        failure.details = serde_json::to_value(plan).ok();
        return Err(failure.into());
    }
    say(&self::plan(plan))?;
    Err(Failure::new(Code::Busy, why_stopped(plan, &reason)).into())
}

/// For somebody who has the table above it, which says why a step has failed.
fn why_stopped(plan: &Plan, reason: &str) -> String {
    if !failed(plan).any(|(_, _, why)| reason.contains(why)) {
        return format!("the plan has stopped: {reason}");
    }
    let steps: Vec<String> = failed(plan).map(|(at, step, _)| format!("{at} ({})", step.vm)).collect();
    format!(
        "the plan has stopped at step {}: later steps were not begun; see why in its row. `vmove plan run {}` continues the plan",
        steps.join(", "),
        plan.id
    )
}

/// For how long it is predicted to be without its devices.
fn outages(step: &PlanStep) -> String {
    let outage =
        |outage: &DeviceOutage| format!("{} {:.1} s", outage.device, outage.outage_ms as f64 / 1000.0);
    if step.outages.is_empty() {
        "-".to_owned()
    } else {
        step.outages.iter().map(outage).collect::<Vec<_>>().join(", ")
    }
}

/// The word by which JSON tells one state from another.
fn state_word(state: &impl Serialize) -> String {
    serde_json::to_value(state).map(|state| word(&state["is"])).unwrap_or_default()
}

pub fn plans(list: &PlanList) -> String {
    let row = |plan: &Plan| {
        let done = plan.steps.iter().filter(|step| step.is_done()).count();
        vec![
            plan.id.to_string(),
            plan.purpose.clone(),
            format!("{done}/{}", plan.steps.len()),
            state_word(&plan.state),
        ]
    };
    let rows: Vec<_> = list.plans.iter().map(row).collect();
    table(&["PLAN", "FOR", "STEPS", "STATE"], &rows)
}

/// The verdicts of an explanation.
pub fn explanation(explanation: &Explanation) -> String {
    let row = |node: &NodeVerdict| {
        let (verdict, why) = match &node.verdict {
            Verdict::Chosen { vms } => {
                let names: Vec<&str> = vms.iter().map(|vm| vm.as_str()).collect();
                ("chosen", format!("for {}", names.join(", ")))
            }
            Verdict::Rejected { reasons } => ("rejected", reasons.join("; ")),
            Verdict::Possible { reason, .. } => ("possible", reason.clone()),
            _ => ("-", "-".to_owned()),
        };
        vec![node.node.to_string(), verdict.to_owned(), why]
    };
    let rows: Vec<_> = explanation.nodes.iter().map(row).collect();
    table(&["NODE", "VERDICT", "WHY"], &rows)
}

/// A score, on one line.
pub fn score(score: &Score) -> String {
    let Ok(Value::Object(fields)) = serde_json::to_value(score) else { return String::new() };
    let fields: Vec<String> = fields.iter().map(|(key, value)| format!("{key} {value}")).collect();
    format!("score: {}\n", fields.join(", "))
}

#[cfg(test)]
mod tests {
    use sched_bridge::model::{NodeName, VmName};

    use super::*;

    #[test]
    fn a_plan_that_stopped_says_why() {
        let text = serde_json::json!({
            "id": "p1", "purpose": "evacuate n1", "made_wall_ms": 0, "hops": { "before": 4, "after": 2 },
            "state": {
                "is": "stopped",
                "reason": "step 1 (VM web-0): no room; later steps were not begun. `vmove plan run` continues the plan"
            },
            "steps": [{
                "vm": "web-0", "from": "n1", "to": { "vm": "web-0", "node": "n2" }, "memory_mib": 64,
                "state": { "is": "failed", "reason": "no room" }
            }]
        });
        let stopped: Plan = serde_json::from_value(text).unwrap();
        let text = plan(&stopped);
        assert!(text.starts_with("plan p1: evacuate n1, stopped at step 1; hops 4 -> 2\n"), "{text}");
        assert!(
            text.ends_with("web-0  n1    n2  64 MiB  -        -                failed: no room\n"),
            "{text}"
        );
        let said = |plan: &Plan, json| match ran(plan, json) {
            Err(End::Failed(failure)) => failure,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            said(&stopped, false).message,
            "the plan has stopped at step 1 (web-0): later steps were not begun; see why in its row. `vmove plan run p1` continues the plan"
        );
        // Who has no table is told why.
        let failure = said(&stopped, true);
        assert_eq!(
            failure.message,
            "the plan has stopped: step 1 (VM web-0): no room; later steps were not begun. `vmove plan run p1` continues the plan"
        );
        assert_eq!(failure.details.unwrap()["steps"][0]["state"]["reason"], "no room");
        // Why is in no row: the node is not drained, or the store did not answer.
        let not_drained = Plan { steps: Vec::new(), ..stopped.clone() };
        for json in [false, true] {
            assert_eq!(said(&not_drained, json).message.matches("no room").count(), 1);
        }
        assert!(plan(&not_drained).contains(", stopped: step 1 (VM web-0): no room"));
        assert!(plans(&PlanList { plans: vec![stopped] }).ends_with("p1    evacuate n1  0/1    stopped\n"));
    }

    #[test]
    fn every_verdict_has_its_reason() {
        let node = |name: &str, verdict| NodeVerdict { node: NodeName::new(name).unwrap(), verdict };
        let text = explanation(&Explanation {
            score: None,
            nodes: vec![
                node(
                    "n1",
                    Verdict::Chosen { vms: vec![VmName::new("a").unwrap(), VmName::new("b").unwrap()] },
                ),
                node("n2", Verdict::Possible { vms: 1, reason: "not needed".to_owned() }),
                node("n3", Verdict::Rejected { reasons: vec!["no GPU".to_owned(), "drained".to_owned()] }),
            ],
        });
        for line in
            ["n1    chosen    for a, b", "n2    possible  not needed", "n3    rejected  no GPU; drained"]
        {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
