//! What is told of a fork.

use vmove_types::fork_report::{ChildReport, ForkProgress, ForkReport, HostProgress, HostReport};
use vmove_types::report::PhaseTime;
use vmove_types::units::{format_bytes, format_ms};

use super::account::{Account, STOOD_STILL, Table, TimeLine};
use super::of_migration::fault_cells;

/// So many children are drawn: the slowest.
const DRAWN: usize = 20;

/// As far as the daemon tells.
pub fn account(progress: &ForkProgress) -> Account {
    let account = progress.report.as_ref().map_or_else(|| of_unfinished(progress), of_report);
    let standing = match &progress.error {
        Some(error) => format!("{}: {}", progress.phase, error.message),
        None if progress.is_end() => {
            format!("{}, {} of {} children run", progress.phase, progress.running, progress.children)
        }
        None => format!(
            "still at work: {}, {} of {} children run",
            progress.phase, progress.running, progress.children
        ),
    };
    let title = format!("{:?}, fork {}", progress.parent, progress.id);
    let time_lines = phases(progress).into_iter().chain(account.time_lines).collect();
    Account { title, standing, bad: progress.error.is_some(), time_lines, ..account }.clean()
}

/// One after the other. Some daemons did not tell them.
fn phases(p: &ForkProgress) -> Option<TimeLine> {
    let mut steps = p.phases.clone();
    if !p.is_end() {
        let since = steps.last().map_or(0.0, |last| last.start_ms + last.duration_ms);
        steps.push(step(&p.phase, since, (p.elapsed_ms - since).max(0.0)));
    }
    let note = if p.is_end() { "one after the other" } else { "one after the other, until now" };
    let line = TimeLine { title: "Phases".to_owned(), steps, note: note.to_owned() };
    Some(line).filter(|line| !line.steps.is_empty())
}

fn fact(name: &str, value: String) -> (String, String) {
    (name.to_owned(), value)
}

fn step(name: &str, start_ms: f64, duration_ms: f64) -> PhaseTime {
    PhaseTime { name: name.to_owned(), start_ms, duration_ms }
}

fn of_unfinished(p: &ForkProgress) -> Account {
    let facts = vec![
        fact("time", format_ms(p.elapsed_ms)),
        fact("children", format!("{} prepared, {} loaded, {} running", p.prepared, p.loaded, p.running)),
    ];
    let row = |host: &HostProgress| {
        vec![
            host.node.clone(),
            host.phase.clone(),
            format!("{}/{}", host.running, host.children),
            format!("{}/{}", host.chunks.saturating_sub(host.missing), host.chunks),
        ]
    };
    let hosts = Table {
        title: "Other hosts".to_owned(),
        head: vec!["NODE", "PHASE", "CHILDREN", "CHUNKS"],
        rows: p.hosts.iter().map(row).collect(),
    };
    Account {
        facts,
        tables: Some(hosts).filter(|table| !table.rows.is_empty()).into_iter().collect(),
        ..Account::default()
    }
}

fn of_report(r: &ForkReport) -> Account {
    let running = r.children.iter().filter(|child| child.running_ms.is_some()).count();
    let mut facts = vec![
        fact(
            "children",
            format!("{running} of {} ran, all after {}", r.children.len(), format_ms(r.all_running_ms)),
        ),
        fact("complete", format!("after {}", format_ms(r.complete_ms))),
        fact(
            "stood still",
            format!(
                "{} of the parent's time, {} at the freeze",
                format_ms(r.parent_stood_still_ms),
                format_ms(r.parent_pause_ms)
            ),
        ),
    ];
    if !r.fabric.is_empty() {
        let why = if r.fabric_reason.is_empty() { String::new() } else { format!(" ({})", r.fabric_reason) };
        facts.push(fact("fabric", format!("{}{why}", r.fabric)));
    }
    facts.extend(r.distribution.iter().map(|d| {
        fact("distributed", format!("by {}: {} left this node", d.way, format_bytes(d.root_bytes)))
    }));
    facts.extend(r.freeze.iter().map(|freeze| {
        fact(
            "frozen",
            format!(
                "{}{}",
                freeze.way,
                freeze.why.as_ref().map(|why| format!(", since {why}")).unwrap_or_default()
            ),
        )
    }));
    facts.extend(r.warnings.iter().map(|warning| fact("warning", warning.clone())));
    let lines = [until(r), pause(r)];
    let tables = [children(r), hosts(r), faults(r)];
    Account {
        facts,
        time_lines: lines.into_iter().filter(|line| !line.steps.is_empty()).collect(),
        began_to_run: began_to_run(r),
        stood_still: stood_still(r),
        bytes: bytes(r),
        tables: tables.into_iter().filter(|table| !table.rows.is_empty()).collect(),
        ..Account::default()
    }
}

/// When children ran, the earliest first.
fn began_to_run(r: &ForkReport) -> Vec<f64> {
    let mut all: Vec<f64> = r.children.iter().filter_map(|child| child.running_ms).collect();
    all.sort_by(f64::total_cmp);
    all
}

/// From the parent's STOP to its RESUME. Some daemons did not tell when that was.
fn stood_still(r: &ForkReport) -> Option<(f64, f64)> {
    let begin = r.parent_stopped_ms?;
    Some((begin, begin + r.parent_pause_ms))
}

