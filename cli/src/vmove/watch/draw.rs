//! The screen.

use std::collections::VecDeque;
use std::time::Instant;

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use vmove_types::disk::DiskProgress;
use vmove_types::fork_report::ForkProgress;
use vmove_types::progress::{Outcome, Phase, Progress, Role};
use vmove_types::units::{format_bytes, format_ms, format_rate, to_f64};
use vmove_types::vm::VmSummary;

use super::board::{Board, Key, Kind, Link, NodeBoard, Traced, View, left_bytes};
use super::details;
use crate::vmove::progress_text::state;
use crate::vmove::report::sparks;

/// From so many columns on, the traces of a migration are beside each other.
const WIDE: u16 = 100;
/// Columns of a trace and of a bar, if there is room.
const TRACE: usize = 24;
/// Columns of the name of a VM at most.
const NAME: usize = 24;
/// Columns of what is beside it.
const BESIDE_NAME: usize = 25;
/// So many ended migrations of each of several nodes are shown.
const ENDED_OF_SEVERAL: usize = 5;
/// So many children of a fork are shown.
const CHILDREN: usize = 6;

const HELP: &str = "Up, Down, j, k   choose
PgUp, PgDn       ten at a time
Home, End, g, G  the first, the last
Enter            everything about what is chosen, and back
Esc              back
?                this help, and back
q, Ctrl-C        end

No key changes anything: migrations go on when this ends.
rate and left are of memory, dirtied is what the guest
writes; faults are those that had to fetch a page, at the
destination.";

/// Styles, with or without colours.
#[derive(Debug, Clone, Copy)]
pub struct Palette {
    colours: bool,
}

impl Palette {
    /// Without colours if `NO_COLOR` is set and not empty (<https://no-color.org>).
    pub fn of_environment() -> Self {
        Self { colours: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) }
    }

    fn with(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    fn title() -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    fn bad(self) -> Style {
        self.with(Color::Red).add_modifier(Modifier::BOLD)
    }

    fn good(self) -> Style {
        self.with(Color::Green)
    }

    fn trace(self) -> Style {
        self.with(Color::Cyan)
    }

    fn chosen() -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }
}

/// Lines of the list, and which of them begin something that can be chosen.
struct List {
    lines: Vec<Line<'static>>,
    begins: Vec<(usize, Key)>,
    palette: Palette,
    columns: u16,
    /// So many ended migrations of each node are shown.
    ended: usize,
}

/// Draws what the user looks at.
pub fn draw(frame: &mut Frame<'_>, board: &mut Board, palette: &Palette, now: Instant) {
    let area = frame.area();
    let body = Rect { height: area.height.saturating_sub(1), ..area };
    let foot = Rect { y: area.y + body.height, height: area.height - body.height, ..area };
    let keys = match board.view {
        View::List => {
            list(frame, body, board, *palette, now);
            "q end  ? help  Enter details  j k choose"
        }
        View::Details(from) => {
            let text = details::text(board, body.width);
            let lines = u16::try_from(text.lines().count()).unwrap_or(u16::MAX);
            let from = from.min(lines.saturating_sub(body.height));
            board.view = View::Details(from);
            frame.render_widget(Paragraph::new(text).scroll((from, 0)), body);
            "q end  Esc back  j k scroll"
        }
        View::Help => {
            frame.render_widget(Paragraph::new(HELP), body);
            "q end  Esc back"
        }
    };
    frame.render_widget(Paragraph::new(keys).style(Palette::chosen()), foot);
}

fn list(frame: &mut Frame<'_>, area: Rect, board: &mut Board, palette: Palette, now: Instant) {
    let ended = if board.nodes.len() > 1 { ENDED_OF_SEVERAL } else { usize::MAX };
    let mut list = List { lines: Vec::new(), begins: Vec::new(), palette, columns: area.width, ended };
    for (number, node) in board.nodes.iter().enumerate() {
        if number > 0 {
            list.lines.push(Line::default());
        }
        list.node(number, node, now);
    }
    let at = board.chosen.as_ref().and_then(|key| list.begins.iter().position(|(_, begin)| begin == key));
    let mut top = 0;
    if let Some(at) = at {
        let begin = list.begins[at].0;
        let end = list.begins.get(at + 1).map_or(list.lines.len(), |(begin, _)| *begin);
        let line = &mut list.lines[begin];
        *line = std::mem::take(line).style(Palette::chosen());
        // What is chosen is in the middle, unless all has room.
        top = usize::midpoint(begin, end).saturating_sub(usize::from(area.height) / 2);
    }
    let top = top.min(list.lines.len().saturating_sub(usize::from(area.height)));
    board.choices = list.begins.into_iter().map(|(_, key)| key).collect();
    let shown: Vec<_> = list.lines.into_iter().skip(top).take(usize::from(area.height)).collect();
    frame.render_widget(Paragraph::new(shown), area);
}

