//! Migrations by vmove and by QEMU itself between the same two hosts, in turns, as a table.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::check::{figure, perftest};
use crate::host::address;
use crate::moves::{Moves, Parts, expect};
use crate::supervisor::Lab;

/// Where QEMU listens for its own migrations.
const PORT: u16 = 4444;
const FABRICS: [&str; 2] = ["verbs", "tcp"];
const MODES: [&str; 3] = ["postcopy", "hybrid", "precopy"];
/// QEMU's own: protocol and mode of `tests/lab/host/qemu-migrate`, and what the table calls it.
const OWN: [(&str, &str, &str); 5] = [
    ("rdma", "precopy", "QEMU pre-copy, rdma"),
    ("rdma", "pin", "QEMU pre-copy, rdma with rdma-pin-all"),
    ("tcp", "precopy", "QEMU pre-copy, tcp"),
    ("tcp", "multifd", "QEMU pre-copy, tcp with multifd"),
    ("tcp", "postcopy", "QEMU post-copy, tcp"),
];

/// What one migration cost.
#[derive(Debug, Clone, Copy)]
struct Cost {
    total_ms: f64,
    /// Start of the destination's QEMU until it listens for the guest's state: with vmove a part of the total.
    start_ms: f64,
    downtime_ms: f64,
    mib_sent: f64,
    source_cpu_ms: f64,
}

impl Cost {
    fn new(report: &Value, start_ms: f64, source_cpu_ms: f64) -> Result<Self> {
        let number = |key: &str| report[key].as_f64().with_context(|| format!("no {key} in {report}"));
        let mib_sent = number("bytes_sent")? / f64::from(1 << 20);
        Ok(Self {
            total_ms: number("total_ms")?,
            start_ms,
            downtime_ms: number("downtime_ms")?,
            mib_sent,
            source_cpu_ms,
        })
    }
}

/// Measures those whose row's name contains one of the words, or all if there are none, and prints a table in Markdown.
///
/// # Errors
/// Something did not run or ended otherwise than it should; the message has its words.
pub fn run(lab: &Lab, parts: &Parts, rounds: usize, only: &[String]) -> Result<()> {
    let moves = Moves::new(lab, parts);
    let names: Vec<String> = FABRICS
        .into_iter()
        .flat_map(|fabric| MODES.map(|mode| row(mode, fabric)))
        .chain(OWN.map(|own| own.2.to_owned()))
        .collect();
    if let Some(word) = only.iter().find(|word| !names.iter().any(|name| name.contains(word.as_str()))) {
        bail!("Expected part of a row's name, found {word:?}; the rows are: {}", names.join("; "));
    }
    let wanted = |name: &str| only.is_empty() || only.iter().any(|word| name.contains(word.as_str()));
    let mut rows: Vec<(String, Vec<Cost>)> = Vec::new();
    let mut spans: Vec<(String, Vec<Value>)> = Vec::new();
    let mut note = |name: &str, cost: Cost| match rows.iter_mut().find(|row| row.0 == name) {
        Some(row) => row.1.push(cost),
        None => rows.push((name.to_owned(), vec![cost])),
    };
    let mut limits = Vec::new();
    for round in 1..=rounds {
        for fabric in FABRICS {
            let modes: Vec<_> = MODES.into_iter().filter(|mode| wanted(&row(mode, fabric))).collect();
            ours(&moves, fabric, &modes, &mut note, &mut spans)?;
        }
        for (protocol, mode, name) in OWN.into_iter().filter(|own| wanted(own.2)) {
            let cost = own(&moves, protocol, mode).with_context(|| name.to_owned())?;
            note(name, cost);
        }
        let latency = figure(&perftest(lab, (1, 2), "ib_read_lat", 4096, 500, "")?, 4)?;
        let bandwidth = figure(&perftest(lab, (1, 2), "ib_read_bw", 1 << 20, 40, "-t 16 -o 16")?, 3)?;
        limits.push(format!("{bandwidth:.1} MiB/s and {latency:.0} us"));
        eprintln!("round {round} of {rounds}");
    }
    println!(
        "| 64 MiB of guest, 32 of it written again and again | start of QEMU ms | the rest ms | both | down ms | MiB sent | source's CPU ms | CPU ms per GiB sent |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (name, costs) in rows {
        println!("| {name} | {} |", line(&costs));
    }
    println!();
    print_spans(&spans);
    println!();
    println!(
        "ib_read_bw of 1 MiB and ib_read_lat of 4 KiB (typical) after each round: {}",
        limits.join("; ")
    );
    Ok(())
}

/// Median, lowest and highest of each column.
fn line(costs: &[Cost]) -> String {
    let column = |of: fn(&Cost) -> f64| {
        let mut values: Vec<f64> = costs.iter().map(of).collect();
        values.sort_unstable_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
        format!("{:.0} ({:.0} to {:.0})", at(values.len() / 2), at(0), at(values.len() - 1))
    };
    let columns = [
        column(|cost| cost.start_ms),
        column(|cost| cost.total_ms - cost.start_ms),
        column(|cost| cost.total_ms),
        column(|cost| cost.downtime_ms),
        column(|cost| cost.mib_sent),
        column(|cost| cost.source_cpu_ms),
        column(|cost| cost.source_cpu_ms * 1024.0 / cost.mib_sent),
    ];
    columns.join(" | ")
}

fn row(mode: &str, fabric: &str) -> String {
    format!("vmove {mode}, {fabric}")
}

