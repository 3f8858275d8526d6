//! Outcomes for people: a table and a picture.

use std::fmt::Write;

use vmove_picture::{COLOURS, MARGIN, Sheet, WIDTH, count, decades, text, text_around, text_to, width_of};

use super::Outcome;
use crate::words::bytes;

/// One row for each way.
pub(super) fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::from(
        "way         first instruction (s)   complete (s)            root        busiest host  busiest uplink  repaired\n",
    );
    for outcome in outcomes {
        let range = |(first, last): (f64, f64)| format!("{first:.4} .. {last:.4}");
        let _ = writeln!(
            text,
            "{:<11} {:<23} {:<23} {:<11} {:<13} {:<15} {}",
            outcome.way.to_string(),
            range(outcome.first_instruction),
            range(outcome.complete),
            bytes(outcome.root_bytes),
            bytes(outcome.host_bytes),
            bytes(outcome.uplink_bytes),
            bytes(outcome.repaired_bytes + outcome.resent_bytes),
        );
    }
    text
}

const TITLE: &str = "Hosts that have everything";
/// Where the axes are.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 920.0;
const PLOT: f64 = 300.0;
/// Between names of lines.
const ROW: f64 = 16.0;

/// Hosts that have everything over time, on a logarithmic scale: ways may differ by far.
pub(super) fn picture(outcomes: &[Outcome]) -> String {
    let mut sheet = Sheet::default();
    sheet.words(MARGIN, 32.0, "v-ink v-bold", 16, TITLE);
    sheet.words(MARGIN, 54.0, "v-soft", 12, "share of the hosts");
    let top = 72.0 + ROW * count(outcomes.len());
    let axis = Axis::over(outcomes, top);
    axis.draw(&mut sheet);
    let mut sorted: Vec<(usize, &Outcome)> = outcomes.iter().enumerate().collect();
    sorted.sort_by(|a, b| a.1.complete.1.total_cmp(&b.1.complete.1));
    for (row, (number, outcome)) in sorted.into_iter().enumerate() {
        axis.line(&mut sheet, outcome, number % COLOURS, top - 8.0 - ROW * count(row));
    }
    sheet.finish(TITLE, (WIDTH, top + PLOT + 44.0 + MARGIN), "")
}

/// A logarithmic axis of time below shares from 0 to 1.
struct Axis {
    /// Powers of ten at its ends.
    low: i32,
    high: i32,
    top: f64,
}

impl Axis {
    fn over(outcomes: &[Outcome], top: f64) -> Self {
        let (low, high) = decades(outcomes.iter().flat_map(|one| &one.progress).map(|(time, _)| *time));
        Self { low, high, top }
    }

    fn x(&self, time: f64) -> f64 {
        let share = (time.log10() - f64::from(self.low)) / f64::from(self.high - self.low);
        LEFT + (RIGHT - LEFT) * share.clamp(0.0, 1.0)
    }

    fn y(&self, share: f64) -> f64 {
        self.top + PLOT * (1.0 - share)
    }

    fn draw(&self, sheet: &mut Sheet) {
        for percent in [0, 25, 50, 75, 100] {
            let y = self.y(f64::from(percent) / 100.0);
            sheet.line("v-rule", (LEFT, y), (RIGHT, y));
            sheet.add(text_to(LEFT - 8.0, y + 4.0, "v-soft", 12, &format!("{percent} %")));
        }
        for exponent in self.low..=self.high {
            let time = 10_f64.powi(exponent);
            sheet.line("v-rule", (self.x(time), self.top), (self.x(time), self.y(0.0)));
            let words = format!("{time} s");
            sheet.add(text_around(self.x(time), self.y(0.0) + 18.0, "v-soft", 12, &words));
        }
        let middle = f64::midpoint(LEFT, RIGHT);
        sheet.add(text_around(middle, self.y(0.0) + 38.0, "v-soft", 12, "time since the begin"));
    }

    /// A line, and above where it ends its name.
    fn line(&self, sheet: &mut Sheet, outcome: &Outcome, colour: usize, label: f64) {
        let mut points = vec![(LEFT, self.y(0.0))];
        for (time, share) in &outcome.progress {
            let before = points.last().map_or(self.y(0.0), |point| point.1);
            points.push((self.x(*time), before));
            points.push((self.x(*time), self.y(*share)));
        }
        sheet.polyline(&format!("v-line v-l{colour}"), &points);
        let end = points.last().map_or(LEFT, |point| point.0);
        sheet.line(&format!("v-l{colour}"), (end, label + 3.0), (end, self.top));
        let words = format!("{}, {} s", outcome.way, short(outcome.complete.1));
        let class = format!("v-c{colour}");
        let room = end - LEFT > width_of(&words, 12);
        sheet.add(if room {
            text_to(end - 6.0, label + 4.0, &class, 12, &words)
        } else {
            text(end + 6.0, label + 4.0, &class, 12, &words)
        });
    }
}

/// Three figures or more.
fn short(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{s:.0}"),
        s if s >= 1.0 => format!("{s:.2}"),
        s => format!("{s:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Way;
    use super::*;
    use vmove_picture::check::faults;

    fn outcome(way: Way, last: f64) -> Outcome {
        let progress = (1..=20).map(|part| (last * f64::from(part) / 20.0, f64::from(part) / 20.0)).collect();
        Outcome {
            way,
            first_instruction: (0.0, 0.0),
            complete: (last / 20.0, last),
            root_bytes: 0.0,
            host_bytes: 0.0,
            uplink_bytes: 0.0,
            total_bytes: 0.0,
            repaired_bytes: 0.0,
            resent_bytes: 0.0,
            progress,
        }
    }

    #[test]
    fn lines_are_named_however_much_they_differ() {
        let outcomes =
            [outcome(Way::Multicast, 3.7), outcome(Way::Unicast, 3_440.0), outcome(Way::Pipeline, 3.7)];
        let svg = picture(&outcomes);
        assert_eq!(faults(&svg), Vec::<String>::new());
        for words in
            ["multicast, 3.70 s", "unicast, 3440 s", "pipeline, 3.70 s", "1000 s", "share of the hosts"]
        {
            assert!(svg.contains(words), "{words}");
        }
        let mut nothing = outcome(Way::Unicast, 0.0);
        nothing.progress.clear();
        for outcomes in [&[][..], &[nothing]] {
            assert_eq!(faults(&picture(outcomes)), Vec::<String>::new());
        }
    }
}
