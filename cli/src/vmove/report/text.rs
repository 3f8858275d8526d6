//! An account as lines for a terminal of some width.

use unicode_width::UnicodeWidthStr;
use vmove_types::report::ProgressPoint;
use vmove_types::units::{format_bytes, format_ms, format_rate, to_f64};

use super::account::{Account, Table, TimeLine, time};
use crate::output::table;

/// Narrower than that, lines are longer than the terminal.
const NARROWEST: usize = 28;
/// A scale of fewer columns says nothing.
const SHORTEST_SCALE: usize = 10;
/// Room for a time or an amount.
const FIGURE: usize = 11;
/// Longer names are cut.
const LONGEST_NAME: usize = 28;
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Lines of at most so many columns.
pub fn write(account: &Account, columns: usize) -> String {
    let columns = columns.max(NARROWEST);
    let mut out = wrapped(&account.title, columns, "") + &wrapped(&account.standing, columns, "");
    if !account.facts.is_empty() {
        out.push('\n');
        out += &facts(&account.facts, columns);
    }
    if account.over_time.len() > 1 {
        out.push('\n');
        out += &over_time(&account.over_time, columns);
    }
    if let (Some(last), Some(line)) = (account.began_to_run.last(), account.time_lines.first()) {
        out.push('\n');
        out += &children_over_time(&account.began_to_run, last.max(line.end_ms()), columns);
    }
    for line in &account.time_lines {
        out.push('\n');
        out += &time_line(line, columns);
    }
    if !account.bytes.is_empty() {
        out.push('\n');
        out += &amounts(&account.bytes, columns);
    }
    for one in &account.tables {
        out.push('\n');
        out += &fitting(one, columns);
    }
    out
}

/// Wrapped at `columns`, with `indent` before all lines but the first.
fn wrapped(text: &str, columns: usize, indent: &str) -> String {
    let options = textwrap::Options::new(columns).subsequent_indent(indent);
    textwrap::fill(text, options) + "\n"
}

fn facts(facts: &[(String, String)], columns: usize) -> String {
    let width = facts.iter().map(|(name, _)| name.width()).max().unwrap_or(0).min(columns / 3);
    let indent = " ".repeat(if width > 0 { width + 2 } else { 0 });
    let line = |(name, value): &(String, String)| {
        let begin = if width > 0 { padded(name, width) + "  " } else { String::new() };
        wrapped(&(begin + value), columns, &indent)
    };
    facts.iter().map(line).collect()
}

/// Cut or filled up to so many columns.
fn padded(text: &str, columns: usize) -> String {
    let mut cut = String::new();
    for c in text.chars() {
        if cut.width() + unicode_width::UnicodeWidthChar::width(c).unwrap_or(0) > columns {
            break;
        }
        cut.push(c);
    }
    let missing = columns.saturating_sub(cut.width());
    cut + &" ".repeat(missing)
}

fn name_width<'a>(names: impl Iterator<Item = &'a String>, columns: usize) -> usize {
    names
        .map(|name| name.width())
        .max()
        .unwrap_or(0)
        .min(LONGEST_NAME)
        .min(columns.saturating_sub(FIGURE + 4))
}

/// Columns of a scale beside a name and a figure; `None`: too few.
fn scale(columns: usize, name: usize) -> Option<usize> {
    columns.checked_sub(name + FIGURE + 4).filter(|left| *left >= SHORTEST_SCALE)
}

fn time_line(line: &TimeLine, columns: usize) -> String {
    let mut out = wrapped(&format!("{}: {}", line.title, line.note), columns, "  ");
    let width = name_width(line.steps.iter().map(|step| &step.name), columns);
    for step in &line.steps {
        let mut row = format!("  {}  {:>FIGURE$}", padded(&step.name, width), time(step.duration_ms));
        if let Some(scale) = scale(columns, width + 2) {
            let column = |ms: f64| share(ms, line.end_ms(), scale);
            let from = column(step.start_ms).min(scale - 1);
            let length = column(step.start_ms + step.duration_ms).saturating_sub(from).max(1);
            row += &format!("  {}{}", " ".repeat(from), "█".repeat(length));
        }
        out += &(row.trim_end().to_owned() + "\n");
    }
    out
}

/// How many of `columns` a part takes.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a share of columns"
)]
fn share(part: f64, all: f64, columns: usize) -> usize {
    if all > 0.0 { ((part / all).clamp(0.0, 1.0) * columns as f64).round() as usize } else { 0 }
}

fn amounts(bytes: &[(String, u64)], columns: usize) -> String {
    let mut out = "Bytes\n".to_owned();
    let width = name_width(bytes.iter().map(|(name, _)| name), columns);
    let most = bytes.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
    for (name, bytes) in bytes {
        let bar = scale(columns, width + 2)
            .map(|scale| "█".repeat(share(to_f64(*bytes), to_f64(most), scale)))
            .unwrap_or_default();
        let row = format!("  {}  {:>FIGURE$}  {bar}", padded(name, width), format_bytes(*bytes));
        out += &(row.trim_end().to_owned() + "\n");
    }
    out
}

/// What was sent in each of the times between points, in bytes per second, with when it began and ended.
pub fn rates(points: &[ProgressPoint]) -> Vec<(f64, f64, f64)> {
    let rate = |pair: &[ProgressPoint]| {
        let seconds = (pair[1].at_ms - pair[0].at_ms) / 1e3;
        let bytes = to_f64(pair[1].sent_bytes.saturating_sub(pair[0].sent_bytes));
        (pair[0].at_ms, pair[1].at_ms, bytes / seconds.max(1e-3))
    };
    points.windows(2).map(rate).collect()
}

