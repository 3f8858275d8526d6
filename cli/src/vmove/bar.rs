//! The progress bar: on a terminal. Elsewhere lines, for those who asked for them.

use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use vmove_types::disk::DiskProgress;
use vmove_types::progress::{Outcome, Phase, Progress, VISIT};

use vmove_types::units::{format_bytes, format_ms, format_rate};

use super::disk_latency::present;
use crate::output::{End, note, say};

/// A bar on standard error; when that is no terminal, lines or nothing.
#[derive(Debug, Default)]
pub struct Bar {
    bar: Option<ProgressBar>,
    furthest: Furthest,
    lines: Option<Lines>,
    warned: Cell<bool>,
    promised: Cell<bool>,
}

/// What was said last, and when.
#[derive(Debug, Default)]
pub(super) struct Lines {
    last: Cell<Option<(Phase, Instant)>>,
    /// Whoever reads standard output has asked for them. Otherwise they go to standard error.
    on_stdout: bool,
}

/// How often a line says how far it is.
const LINES_INTERVAL: Duration = Duration::from_secs(5);

impl Lines {
    /// A line is due: there is something new, or time has passed.
    pub(super) fn are_due(&self, phase: Phase, now: Instant, interval: Duration) -> bool {
        let due = self.last.get().is_none_or(|(last, at)| last != phase || now - at >= interval);
        if due {
            self.last.set(Some((phase, now)));
        }
        due
    }

    fn add(&self, line: &str) -> Result<(), End> {
        if self.on_stdout {
            return say(line);
        }
        note(line);
        Ok(())
    }
}

/// What is said of a disk whose copy follows the guest.
const IN_STEP: &str = "in step";

/// Columns of the spinner, the bar and what is between them and the words.
const BEFORE_WORDS: usize = 29;

/// Steps of the bar.
const STEPS: u64 = 1000;

/// How far a bar has come. What is to cross may grow while it crosses, and the bar does not go back for that.
#[derive(Debug, Default)]
struct Furthest(Cell<u64>);

impl Furthest {
    /// In thousandths.
    fn with(&self, done: u64, total: u64) -> u64 {
        let share = u128::from(done.min(total)) * u128::from(STEPS) / u128::from(total.max(1));
        self.0.set(self.0.get().max(u64::try_from(share).unwrap_or(STEPS)));
        self.0.get()
    }
}

impl Bar {
    /// For somebody who asked to see it: lines where there is no terminal.
    pub fn or_lines() -> Self {
        let mut bar = Self::new();
        bar.lines = bar.bar.is_none().then(Lines::default);
        bar
    }