/// From the request until something was so.
fn until(r: &ForkReport) -> TimeLine {
    let still = stood_still(r).map(|(begin, end)| step(STOOD_STILL, begin, end - begin));
    let mut steps: Vec<PhaseTime> = still.into_iter().collect();
    let mut add = |name: String, at: Option<f64>| steps.extend(at.map(|at| step(&name, 0.0, at)));
    add("checksums made".to_owned(), r.distribution.as_ref().map(|d| d.prepared_ms));
    add("the parent ran on".to_owned(), r.ran_on_ms);
    for host in &r.hosts {
        add(format!("template at {}", host.node), host.template_ms);
    }
    let mut children: Vec<_> =
        r.children.iter().filter_map(|child| Some((child.running_ms?, &child.name))).collect();
    children.sort_by(|a, b| b.0.total_cmp(&a.0));
    let left_out = children.len().saturating_sub(DRAWN);
    children.truncate(DRAWN);
    for (at, name) in children.iter().rev() {
        add(format!("{name} ran"), Some(*at));
    }
    add("complete".to_owned(), Some(r.complete_ms));
    let note =
        if left_out > 0 { format!("; {left_out} faster children are not drawn") } else { String::new() };
    let each = if r.parent_stopped_ms.is_some() { "each of the others" } else { "each" };
    TimeLine {
        title: "From the request".to_owned(),
        steps,
        note: format!("{each} from the request on{note}"),
    }
}

/// What the parent's standing still consists of.
fn pause(r: &ForkReport) -> TimeLine {
    let own = |own: &vmove_types::fork_report::OwnMemory| own.stood_still_ms();
    let parts = [
        ("memory of its own before", r.own_memory_before.as_ref().map_or(0.0, own)),
        ("freeze", r.parent_pause_ms),
        ("memory of its own after", r.own_memory.as_ref().map_or(0.0, own)),
    ];
    let mut at = 0.0;
    let mut steps = Vec::new();
    for (name, ms) in parts.into_iter().filter(|(_, ms)| *ms > 0.0) {
        steps.push(step(name, at, ms));
        at += ms;
    }
    let note = "one after the other, with the parent's work between them; at most".to_owned();
    TimeLine { title: "Pause of the parent".to_owned(), steps, note }
}

fn bytes(r: &ForkReport) -> Vec<(String, u64)> {
    let hosts = |of: fn(&HostReport) -> u64| r.hosts.iter().map(of).sum::<u64>();
    let all = [
        ("kept of the memory", r.freeze.as_ref().map_or(0, |freeze| freeze.kept_bytes)),
        ("copied from the template", r.own_memory.map_or(0, |own| own.template_bytes)),
        ("copied, written since", r.own_memory.map_or(0, |own| own.own_bytes)),
        ("read from this node", hosts(|host| host.from_root_bytes)),
        ("read from other hosts", hosts(|host| host.from_hosts_bytes)),
        ("came by multicast", hosts(|host| host.multicast_bytes)),
    ];
    all.into_iter().filter(|(_, bytes)| *bytes > 0).map(|(name, bytes)| (name.to_owned(), bytes)).collect()
}

fn children(r: &ForkReport) -> Table {
    let row = |child: &ChildReport| {
        let state = match (&child.error, child.running_ms) {
            (Some(error), _) => format!("failed: {error}"),
            (None, Some(at)) => format!("ran after {}", format_ms(at)),
            (None, None) => "did not run".to_owned(),
        };
        let prepared = if child.warm { "yes" } else { "no" }.to_owned();
        vec![child.name.clone(), state, child.node.clone(), prepared, child.network.clone()]
    };
    Table {
        title: "Children".to_owned(),
        head: vec!["CHILD", "STATE", "NODE", "PREPARED", "NETWORK"],
        rows: r.children.iter().map(row).collect(),
    }
}

fn hosts(r: &ForkReport) -> Table {
    let row = |host: &HostReport| {
        let state = match (&host.error, host.template_ms) {
            (Some(error), _) => format!("failed: {error}"),
            (None, Some(at)) => format!("template after {}", format_ms(at)),
            (None, None) => "no template".to_owned(),
        };
        vec![
            host.node.clone(),
            format!("{}/{}", host.running, host.children),
            state,
            format_bytes(host.multicast_bytes),
            format_bytes(host.from_root_bytes),
            format_bytes(host.from_hosts_bytes),
            host.repaired.to_string(),
        ]
    };
    Table {
        title: "Other hosts".to_owned(),
        head: vec!["NODE", "CHILDREN", "STATE", "MULTICAST", "FROM PARENT'S NODE", "FROM OTHERS", "REPAIRED"],
        rows: r.hosts.iter().map(row).collect(),
    }
}

fn faults(r: &ForkReport) -> Table {
    let row = |host: &HostReport| {
        let faults = host.faults.filter(|faults| faults.count > 0)?;
        let mut cells = vec![host.node.clone()];
        cells.extend(fault_cells(&faults));
        Some(cells)
    };
    Table {
        title: "Page faults before the whole template was there".to_owned(),
        head: vec!["NODE", "FAULTS", "FETCHED", "P50", "P99", "P99.9", "LONGEST"],
        rows: r.hosts.iter().filter_map(row).collect(),
    }
}
