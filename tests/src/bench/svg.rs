//! Pictures of the guest's throughput over time: one row per mode, all on the same axes.

use svg::node::element::Polygon;
use vmove_picture::{MARGIN, Sheet, WIDTH, count, fitting, round_step, text, text_around, text_to};

use super::measure::{Load, Outcome, Row};
use super::mover::Backing;

/// Where the axis of time begins and ends.
const LEFT: f64 = 226.0;
const RIGHT: f64 = 850.0;
/// Height of a row, and of 100 % in it.
const ROW: f64 = 44.0;
const FULL: f64 = 30.0;
/// After a stall a guest may exceed its full rate a little.
const MOST: f64 = 1.15;
/// Time shown before the request. Unit: milliseconds, as all times here.
const BEFORE: f64 = 200.0;
const TITLE: &str = "A guest's throughput while it moves: the less is missing below 100 %, the better";

const STYLE: &str = "
.v-qemu{fill:#59636e;fill-opacity:.18}.v-vmove{fill:#0072b2;fill-opacity:.22}.v-thin{fill:none;stroke-width:1.5}
.v-qemu-line{stroke:#59636e}.v-vmove-line{stroke:#0072b2}.v-full{stroke-dasharray:2 3}.v-over{stroke:#d55e00;stroke-width:2}
@media (prefers-color-scheme:dark){
.v-qemu{fill:#9da7b1}.v-vmove{fill:#4aa3e0}.v-qemu-line{stroke:#9da7b1}.v-vmove-line{stroke:#4aa3e0}.v-over{stroke:#f0883e}
}
";

/// For each backing and load: the modes of QEMU in grey and those of vmove in blue. Time 0 is the request.
#[must_use]
pub fn picture(rows: &[Row], setting: &str) -> String {
    let mut cases: Vec<(Backing, Load)> = rows.iter().map(|row| (row.case.backing, row.case.load)).collect();
    cases.dedup();
    let mut sheet = Sheet::default();
    sheet.words(MARGIN, 32.0, "v-ink v-bold", 16, TITLE);
    let said = format!("{setting}; orange: the move is over");
    sheet.words(MARGIN, 52.0, "v-soft", 12, &fitting(&said, 12, WIDTH - 2.0 * MARGIN));
    let mut y = 60.0;
    for (backing, load) in cases {
        let mine: Vec<&Row> =
            rows.iter().filter(|row| (row.case.backing, row.case.load) == (backing, load)).collect();
        let title = format!("{}, guest load: {}", backing.name(), load.label());
        y = panel(&mut sheet, &mine, &title, y + 24.0);
    }
    sheet.finish(TITLE, (WIDTH, y + MARGIN), STYLE)
}

/// The axis of time of a panel.
#[derive(Clone, Copy)]
struct Times {
    longest: f64,
}

impl Times {
    fn of(rows: &[&Row]) -> Self {
        let ends = rows.iter().filter_map(|row| row.median.as_ref()?.throughput.last());
        Self { longest: ends.map(|(at, _)| *at).fold(100.0, f64::max) }
    }

    fn x(self, at: f64) -> f64 {
        LEFT + (at + BEFORE) / (self.longest + BEFORE) * (RIGHT - LEFT)
    }

    /// Lines at round times over `height`, and the times below them.
    fn draw(self, sheet: &mut Sheet, y: f64, height: f64) {
        let step = round_step((self.longest + BEFORE) / 8.0);
        let mut tick = 0.0;
        while tick <= self.longest {
            sheet.line("v-rule", (self.x(tick), y), (self.x(tick), y + height));
            let words = format!("{} s", tick / 1000.0);
            sheet.add(text_around(self.x(tick), y + height + 16.0, "v-soft", 12, &words));
            tick += step;
        }
        let middle = f64::midpoint(LEFT, RIGHT);
        sheet.add(text_around(middle, y + height + 34.0, "v-soft", 12, "time since the request"));
    }
}

/// Draws the rows of a backing and load from `y` on. Returns where they end.
fn panel(sheet: &mut Sheet, rows: &[&Row], title: &str, y: f64) -> f64 {
    sheet.words(MARGIN, y, "v-ink v-bold", 13, &fitting(title, 13, WIDTH - 2.0 * MARGIN));
    let top = y + 26.0;
    sheet.add(text_to(LEFT - 8.0, top - 4.0, "v-soft", 12, "share of full throughput"));
    sheet.words(RIGHT + 12.0, top - 4.0, "v-soft", 12, "work lost");
    let times = Times::of(rows);
    times.draw(sheet, top, ROW * count(rows.len()));
    let mut before = None;
    for (number, row) in rows.iter().enumerate() {
        let base = top + ROW * count(number + 1) - 6.0;
        let whose = row.case.mode.is_vmove();
        if before.replace(whose) != Some(whose) {
            for (percent, at) in [("0 %", base), ("100 %", base - FULL)] {
                sheet.add(text_to(LEFT - 6.0, at + 3.0, "v-soft", 10, percent));
            }
        }
        one(sheet, times, row, base);
    }
    top + ROW * count(rows.len()) + 34.0
}

/// A row, of which 0 % is at `base`.
fn one(sheet: &mut Sheet, times: Times, row: &Row, base: f64) {
    let label = fitting(row.case.mode.label(), 12, LEFT - MARGIN - 8.0);
    sheet.words(MARGIN, base - 9.0, "v-ink", 12, &label);
    sheet.line("v-rule", (LEFT, base), (RIGHT, base));
    sheet.line("v-rule v-full", (LEFT, base - FULL), (RIGHT, base - FULL));
    let figure = match &row.median {
        Some(outcome) => {
            draw(sheet, times, outcome, row.case.mode.is_vmove(), base);
            format!("{:.0} ms", outcome.lost_work_ms)
        }
        None => "no run".to_owned(),
    };
    sheet.add(text(RIGHT + 12.0, base - 9.0, "v-ink", 12, &figure));
}

fn draw(sheet: &mut Sheet, times: Times, outcome: &Outcome, vmove: bool, base: f64) {
    let share = |rate: f64| (rate / outcome.full_rate).clamp(0.0, MOST);
    let points: Vec<(f64, f64)> = outcome
        .throughput
        .iter()
        .filter(|(at, _)| *at >= -BEFORE)
        .map(|(at, rate)| (times.x(*at), base - FULL * share(*rate)))
        .collect();
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return };
    let whose = if vmove { "v-vmove" } else { "v-qemu" };
    let around = [&[(first.0, base)], &points[..], &[(last.0, base)]].concat();
    let around: Vec<String> = around.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    sheet.add(Polygon::new().set("class", whose).set("points", around.join(" ")));
    sheet.polyline(&format!("v-thin {whose}-line"), &points);
    if (0.0..=times.longest).contains(&outcome.total_ms) {
        let x = times.x(outcome.total_ms);
        sheet.line("v-over", (x, base - FULL - 3.0), (x, base + 3.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::Case;
    use crate::bench::mover::Mode;
    use vmove_picture::check::faults;

    fn row(mode: Mode, results: Vec<anyhow::Result<Outcome>>) -> Row {
        let case = Case {
            mode,
            backing: Backing::Thp,
            load: Load::Steady,
            memory_mib: 1024,
            working_set_mib: 512,
            qemu: "q".into(),
            cold_memory: false,
        };
        Row::new(case, results)
    }

    #[test]
    fn a_picture_has_a_row_for_each_mode() {
        let throughput: Vec<_> = (-20..200).map(|i| (f64::from(i) * 10.0, 1e5)).collect();
        let outcome = || Outcome {
            throughput: throughput.clone(),
            full_rate: 1e5,
            lost_work_ms: 646.4,
            total_ms: 900.0,
            ..Outcome::default()
        };
        let rows = [
            row(Mode::QemuMultifdTls, vec![Ok(outcome())]),
            row(Mode::VmoveHybrid, vec![Ok(outcome())]),
            row(Mode::VmoveAuto, vec![]),
        ];
        let svg = picture(&rows, "a < b");
        assert_eq!(faults(&svg), Vec::<String>::new());
        assert_eq!(svg.matches("<polyline").count(), 2);
        for words in ["vmove hybrid", "a &lt; b", "646 ms", "no run", "work lost", "time since the request"] {
            assert!(svg.contains(words), "{words}");
        }
    }

    #[test]
    fn nothing_measured_is_a_picture_too() {
        assert_eq!(faults(&picture(&[], "nothing")), Vec::<String>::new());
    }
}