    pub fn new() -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::default();
        }
        let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr_with_hz(10));
        Self { bar: Some(styled(bar)), ..Self::default() }
    }

    /// For a reader of standard output that is no terminal: lines there.
    pub fn lines_on_stdout() -> Self {
        Self { lines: Some(Lines { on_stdout: true, ..Lines::default() }), ..Self::default() }
    }

    /// Where there is no terminal: lines for people, and for programs warnings only.
    pub fn without_terminal(json: bool) -> Self {
        Self { lines: (!json).then(Lines::default), ..Self::default() }
    }

    /// One of several, above each other.
    pub fn within(all: &MultiProgress) -> Self {
        Self { bar: Some(all.add(styled(ProgressBar::new(STEPS)))), ..Self::default() }
    }

    pub fn update(&self, progress: &Progress) -> Result<(), End> {
        self.show(progress, None, parts(progress))
    }

    /// One of several.
    pub fn update_named(&self, name: &str, progress: &Progress, more: Option<String>) -> Result<(), End> {
        let mut parts = parts(progress);
        // Before what is left out first.
        more.into_iter().for_each(|more| parts.insert(1, more));
        self.show(progress, Some(name), parts)
    }

    fn show(&self, progress: &Progress, name: Option<&str>, mut parts: Vec<String>) -> Result<(), End> {
        if let Some(promise) = progress.promise.as_ref().filter(|_| !self.promised.replace(true)) {
            self.note(&format!("vmove: {}: {promise}", progress.vm));
        }
        if let Some(warning) = progress.warning.as_ref().filter(|_| !self.warned.replace(true)) {
            self.note(&format!("vmove: {}: {warning}", progress.vm));
        }
        // Of one of several that has ended, the end of all tells.
        let at_work = !progress.outcome.is_end();
        if let Some(lines) = self.lines.as_ref().filter(|_| at_work)
            && lines.are_due(progress.phase, Instant::now(), LINES_INTERVAL)
        {
            lines.add(&format!("{}: {}", progress.vm, parts.join(", ")))?;
        }
        if let Some(bar) = &self.bar {
            if matches!(progress.phase, Phase::Disks | Phase::DisksAfter) {
                let sum = |of: fn(&DiskProgress) -> u64| progress.disks.iter().map(of).sum();
                let (done, total): (u64, u64) = (sum(|disk| disk.bytes_done), sum(|disk| disk.bytes_total));
                // Not kept: memory begins anew.
                bar.set_position(Furthest::default().with(done, total));
            } else if let Some(compared) = progress.compared_disks {
                bar.set_position(Furthest::default().with(compared.bytes_done, compared.bytes_total));
            } else {
                bar.set_position(self.furthest.with(progress.bytes_done, progress.bytes_total));
            }
            // A line has it in front anyway.
            if let Some(name) = name {
                parts[0] = format!("{name}: {}", parts[0]);
            }
            bar.set_message(fitted(parts, room()));
            bar.tick();
        }
        Ok(())
    }

    /// A disk alone.
    pub fn update_disk(&self, progress: &DiskProgress) {
        if let Some(bar) = &self.bar {
            bar.set_position(self.furthest.with(progress.bytes_done, progress.bytes_total));
            bar.set_message(disk(progress, IN_STEP));
            bar.tick();
        }
    }

    /// Prints a line above the bar, or on standard error.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| note(text)),
            None => note(text),
        }
    }

    pub fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn styled(bar: ProgressBar) -> ProgressBar {
    // A template that does not parse would be a mistake of ours; the plain bar does then.
    // As wide as `BEFORE_WORDS`, and the words.
    if let Ok(style) = ProgressStyle::with_template("{spinner} [{bar:24}] {wide_msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// Columns that the bar leaves for words.
fn room() -> usize {
    let columns = ratatui::crossterm::terminal::size().map_or(80, |(columns, _)| columns);
    usize::from(columns).saturating_sub(BEFORE_WORDS)
}

/// As many of the parts as there is room for, the first ones.
fn fitted(mut parts: Vec<String>, room: usize) -> String {
    let wide = |parts: &[String]| parts.iter().map(|part| part.chars().count() + 2).sum::<usize>();
    while parts.len() > 1 && wide(&parts) > room + 2 {
        parts.pop();
    }
    parts.join(", ")
}

/// Everything worth a look, in one line.
pub fn line(progress: &Progress) -> String {
    parts(progress).join(", ")
}

/// The same in parts, at least one: what matters most comes first.
fn parts(progress: &Progress) -> Vec<String> {
    // A visit does not end by itself: nothing is left of it, and no share of it is done.
    let visits = progress.mode.as_deref() == Some(VISIT);
    let first = if progress.phase == Phase::DisksAfter {
        format!("running at the destination; disks {} across", share_of(&progress.disks))
    } else if visits {
        format!("{VISIT}, {} have followed the guest", format_bytes(progress.bytes_sent))
    } else {
        progress.phase.as_str().to_owned()
    };
    let mut parts = vec![first];
    if let Some(eta) = progress.eta_ms.filter(|_| !visits) {
        parts.push(format!("{} left", format_ms(eta)));
    }
    if let Outcome::Reconnecting { error, .. } = &progress.outcome {
        parts.push(format!("peer lost, trying again ({error})"));
    }
    if let Some(unwritten) = &progress.unwritten {
        parts.push(unwritten.clone());
    }
    if visits {
        return parts;
    }
    if progress.phase == Phase::Rounds && progress.round > 0 {
        parts.push(format!("round {}", progress.round));
    }
    if matches!(progress.phase, Phase::Disks | Phase::DisksAfter) {
        let end = if progress.phase == Phase::Disks { IN_STEP } else { "all there" };
        parts.extend(progress.disks.iter().map(|one| disk(one, end)));
        return parts;
    }
    if let Some(compared) = progress.compared_disks {
        let (done, total) = (format_bytes(compared.bytes_done), format_bytes(compared.bytes_total));
        parts.push(format!("comparing disks, {done} of {total}"));
        return parts;
    }
    if progress.bytes_total > 0 {
        parts.push(format!(
            "{} of {}",
            format_bytes(progress.bytes_done),
            format_bytes(progress.bytes_total)
        ));
    }
    if progress.rate_bytes_per_s > 0.0 {
        parts.push(format_rate(progress.rate_bytes_per_s));
    }
    if progress.dirty_pages_per_s > 0.0 {
        parts.push(format!("dirties {:.0} pages/s", progress.dirty_pages_per_s));
    }
    parts
}

/// How much of all disks is there.
fn share_of(disks: &[DiskProgress]) -> String {
    let sum = |of: fn(&DiskProgress) -> u64| disks.iter().map(of).sum::<u64>();
    let (done, total) = (sum(|disk| disk.bytes_done), sum(|disk| disk.bytes_total));
    // Not all before they are.
    let percent = if total == 0 { 0 } else { u128::from(done) * 100 / u128::from(total) };
    format!("{percent} %")
}

/// `end`: what is said of one that lacks nothing.
fn disk(disk: &DiskProgress, end: &str) -> String {
    let (name, done, total) = (&disk.name, format_bytes(disk.bytes_done), format_bytes(disk.bytes_total));
    let left = disk.eta_ms.map(|ms| format!(", {} left", format_ms(ms))).unwrap_or_default();
    let rest = if disk.in_step {
        end.to_owned()
    } else {
        format!("{done} of {total}, {}{left}", format_rate(disk.rate_bytes_per_s))
    };
    let io = disk.io.as_ref().map(present).filter(|io| !io.is_empty());
    let io = io.map(|io| format!(", the guest's {io}")).unwrap_or_default();
    let gives_way = if disk.gives_way { ", gives way to the guest" } else { "" };
    format!("{name}: {rest}{gives_way}{io}")
}

#[cfg(test)]
mod tests {
    use vmove_types::progress::Role;

    use super::*;

    #[test]
    fn a_bar_does_not_go_back_when_there_is_more_to_move() {
        let bar = Furthest::default();
        assert_eq!(bar.with(0, 0), 0);
        assert_eq!(bar.with(50, 100), 500);
        assert_eq!(bar.with(60, 1000), 500);
        assert_eq!(bar.with(900, 1000), 900);
        assert_eq!(bar.with(u64::MAX, u64::MAX), STEPS);
    }

    #[test]
    fn without_a_terminal_each_phase_and_each_few_seconds_have_a_line() {
        let (lines, begun) = (Lines::default(), Instant::now());
        let due = |phase, seconds| lines.are_due(phase, begun + Duration::from_secs(seconds), LINES_INTERVAL);
        assert!(due(Phase::Check, 0) && !due(Phase::Check, 1), "once");
        assert!(due(Phase::Rounds, 1) && !due(Phase::Rounds, 5));
        assert!(due(Phase::Rounds, 6) && !due(Phase::Rounds, 10) && due(Phase::Rounds, 11));
    }

    #[test]
    fn a_narrow_terminal_shows_fewer_parts_and_cuts_none() {
        let parts = || ["fetch", "14.84 s left", "0 B of 658.00 MiB", "70 MiB/s"].map(str::to_owned).to_vec();
        assert_eq!(fitted(parts(), 49), "fetch, 14.84 s left, 0 B of 658.00 MiB, 70 MiB/s");
        assert_eq!(fitted(parts(), 48), "fetch, 14.84 s left, 0 B of 658.00 MiB, 70 MiB/s");
        assert_eq!(fitted(parts(), 47), "fetch, 14.84 s left, 0 B of 658.00 MiB");
        assert_eq!(fitted(parts(), 1), "fetch");
    }

    #[test]
    fn a_visit_has_no_share_that_is_done() {
        let mut visit = Progress::begun("1", "web", Role::Source, "b");
        (visit.mode, visit.phase) = (Some(VISIT.to_owned()), Phase::Fetch);
        (visit.bytes_total, visit.bytes_done, visit.bytes_sent) = (1 << 30, 1 << 20, 2 << 20);
        assert_eq!(line(&visit), "visit, 2.00 MiB have followed the guest");
    }

    #[test]
    fn each_disk_says_how_far_it_is() {
        let disk = |name: &str, in_step: bool| DiskProgress {
            name: name.to_owned(),
            bytes_total: 2 << 20,
            bytes_done: 1 << 20,
            rate_bytes_per_s: 1e6,
            io: None,
            gives_way: !in_step,
            eta_ms: Some(1000.0).filter(|_| !in_step),
            in_step,
        };
        let mut progress = Progress::begun("1", "v", Role::Source, "b");
        (progress.phase, progress.disks) = (Phase::Disks, vec![disk("vda", false), disk("vdb", true)]);
        assert_eq!(
            line(&progress),
            "disks, vda: 1.00 MiB of 2.00 MiB, 976.56 KiB/s, 1.00 s left, gives way to the guest, vdb: in step"
        );
        progress.phase = Phase::DisksAfter;
        assert_eq!(
            line(&progress),
            "running at the destination; disks 50 % across, vda: 1.00 MiB of 2.00 MiB, 976.56 KiB/s, 1.00 s left, gives way to the guest, vdb: all there"
        );
    }

    #[test]
    fn the_line_has_phase_round_bytes_rates_and_time_left() {
        let progress = Progress {
            mode: Some("hybrid".to_owned()),
            phase: Phase::Rounds,
            elapsed_ms: 100.0,
            bytes_total: 1 << 30,
            bytes_done: 1 << 29,
            bytes_sent: 1 << 29,
            rate_bytes_per_s: 2e9,
            dirty_pages_per_s: 100_000.0,
            round: 2,
            eta_ms: Some(250.0),
            ..Progress::begun("1", "v", Role::Source, "b")
        };
        assert_eq!(
            line(&progress),
            "rounds, 250.0 ms left, round 2, 512.00 MiB of 1.00 GiB, 1.86 GiB/s, dirties 100000 pages/s"
        );
    }
}
