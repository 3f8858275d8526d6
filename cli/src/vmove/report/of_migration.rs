//! What is told of a migration.

use vmove_types::progress::{Outcome, Progress};
use vmove_types::report::{FaultStats, PhaseTime, Report, RoundStats, SlowFault};
use vmove_types::units::{format_bytes, format_ms, format_rate, to_f64};

use super::account::{Account, Table, TimeLine, time};
use crate::vmove::disk_latency;
use crate::vmove::progress_text::{describe, facts, state};

/// Told by the time lines and tables.
const ELSEWHERE: [&str; 5] = ["faults", "slow fault", "pause", "phases", "requests"];

/// As far as the daemon tells. One that is at work, or failed, has the phases that are over.
pub fn account(progress: &Progress) -> Account {
    let account = match &progress.outcome {
        Outcome::Done { report } => of_report(report),
        _ => of_unfinished(progress),
    };
    let title = format!("{:?}, migration {}", progress.vm, progress.id);
    let bad = matches!(
        progress.outcome,
        Outcome::Failed { .. } | Outcome::Refused { .. } | Outcome::Reconnecting { .. }
    );
    let at_work = if progress.outcome.is_end() { "" } else { "still at work: " };
    Account { title, standing: format!("{at_work}{}", state(progress)), bad, ..account }.clean()
}

fn of_unfinished(progress: &Progress) -> Account {
    let mut steps = progress.phases.clone();
    let begin = steps.last().map_or(0.0, |last| last.start_ms + last.duration_ms);
    // The journal of one of the past has no times.
    if progress.elapsed_ms > begin {
        let (name, duration_ms) = (progress.phase.as_str().to_owned(), progress.elapsed_ms - begin);
        steps.push(PhaseTime { name, start_ms: begin, duration_ms });
    }
    let note = if progress.outcome.is_end() { "until it failed" } else { "until now" };
    let phases = TimeLine { title: "Phases".to_owned(), steps, note: note.to_owned() };
    let mut facts: Vec<_> = describe(progress).lines().map(fact).collect();
    let left = progress.bytes_total.saturating_sub(progress.bytes_done);
    let bytes = [("arrived", progress.bytes_done), ("left", left)];
    facts.extend(progress.warning.iter().map(|warning| ("warning".to_owned(), warning.clone())));
    Account {
        facts,
        time_lines: Some(phases).filter(|line| !line.steps.is_empty()).into_iter().collect(),
        bytes: named(if progress.bytes_total > 0 { &bytes } else { &[] }),
        ..Account::default()
    }
}

/// A line of a description: a name and what it is, or text.
fn fact(line: &str) -> (String, String) {
    match line.split_once("  ") {
        Some((name, value)) if !name.is_empty() => (name.to_owned(), value.trim_start().to_owned()),
        _ => (String::new(), line.trim_start().to_owned()),
    }
}

fn of_report(r: &Report) -> Account {
    let told = facts(r).into_iter().filter(|(name, _)| !ELSEWHERE.contains(name));
    let line = |title: &str, steps: &[PhaseTime], note: &str| TimeLine {
        title: title.to_owned(),
        steps: steps.to_vec(),
        note: note.to_owned(),
    };
    let pause = format!("the guest stood still, {} in all", format_ms(r.downtime_ms));
    let lines = [line("Phases", &r.phases, "after the request"), line("Pause", &r.pause, &pause)];
    let tables = [rounds(r), requests(r), faults(&r.faults), slowest(&r.slowest_faults)];
    Account {
        facts: told.map(|(name, value)| (name.to_owned(), value)).collect(),
        time_lines: lines.into_iter().filter(|line| !line.steps.is_empty()).collect(),
        over_time: r.over_time.clone(),
        stood_still: stood_still(r),
        bytes: bytes(r),
        tables: tables.into_iter().filter(|table| !table.rows.is_empty()).collect(),
        ..Account::default()
    }
}

/// The phases in which it did, if it was measured.
fn stood_still(r: &Report) -> Option<(f64, f64)> {
    let phase = |name: &str| r.phases.iter().find(|phase| phase.name == name);
    let begin = phase("switchover").filter(|_| r.downtime_ms > 0.0)?;
    // The pause ends with the hand-over, at which the guest runs there.
    let end = phase("hand-over").unwrap_or(begin);
    let end = end.start_ms + end.duration_ms;
    Some(((end - r.downtime_ms).max(0.0), end))
}