impl List {
    fn push(&mut self, line: impl Into<Line<'static>>) {
        self.lines.push(line.into());
    }

    fn begin(&mut self, node: usize, kind: Kind, id: &str) {
        self.begins.push((self.lines.len(), Key { node, kind, id: id.to_owned() }));
    }

    fn title(&mut self, title: &str) {
        self.push(Line::styled(title.to_owned(), Palette::title()));
    }

    fn wrapped(&mut self, text: &str, style: Style) {
        for line in textwrap::wrap(text, usize::from(self.columns.max(10))) {
            self.push(Line::styled(line.into_owned(), style));
        }
    }

    fn node(&mut self, number: usize, node: &NodeBoard, now: Instant) {
        let count = |count: usize, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
        match &node.link {
            Link::Asked => self.title(&format!("{}: asked", node.name)),
            Link::Here => {
                let (vms, moves) = (count(node.vms.len(), "VM"), count(node.at_work.len(), "migration"));
                self.title(&format!("{}: {vms}, {moves} at work", node.name));
            }
            Link::Lost { why, since } => {
                let seconds = now.saturating_duration_since(*since).as_secs();
                let told = format!("{}: LOST for {seconds} s, waiting for it; below is what was", node.name);
                self.wrapped(&told, self.palette.bad());
                self.wrapped(why, Style::new());
            }
        }
        if node.vms.is_empty() && node.link == Link::Here {
            self.push("  no VMs; start one by `vmove run`");
        }
        for traced in &node.at_work {
            self.begin(number, Kind::Migration, &traced.now.id);
            self.at_work(traced);
        }
        let name = node.vms.iter().map(|vm| vm.name.chars().count()).max().unwrap_or(0).min(NAME);
        let name = name.min(usize::from(self.columns).saturating_sub(BESIDE_NAME).max(4));
        for vm in &node.vms {
            self.begin(number, Kind::Vm, &vm.name);
            self.vm(vm, name);
        }
        for fork in &node.forks {
            self.begin(number, Kind::Fork, &fork.id);
            self.fork(fork);
        }
        if !node.ended.is_empty() {
            self.push("  ended:");
        }
        for progress in node.ended.iter().take(self.ended) {
            self.begin(number, Kind::Migration, &progress.id);
            self.ended(progress);
        }
    }

    fn vm(&mut self, vm: &VmSummary, name: usize) {
        let style = match vm.status.as_str() {
            "running" => self.palette.good(),
            "ended" | "unknown" => self.palette.bad(),
            _ => Style::new(),
        };
        let mut spans = vec![
            Span::raw(format!("  {:name$.name$}  ", vm.name)),
            Span::styled(format!("{:9}", vm.status), style),
            Span::raw(format!("  {}", format_bytes(vm.memory_bytes))),
        ];
        let lacks = vm.devices.iter().filter(|device| !device.held).count();
        let waits = vm.waiting.iter().map(|what| format!("  waits for {what}"));
        let why = vm.why.iter().map(|why| format!("  {why}"));
        let lacks = (lacks > 0).then(|| format!("  lacks {lacks} devices"));
        spans.extend(waits.chain(why).chain(lacks).map(|text| Span::styled(text, self.palette.bad())));
        self.push(spans);
    }

