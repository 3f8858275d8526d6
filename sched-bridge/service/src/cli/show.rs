//! Answers, for people.

use serde_json::Value;

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

/// Columns as wide as their widest cell.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let head: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
    let mut out = String::new();
    for row in std::iter::once(&head).chain(rows) {
        let cells: Vec<String> =
            widths.iter().zip(row).map(|(width, cell)| format!("{cell:<width$}")).collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
    out
}

fn rows<'a>(list: &'a Value, row: impl Fn(&'a Value) -> Vec<String>) -> Vec<Vec<String>> {
    list.as_array().map(|list| list.iter().map(row).collect()).unwrap_or_default()
}

/// JSON over many lines.
pub fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// `GET /v1/nodes`.
pub fn nodes(answer: &Value) -> String {
    let of = |free: &Value, all: &Value| format!("{}/{}", text(free), text(all));
    let row = |n: &Value| {
        vec![
            text(&n["name"]),
            text(&n["state"]),
            of(&n["gpus_free"], &n["gpus"]),
            of(&n["cores_free"], &n["cores"]),
            of(&n["memory_free_mib"], &n["memory_mib"]),
            text(&n["vms"]),
        ]
    };
    table(&["NODE", "STATE", "GPUS", "CORES", "MEMORY (MIB)", "VMS"], &rows(&answer["nodes"], row))
}

/// `GET /v1/leases`.
pub fn leases(answer: &Value) -> String {
    let row = |l: &Value| {
        let held = l["held"].as_array().map_or(0, Vec::len);
        let gpus: usize = l["held"].as_array().map_or(0, |held| held.iter().map(gpus).sum());
        vec![text(&l["id"]), text(&l["holder"]), text(&l["cluster"]), held.to_string(), gpus.to_string()]
    };
    table(&["LEASE", "HOLDER", "CLUSTER", "VMS", "GPUS"], &rows(&answer["leases"], row))
}

fn gpus(held: &Value) -> usize {
    held["devices"].as_array().map_or(0, |devices| devices.iter().filter(|d| d["kind"] == "gpu").count())
}

/// A lease: one line a VM.
pub fn lease(lease: &Value) -> String {
    let head = format!(
        "lease {} of {}, cluster {}\n",
        text(&lease["id"]),
        text(&lease["holder"]),
        text(&lease["cluster"])
    );
    head + &assignments(&lease["held"])
}

/// One line a VM.
pub fn assignments(list: &Value) -> String {
    let row = |a: &Value| {
        let devices = rows(&a["devices"], |d| vec![text(&d["kind"]), text(&d["address"])]);
        let devices: Vec<String> = devices.iter().map(|d| d.join(" ")).collect();
        let numa = rows(&a["shares"], |s| vec![format!("{}: {} cores", text(&s["numa"]), text(&s["cores"]))])
            .concat();
        vec![text(&a["vm"]), text(&a["node"]), numa.join(", "), devices.join(", ")]
    };
    table(&["VM", "NODE", "NUMA", "DEVICES"], &rows(list, row))
}

/// A plan.
pub fn plan(plan: &Value) -> String {
    let row = |s: &Value| {
        let state = &s["state"];
        let more =
            if state["reason"].is_string() { format!(": {}", text(&state["reason"])) } else { String::new() };
        vec![
            text(&s["vm"]),
            text(&s["from"]),
            text(&s["to"]["node"]),
            format!("{} MiB", text(&s["memory_mib"])),
            format!("{}{more}", text(&state["is"])),
        ]
    };
    let (state, hops) = (&plan["state"], &plan["hops"]);
    let why =
        if state["reason"].is_string() { format!(": {}", text(&state["reason"])) } else { String::new() };
    format!(
        "plan {}: {}, {}{why}; hops {} -> {}\n{}",
        text(&plan["id"]),
        text(&plan["purpose"]),
        text(&state["is"]),
        text(&hops["before"]),
        text(&hops["after"]),
        table(&["VM", "FROM", "TO", "MEMORY", "STATE"], &rows(&plan["steps"], row))
    )
}

/// `GET /v1/plans`.
pub fn plans(answer: &Value) -> String {
    let row = |p: &Value| {
        let steps = p["steps"].as_array().map_or(&[][..], |s| s);
        let done = steps.iter().filter(|s| s["state"]["is"] == "done").count();
        vec![text(&p["id"]), text(&p["purpose"]), format!("{done}/{}", steps.len()), text(&p["state"]["is"])]
    };
    table(&["PLAN", "FOR", "STEPS", "STATE"], &rows(&answer["plans"], row))
}

/// The verdicts of an explanation, and the score.
pub fn explanation(explanation: &Value) -> String {
    let row = |n: &Value| {
        let why = match n["verdict"].as_str() {
            Some("chosen") => format!("for {}", rows(&n["vms"], |v| vec![text(v)]).concat().join(", ")),
            Some("rejected") => rows(&n["reasons"], |r| vec![text(r)]).concat().join("; "),
            _ => text(&n["reason"]),
        };
        vec![text(&n["node"]), text(&n["verdict"]), why]
    };
    table(&["NODE", "VERDICT", "WHY"], &rows(&explanation["nodes"], row))
}

/// A score, on one line.
pub fn score(score: &Value) -> String {
    let Some(fields) = score.as_object() else { return String::new() };
    let fields: Vec<String> = fields.iter().map(|(key, value)| format!("{key} {value}")).collect();
    format!("score: {}\n", fields.join(", "))
}