fn over_time(points: &[ProgressPoint], columns: usize) -> String {
    let width = columns.saturating_sub(8).clamp(1, 80);
    let rates: Vec<f64> = rates(points).into_iter().map(|(_, _, rate)| rate).collect();
    let left: Vec<f64> = points.iter().map(|point| to_f64(point.left_bytes)).collect();
    let most = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let (fastest, longest) = (most(&rates), points.iter().map(|point| point.left_bytes).max().unwrap_or(0));
    let span = points.last().map_or(0.0, |last| last.at_ms) - points[0].at_ms;
    let title = format!(
        "Over {}: sent, at most {}; left, at most {}",
        format_ms(span),
        format_rate(fastest),
        format_bytes(longest)
    );
    wrapped(&title, columns, "  ")
        + &format!("  sent  {}\n  left  {}\n", sparks(&rates, width), sparks(&left, width))
}

/// How many children ran, from the request to `end`.
fn children_over_time(ran: &[f64], end: f64, columns: usize) -> String {
    let width = columns.saturating_sub(8).clamp(1, 80);
    let mut counts = vec![0.0; width];
    for at in ran {
        let from = share(*at, end, width).min(width - 1);
        counts[from..].iter_mut().for_each(|count| *count += 1.0);
    }
    let title = format!("Over {}: children that ran, at most {}", format_ms(end), ran.len());
    wrapped(&title, columns, "  ") + &format!("  ran   {}\n", sparks(&counts, width))
}

/// Values as heights, each the largest of those that share its column.
pub fn sparks(values: &[f64], columns: usize) -> String {
    let most = values.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let of_one = values.len().div_ceil(columns.max(1)).max(1);
    let height =
        |some: &[f64]| HEIGHTS[share(some.iter().copied().fold(0.0, f64::max), most, HEIGHTS.len() - 1)];
    values.chunks(of_one).map(height).collect()
}

/// The table with as many of its columns as there is room for.
fn fitting(one: &Table, columns: usize) -> String {
    let widths = one.head.iter().enumerate().map(|(at, head)| {
        let cells = one.rows.iter().filter_map(|row| Some(row.get(at)?.width()));
        cells.fold(head.width(), usize::max)
    });
    let mut room = columns;
    let mut shown = 0;
    for width in widths {
        let needed = if shown == 0 { width } else { width + 2 };
        if needed > room && shown > 0 {
            break;
        }
        room = room.saturating_sub(needed);
        shown += 1;
    }
    let rows: Vec<Vec<String>> =
        one.rows.iter().map(|row| row.iter().take(shown).cloned().collect()).collect();
    let left_out = &one.head[shown..];
    let note = if left_out.is_empty() {
        String::new()
    } else {
        format!(" (no room for: {})", left_out.join(", ").to_lowercase())
    };
    let mut out = wrapped(&format!("{}{note}", one.title), columns, "  ");
    for line in table(&one.head[..shown], &rows).lines() {
        out += &(padded(line, columns).trim_end().to_owned() + "\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::of_migration;
    use super::super::tests::{finished, snapshot};
    use super::*;

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let account = of_migration::account(&finished());
        for columns in [28, 40, 60, 80, 100, 132, 300] {
            let text = write(&account, columns);
            for line in text.lines() {
                assert!(line.width() <= columns, "{columns}: {} columns: {line:?}", line.width());
            }
            assert!(text.contains("rounds") && text.contains("switchover"), "{text}");
        }
        assert!(write(&account, 40).contains("no room for"));
        assert!(!write(&account, 200).contains("no room for"));
    }

    #[test]
    fn each_part_has_its_figures() {
        let text = write(&of_migration::account(&finished()), 120);
        for part in [
            "Phases",
            "Pause",
            "Bytes",
            "Rounds",
            "Page faults",
            "The slowest page faults",
            "in rounds",
            "P99.9",
            "Over ",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn a_report_of_an_earlier_release_is_told_without_what_it_lacks() {
        let mut json = serde_json::to_value(finished()).unwrap();
        let report = json["outcome"]["report"].as_object_mut().unwrap();
        for newer in ["over_time", "slowest_faults", "pause", "began_at", "verdict", "promise"] {
            report.remove(newer);
        }
        report["faults"].as_object_mut().unwrap().remove("p999_us");
        let text = write(&of_migration::account(&serde_json::from_value(json).unwrap()), 100);
        assert!(text.contains("Phases") && text.contains("Rounds"), "{text}");
        assert!(!text.contains("Over ") && !text.contains("Pause"), "{text}");
    }

    #[test]
    fn one_at_work_says_so_and_shows_what_there_is() {
        let mut progress = snapshot();
        progress.elapsed_ms = 400.0;
        let text = write(&of_migration::account(&progress), 80);
        assert!(text.contains("still at work") && text.contains("until now"), "{text}");
        assert!(text.contains("check") && text.contains("rounds"), "{text}");
    }

    #[test]
    fn steps_are_where_they_were() {
        let account = of_migration::account(&finished());
        let text = time_line(&account.time_lines[0], 100);
        let begin = |line: &str| line.chars().position(|c| c == '█');
        let begins: Vec<_> = text.lines().skip(1).filter_map(begin).collect();
        assert!(begins.len() > 3 && begins.is_sorted(), "{text}");
    }
}