/// Daemons that have just started ask their QEMU what it is, and each of them runs what it never ran. Their first moves there and back take
/// longer than later ones, so they are rows by themselves.
const FIRST: [&str; 2] = [", the daemons' first", ", the daemons' first back"];

/// A guest is moved to and fro in each mode, after once there and back in the first of them.
fn ours(
    moves: &Moves<'_>,
    fabric: &str,
    modes: &[&str],
    note: &mut impl FnMut(&str, Cost),
    spans: &mut Vec<(String, Vec<Value>)>,
) -> Result<()> {
    if modes.is_empty() {
        return Ok(());
    }
    let flags = format!("--fabric {fabric}");
    let measured = moves.start(1, &flags).and(moves.start(2, &flags)).and_then(|()| {
        moves.guest("g")?;
        let turns = modes.iter().take(1).flat_map(|mode| FIRST.map(|which| (*mode, which)));
        for (turn, (mode, which)) in turns.chain(modes.iter().map(|mode| (*mode, ""))).enumerate() {
            let (from, to) = if turn % 2 == 0 { (1, 2) } else { (2, 1) };
            // One round, then the guest is stopped for the rest: what QEMU is told, too.
            let more = if mode == "precopy" { " --max-downtime 60s" } else { "" };
            let before = moves.ticks(from)?;
            let report = moves.migrate("g", from, to, &format!("--mode {mode}{more}"))?;
            let cpu = (moves.ticks(from)? - before) as f64 * 10.0;
            expect(&report, "fabric", fabric)?;
            moves.works(to, "g")?;
            let name = row(mode, fabric) + which;
            note(&name, Cost::new(&report, ready_ms(moves, to)?, cpu)?);
            let phases = report["phases"].clone();
            match spans.iter_mut().find(|row| row.0 == name) {
                Some(row) => row.1.push(phases),
                None => spans.push((name, vec![phases])),
            }
        }
        Ok(())
    });
    let ended = moves.stop(1).and(moves.stop(2));
    measured.and(ended)
}

/// How long the QEMU that came last to this host took until it listened, as the daemon's log says.
fn ready_ms(moves: &Moves<'_>, host: usize) -> Result<f64> {
    let line = moves.must(host, "grep -o 'listens_ms=[0-9]*' /run/lab/vmoved.log | tail -1")?;
    let number = line.trim().strip_prefix("listens_ms=").and_then(|number| number.parse().ok());
    number.with_context(|| format!("h{host} does not say when QEMU was ready: {line}"))
}

/// Where the time of vmove's migrations went, as a table in Markdown: medians of each phase.
fn print_spans(spans: &[(String, Vec<Value>)]) {
    const PHASES: [&str; 7] = ["check", "prepare", "rounds", "switchover", "hand-over", "fetch", "finish"];
    println!("| phases, ms | {} |", PHASES.join(" | "));
    println!("|---|{}", "---|".repeat(PHASES.len()));
    for (name, rounds) in spans {
        let median = |phase: &str| {
            let of = |phases: &Value| -> f64 {
                let all = phases.as_array().into_iter().flatten().filter(|found| found["name"] == phase);
                // Not `sum`, which is -0 of nothing.
                all.filter_map(|found| found["duration_ms"].as_f64()).fold(0.0, |sum, ms| sum + ms)
            };
            let mut values: Vec<f64> = rounds.iter().map(of).collect();
            values.sort_unstable_by(f64::total_cmp);
            format!("{:.0}", values.get(values.len() / 2).copied().unwrap_or(f64::NAN))
        };
        println!("| {name} | {} |", PHASES.map(median).join(" | "));
    }
}

/// The same guest, moved by QEMU.
fn own(moves: &Moves<'_>, protocol: &str, mode: &str) -> Result<Cost> {
    let (qemu, guest) = (moves.parts.qemu.display(), moves.parts.guest.display());
    let script = moves.parts.script.display();
    let uri = format!("{protocol}:{}:{PORT}", address(2));
    let start = |host: usize, more: &str| {
        moves.must(
            host,
            &format!(
                "rm -rf /run/own; mkdir -p /run/own; ulimit -l unlimited; \
                 {script} start /run/own/qmp /run/own/pid /run/lab/qemu.log \
                 {qemu} -name g,debug-threads=on -machine q35 -accel tcg -m 64 -nodefaults -display none \
                 -kernel {guest} -debugcon file:/run/own/debug -qmp unix:/run/own/qmp,server=on,wait=off {more}"
            ),
        )
    };
    let measured = (|| {
        start(1, "")?;
        let started: Value = serde_json::from_str(start(2, "-incoming defer")?.trim())?;
        let start_ms = started["start_ms"].as_f64().context("no start_ms")?;
        moves.goes_on(1, "/run/own/debug")?;
        moves.must(2, &format!("{script} take /run/own/qmp {uri} {mode}"))?;
        let text = moves.must(1, &format!("{script} send /run/own/qmp $(cat /run/own/pid) {uri} {mode}"))?;
        moves.goes_on(2, "/run/own/debug")?;
        let mut report: Value = serde_json::from_str(text.trim()).with_context(|| text.clone())?;
        let number = |key: &str| report[key].as_f64().with_context(|| text.clone());
        let (cpu, total) = (number("source_cpu_ms")?, number("total_ms")?);
        // QEMU counts from when the other one waits for it.
        report["total_ms"] = (total + start_ms).into();
        Cost::new(&report, start_ms, cpu)
    })();
    for host in [1, 2] {
        moves.must(host, "[ ! -e /run/own/pid ] || kill -KILL $(cat /run/own/pid); sleep 0.3")?;
    }
    measured
}