fn payload(round: &RoundStats, page_size: u64) -> u64 {
    round.pages.saturating_sub(round.zero).saturating_mul(page_size)
}

/// What crossed. What was left when the guest resumed may have had zero pages, which do not cross.
fn bytes(r: &Report) -> Vec<(String, u64)> {
    let in_rounds: u64 = r.rounds.iter().map(|round| payload(round, r.page_size)).sum();
    let ahead = r.head_start.as_ref().map_or(0, |ahead| ahead.sent_bytes);
    let known = in_rounds.saturating_add(r.state_bytes).saturating_add(ahead);
    let after = r.pages_after_resume.saturating_mul(r.page_size).min(r.bytes_sent.saturating_sub(known));
    let rest = r.bytes_sent.saturating_sub(known).saturating_sub(after);
    let disks: u64 = r.disks.iter().map(|disk| disk.sent_bytes).sum();
    let all = [
        ("ahead, while the guest had its devices", ahead),
        ("in rounds", in_rounds),
        ("device state", r.state_bytes),
        ("after the guest resumed", after),
        ("the rest, with headers", rest),
        ("disks", disks),
        ("not sent: zero", r.pages_zero.saturating_mul(r.page_size)),
    ];
    named(&all)
}

fn named(all: &[(&str, u64)]) -> Vec<(String, u64)> {
    all.iter().filter(|(_, bytes)| *bytes > 0).map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect()
}

fn rounds(r: &Report) -> Table {
    let row = |(at, round): (usize, &RoundStats)| {
        let bytes = payload(round, r.page_size);
        vec![
            (at + 1).to_string(),
            format_ms(round.duration_ms),
            format_bytes(bytes),
            format_rate(to_f64(bytes) / (round.duration_ms / 1e3).max(1e-6)),
            round.pages.to_string(),
            round.zero.to_string(),
            format!("{:.0}", round.dirty_pages_per_s),
            format!("{:.0} us", round.scan_us),
        ]
    };
    Table {
        title: "Rounds".to_owned(),
        head: vec!["ROUND", "TIME", "SENT", "RATE", "PAGES", "ZERO", "DIRTIED/S", "SCAN"],
        rows: r.rounds.iter().enumerate().map(row).collect(),
    }
}

fn requests(r: &Report) -> Table {
    Table {
        title: "How long the guest's requests to its disks took, before, during and after the copy"
            .to_owned(),
        head: disk_latency::HEAD.to_vec(),
        rows: r.disks.iter().flat_map(|disk| disk_latency::rows(&disk.name, &disk.latency)).collect(),
    }
}

fn us(us: f64) -> String {
    time(us / 1e3)
}

/// One row for all of them.
pub(super) fn fault_cells(f: &FaultStats) -> Vec<String> {
    let mut cells = vec![f.count.to_string(), f.fetched.to_string()];
    if f.fetched == 0 {
        cells.extend(["-"; 4].map(str::to_owned));
    } else {
        cells.extend([f.p50_us, f.p99_us, f.p999_us, f.max_us].map(us));
    }
    cells
}

fn faults(f: &FaultStats) -> Table {
    Table {
        title: "Page faults at the destination".to_owned(),
        head: vec!["FAULTS", "FETCHED", "P50", "P99", "P99.9", "LONGEST"],
        rows: (f.count > 0).then(|| fault_cells(f)).into_iter().collect(),
    }
}

fn slowest(faults: &[SlowFault]) -> Table {
    let row = |f: &SlowFault| {
        let waited_for = [("its turn", f.asked_us), ("the page", f.read_us), ("mapping", f.map_us)];
        let most = waited_for.iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or("", |(what, _)| what);
        vec![
            us(f.total_us),
            most.to_owned(),
            us(f.asked_us),
            us(f.read_us),
            us(f.map_us),
            if f.own_read { "its own" } else { "one under way" }.to_owned(),
            format_ms(f.at_ms),
            format!("{} + {:#x}", f.block, f.offset),
        ]
    };
    Table {
        title: "The slowest page faults".to_owned(),
        head: vec!["TIME", "MOSTLY FOR", "UNTIL READ", "READ", "MAPPING", "BY A READ", "AT", "PAGE"],
        rows: faults.iter().map(row).collect(),
    }
}