    fn at_work(&mut self, traced: &Traced) {
        let now = &traced.now;
        let left = now.eta_ms.map(|ms| format!("{} left, ", format_ms(ms))).unwrap_or_default();
        let round = if now.phase == Phase::Rounds && now.round > 0 {
            format!(" {}", now.round)
        } else {
            String::new()
        };
        let told = format!("  {}: {left}{}{round}", between(now), now.phase.as_str());
        self.push(Line::styled(told, Palette::title()));
        if let Outcome::Reconnecting { error, .. } = &now.outcome {
            self.wrapped(&format!("    peer lost, trying again: {error}"), self.palette.bad());
        }
        for problem in now.unwritten.iter().chain(&now.warning) {
            self.wrapped(&format!("    {problem}"), self.palette.bad());
        }
        let (done, total) = amounts(now);
        let share = if total > 0 { to_f64(done.min(total)) / to_f64(total) } else { 0.0 };
        let bar = filled(share, TRACE.min(usize::from(self.columns).saturating_sub(24)));
        let bytes = if self.columns < WIDE {
            String::new()
        } else {
            format!(", {} of {}", format_bytes(done), format_bytes(total))
        };
        self.push(format!("    {bar} {:.0} %{bytes}", share * 100.0));
        let traces = [
            ("rate", &traced.rate, format_rate(now.rate_bytes_per_s)),
            ("left", &traced.left, format_bytes(left_bytes(now))),
            ("dirtied", &traced.dirtied, format!("{:.0} pages/s", now.dirty_pages_per_s)),
        ];
        let faults = now.faults.map(|faults| {
            ("faults", &traced.faults, format!("{} fetched, p99 {:.0} us", faults.fetched, faults.p99_us))
        });
        let all: Vec<_> = traces
            .into_iter()
            .chain(faults)
            .map(|(name, trace, value)| self.trace(name, trace, &value))
            .collect();
        if self.columns < WIDE {
            self.lines.extend(all.into_iter().map(Line::from));
        } else {
            self.push(all.concat());
        }
    }

    fn trace(&self, name: &str, trace: &VecDeque<f64>, value: &str) -> Vec<Span<'static>> {
        let columns = if self.columns < WIDE {
            usize::from(self.columns).saturating_sub(28).clamp(4, TRACE)
        } else {
            TRACE / 2
        };
        let values: Vec<f64> = trace.iter().skip(trace.len().saturating_sub(columns)).copied().collect();
        vec![
            Span::raw(format!("    {name:7} ")),
            Span::styled(format!("{:columns$}", sparks(&values, columns)), self.palette.trace()),
            Span::raw(format!(" {value}")),
        ]
    }

    fn fork(&mut self, fork: &ForkProgress) {
        let style = if fork.error.is_some() { self.palette.bad() } else { Style::new() };
        let told = format!("  {}: fork, {} of {} children run, ", fork.parent, fork.running, fork.children);
        self.push(vec![Span::raw(told), Span::styled(fork.phase.clone(), style)]);
        let children = fork.report.iter().flat_map(|report| &report.children);
        for child in children.clone().take(CHILDREN) {
            let state = match (&child.error, child.running_ms) {
                (Some(error), _) => format!("failed: {error}"),
                (None, Some(at)) => format!("ran after {}", format_ms(at)),
                (None, None) => "did not run".to_owned(),
            };
            self.push(format!("    {}  {state}", child.name));
        }
        let more = children.count().saturating_sub(CHILDREN);
        if more > 0 {
            self.push(format!("    and {more} more"));
        }
        for host in fork.hosts.iter().filter(|_| !fork.is_end()) {
            self.push(format!(
                "    {}: {}, {} of {} run",
                host.node, host.phase, host.running, host.children
            ));
        }
    }

    fn ended(&mut self, progress: &Progress) {
        let style = match &progress.outcome {
            Outcome::Done { .. } => self.palette.good(),
            Outcome::Failed { .. } => self.palette.bad(),
            _ => Style::new(),
        };
        let began = progress.began_at.as_deref().and_then(|at| at.get(11..19)).unwrap_or("");
        self.push(vec![
            Span::raw(format!("    {}: ", between(progress))),
            Span::styled(state(progress), style),
            Span::raw(format!(", {} in all, {began}", format_ms(progress.elapsed_ms))),
        ]);
    }
}

/// Which VM, and where it goes or comes from.
fn between(progress: &Progress) -> String {
    let arrow = if progress.role == Role::Source { "→" } else { "←" };
    format!("{} {arrow} {}", progress.vm, progress.peer)
}

/// Bytes that are there, and in all: of disks while these are copied or compared.
fn amounts(progress: &Progress) -> (u64, u64) {
    if !matches!(progress.phase, Phase::Disks | Phase::DisksAfter) {
        let of_memory = (progress.bytes_done, progress.bytes_total);
        return progress.compared_disks.map_or(of_memory, |all| (all.bytes_done, all.bytes_total));
    }
    let sum = |of: fn(&DiskProgress) -> u64| progress.disks.iter().map(of).sum();
    (sum(|disk| disk.bytes_done), sum(|disk| disk.bytes_total))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a share of columns"
)]
fn filled(share: f64, columns: usize) -> String {
    let full = (share.clamp(0.0, 1.0) * columns as f64).round() as usize;
    format!("[{}{}]", "=".repeat(full), " ".repeat(columns - full.min(columns)))
}

#[cfg(test)]
#[path = "draw_tests.rs"]
mod tests;
