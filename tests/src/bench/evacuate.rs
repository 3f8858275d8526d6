//! A node is emptied: guests that move one after the other, and all at once, over a link of a known speed. What their memory takes on that
//! link is the least time that any mover needs.

use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use vmove_guest::config::{Config, Rate};

use super::cpu::{CpuWatch, Role, Used};
use super::spread::Spread;
use crate::beacon::BeaconPage;
use crate::daemon::{MigrateReport, Node, SlowFault};
use crate::fleet;
use crate::guest::{Accel, failures};
use crate::networks::Networks;
use crate::payload::{self, KvmPages};
use crate::sandbox::Sandbox;

/// The guest that stays at the source.
const STAYS: &str = "stays";
/// For so long the guests' pace is watched before the request, and again after the end.
const WATCHED: Duration = Duration::from_secs(2);

/// What is measured.
#[derive(Debug, Clone, Serialize)]
pub struct Case {
    /// Guests that move.
    pub guests: u32,
    /// Speed of the link in each direction, in Mbit/s.
    pub mbit: u32,
    /// Content of each guest's memory besides the 32 MiB that it rewrites, in MiB.
    pub cold_mib: u32,
    /// A word for `vmove migrate --mode`.
    pub mode: String,
    /// All begin at once; if not, each when the one before has ended.
    pub at_once: bool,
}

/// What came of one run.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// From the first request to the last end, in milliseconds.
    pub total_ms: f64,
    /// What crossed the link, in bytes: all frames of both nodes, of whatever kind.
    pub link_bytes: u64,
    /// What these bytes take at the link's speed, in milliseconds, in the direction that had more of them.
    pub wire_ms: f64,
    /// Pause of each guest, in milliseconds.
    pub pauses_ms: Vec<f64>,
    /// Work that each guest has missed, in milliseconds of work at its own pace before.
    pub lost_ms: Vec<f64>,
    /// 99th percentile of each guest's page faults, in microseconds.
    pub fault_p99_us: Vec<f64>,
    /// The longest page fault of all guests, in microseconds.
    pub fault_max_us: f64,
    /// The slowest page faults of each guest.
    pub slowest_faults: Vec<Vec<SlowFault>>,
    /// Pace of a guest that stays at the source, from the first request to the last end, as a part of its pace before.
    pub pace_of_who_stays: f64,
    /// What both daemons used.
    pub used: Used,
}

/// A guest's work, and when it was read.
struct Work {
    page: BeaconPage,
    at: Instant,
    done: f64,
}

impl Work {
    #[expect(clippy::cast_precision_loss, reason = "a guest's work is below 2^53")]
    fn read(page: BeaconPage) -> Result<Self> {
        let beacon = page.read().context("the guest's beacon has moved")?;
        ensure!(beacon.errors == 0, "{}", beacon.verdict());
        Ok(Self { page, at: Instant::now(), done: beacon.work as f64 })
    }

    /// Work in a second since then.
    fn pace(self) -> Result<(f64, Self)> {
        let now = Self::read(self.page)?;
        Ok(((now.done - self.done) / (now.at - self.at).as_secs_f64(), now))
    }
}

/// Moves the guests once.
///
/// # Errors
/// When a daemon or a guest does not start, a move fails, or a guest finds wrong memory.
pub fn run(case: &Case, accel: Accel) -> Result<Outcome> {
    payload::ready(accel)?;
    let networks = Networks::new(2)?;
    let sandbox = Sandbox::new()?;
    let nodes = fleet::daemons(&sandbox, &networks, |_| String::new())?;
    let names: Vec<String> = (1..=case.guests).map(|number| format!("guest{number}")).collect();
    let guest = payload::guest(sandbox.path(), accel, &task(case), KvmPages::None)?;
    for name in names.iter().map(String::as_str).chain([STAYS]) {
        nodes[0].run_guest(name, "thp", &guest)?;
    }
    for number in networks.numbers() {
        networks.limit_with_priorities(number, case.mbit)?;
    }

    let begin = |name: &str| Work::read(nodes[0].vm(name)?.beacon()?);
    let before = names.iter().map(|name| begin(name)).collect::<Result<Vec<_>>>()?;
    let stays = begin(STAYS)?;
    std::thread::sleep(WATCHED);
    let before = before.into_iter().map(Work::pace).collect::<Result<Vec<_>>>()?;
    let (full_pace, stays) = stays.pace()?;
    let sent = || -> Result<[u64; 2]> { Ok([networks.sent_bytes(1)?, networks.sent_bytes(2)?]) };
    let daemons = [(nodes[0].pid(), Role::SourceDaemon), (nodes[1].pid(), Role::DestinationDaemon)];
    let watch = CpuWatch::start(Box::new(move || {
        daemons.iter().filter_map(|(pid, role)| Some(((*pid)?, *role))).collect()
    }));
    let sent_before = sent()?;
    let begun = Instant::now();
    let reports = migrate(case, &nodes[0], &networks.address(2).to_string(), &names)?;
    let total_ms = begun.elapsed().as_secs_f64() * 1e3;
    let sent_after = sent()?;
    let used = watch.used();
    let (pace, _) = stays.pace()?;

    std::thread::sleep(WATCHED);
    let mut lost_ms = Vec::new();
    for (name, (full, before)) in names.iter().zip(before) {
        let vm = nodes[1].vm(name)?;
        let after = Work::read(vm.beacon()?).with_context(|| format!("{name} after its move"))?;
        let elapsed = (after.at - before.at).as_secs_f64();
        lost_ms.push((elapsed - (after.done - before.done) / full) * 1e3);
        let told = failures(&vm.console());
        ensure!(told.is_empty(), "{name} told of {told:?}");
    }
    let crossed = [sent_after[0] - sent_before[0], sent_after[1] - sent_before[1]];
    #[expect(clippy::cast_precision_loss, reason = "bytes of guests are below 2^53")]
    let wire_ms = crossed[0].max(crossed[1]) as f64 * 8.0 / f64::from(case.mbit) / 1e3;
    Ok(Outcome {
        total_ms,
        link_bytes: crossed[0] + crossed[1],
        wire_ms,
        pauses_ms: reports.iter().map(|report| report.downtime_ms).collect(),
        lost_ms,
        fault_p99_us: reports.iter().map(|report| report.faults.p99_us).collect(),
        fault_max_us: reports.iter().map(|report| report.faults.max_us).fold(0.0, f64::max),
        slowest_faults: reports.into_iter().map(|report| report.slowest_faults).collect(),
        pace_of_who_stays: pace / full_pace,
        used,
    })
}

fn task(case: &Case) -> Config {
    let rate = Rate::PagesPerSecond(1_000);
    Config { working_set_mib: 32, cold_mib: case.cold_mib, verify: 1_000, rate, ..payload::busy() }
}

fn migrate(case: &Case, source: &Node, to: &str, names: &[String]) -> Result<Vec<MigrateReport>> {
    let options = ["--json", "migrate", "--to", to, "--mode", &case.mode];
    let begin = |name: &String| source.vmove_in_background(&[&options[..], &[name]].concat());
    let end = |name: &String, child: Child| -> Result<MigrateReport> {
        MigrateReport::read(&source.answer_of(child).with_context(|| format!("moving {name}"))?)
    };
    if !case.at_once {
        return names.iter().map(|name| end(name, begin(name)?)).collect();
    }
    let all = names.iter().map(begin).collect::<Result<Vec<_>>>()?;
    names.iter().zip(all).map(|(name, child)| end(name, child)).collect()
}

/// A line of the table, of runs of one case.
#[must_use]
pub fn line(case: &Case, runs: &[Outcome]) -> String {
    let of = |figure: &dyn Fn(&Outcome) -> f64, digits| {
        let figures: Vec<f64> = runs.iter().map(figure).collect();
        Spread::of(&figures).map_or_else(|| "-".to_owned(), |spread| spread.text(digits))
    };
    let most = |figures: &[f64]| figures.iter().copied().fold(0.0, f64::max);
    let median = |figures: &[f64]| Spread::of(figures).map_or(0.0, |spread| spread.median);
    let guests = f64::from(case.guests.max(1));
    #[expect(clippy::cast_precision_loss, reason = "bytes of a daemon are below 2^53")]
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    [
        format!("{} {}", case.guests, if case.at_once { "at once" } else { "in turn" }),
        case.mode.clone(),
        of(&|run| run.total_ms, 0),
        of(&|run| run.wire_ms, 0),
        of(&|run| run.total_ms / run.wire_ms, 2),
        of(&|run| median(&run.pauses_ms), 1),
        of(&|run| most(&run.pauses_ms), 1),
        of(&|run| median(&run.lost_ms), 0),
        of(&|run| most(&run.fault_p99_us), 0),
        of(&|run| run.fault_max_us, 0),
        of(&|run| 100.0 * run.pace_of_who_stays, 0),
        of(&|run| 1e3 * (run.used.source_s + run.used.destination_s) / guests, 0),
        of(&|run| mib(run.used.daemon_memory) / guests, 1),
    ]
    .iter()
    .fold("|".to_owned(), |line, cell| format!("{line} {cell} |"))
}

/// The head of that table.
pub const HEAD: &str = "| guests | mode | total ms | wire ms | total / wire | pause ms, median guest | pause ms, worst guest | lost work ms, median guest | \
     fault p99 us, worst guest | fault max us | pace of who stays, % | CPU of daemons, ms a guest | memory of a daemon, MiB a guest |\n\
     |---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_cell_for_each_column() {
        let case = Case { guests: 8, mbit: 1000, cold_mib: 192, mode: "hybrid".into(), at_once: true };
        let outcome = Outcome {
            total_ms: 2200.0,
            link_bytes: 0,
            wire_ms: 2000.0,
            pauses_ms: vec![5.0, 9.0],
            lost_ms: vec![10.0],
            fault_p99_us: vec![100.0, 900.0],
            fault_max_us: 950.0,
            slowest_faults: Vec::new(),
            pace_of_who_stays: 0.97,
            used: Used { source_s: 0.8, destination_s: 0.8, ..Used::default() },
        };
        let line = line(&case, &[outcome]);
        let cells = |line: &str| line.matches('|').count();
        assert_eq!(cells(&line), cells(HEAD.lines().next().expect("a head")), "{line}");
        assert!(
            line.starts_with("| 8 at once | hybrid | 2200 (2200-2200) | 2000 (2000-2000) | 1.10 ("),
            "{line}"
        );
        assert!(line.contains("| 97 (97-97) | 200 (200-200) |"), "{line}");
    }
}
