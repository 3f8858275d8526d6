//! A plot of measurements as SVG.

use crate::{COLOURS, MARGIN, Sheet, apart, decades, fitting, tenth, text, text_around, text_to};
use svg::node::element::Circle;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
/// Where the axes are.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 520.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 360.0;

const STYLE: &str = ".v-goal{stroke:#b3261e;stroke-dasharray:6 4}
@media (prefers-color-scheme:dark){.v-goal{stroke:#ff8f87}}
";

/// What is drawn. Both axes are logarithmic, so coordinates are above 0.
#[derive(Debug, Default)]
pub struct Plot<'a> {
    /// What it shows.
    pub title: &'a str,
    /// Name of the axis to the right.
    pub across: &'a str,
    /// Name of the axis upwards.
    pub up: &'a str,
    /// Lines, each with its name.
    pub series: Vec<(&'a str, Vec<(f64, f64)>)>,
    /// What should not be exceeded, with its name.
    pub goal: Option<(f64, &'a str)>,
}

/// A logarithmic axis.
struct Axis {
    /// Powers of ten at its ends.
    low: f64,
    high: f64,
    /// Pixels at its ends.
    from: f64,
    to: f64,
}

impl Axis {
    fn pixel(&self, value: f64) -> f64 {
        self.from + (value.log10() - self.low) / (self.high - self.low) * (self.to - self.from)
    }
}

impl Plot<'_> {
    /// Draws it.
    #[must_use]
    pub fn draw(mut self) -> String {
        for (_, points) in &mut self.series {
            points.retain(|(x, y)| *x > 0.0 && *y > 0.0);
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        let points = || self.series.iter().flat_map(|(_, points)| points);
        let mut measured: Vec<f64> = points().map(|point| point.0).collect();
        measured.sort_by(f64::total_cmp);
        measured.dedup();
        let (first, last) =
            (measured.first().copied().unwrap_or(1.0), measured.last().copied().unwrap_or(10.0));
        let high = if last > first { last } else { first * 10.0 };
        let x = Axis { low: first.log10(), high: high.log10(), from: LEFT + 12.0, to: RIGHT };
        let (low, high) = decades(points().map(|point| point.1).chain(self.goal.map(|goal| goal.0)));
        let y = Axis { low: f64::from(low), high: f64::from(high), from: BOTTOM, to: TOP };
        let mut sheet = Sheet::default();
        sheet.words(MARGIN, 32.0, "v-ink v-bold", 16, &fitting(self.title, 16, WIDTH - 2.0 * MARGIN));
        sheet.words(MARGIN, TOP - 10.0, "v-soft", 12, self.up);
        for decade in low..=high {
            let at = y.pixel(10_f64.powi(decade));
            sheet.line("v-rule", (LEFT, at), (RIGHT, at));
            sheet.add(text_to(LEFT - 8.0, at + 4.0, "v-soft", 12, &format!("{}", 10_f64.powi(decade))));
        }
        for value in measured {
            let at = x.pixel(value);
            sheet.line("v-rule", (at, TOP), (at, BOTTOM));
            sheet.add(text_around(at, BOTTOM + 18.0, "v-soft", 12, &thousands(value)));
        }
        sheet.add(text_around(f64::midpoint(LEFT, RIGHT), BOTTOM + 40.0, "v-soft", 12, self.across));
        if let Some((value, name)) = self.goal {
            let at = y.pixel(value);
            sheet.line("v-goal", (LEFT, at), (RIGHT, at));
            sheet.add(text(RIGHT + 12.0, at + 4.0, "v-bad", 12, name));
        }
        self.lines(&mut sheet, &x, &y);
        sheet.finish(self.title, (WIDTH, HEIGHT), STYLE)
    }

    /// Lines, each named at its right end.
    fn lines(&self, sheet: &mut Sheet, x: &Axis, y: &Axis) {
        let ends: Vec<f64> = self
            .series
            .iter()
            .map(|(_, points)| points.last().map_or(BOTTOM, |last| y.pixel(last.1)))
            .collect();
        let labels = apart(&ends, 16.0);
        for (number, (name, points)) in self.series.iter().enumerate() {
            let colour = number % COLOURS;
            let pixels: Vec<(f64, f64)> =
                points.iter().map(|(at, value)| (x.pixel(*at), y.pixel(*value))).collect();
            sheet.polyline(&format!("v-line v-l{colour}"), &pixels);
            for (x, y) in &pixels {
                let point = Circle::new().set("class", format!("v-c{colour}")).set("cx", tenth(*x));
                sheet.add(point.set("cy", tenth(*y)).set("r", 3.5));
            }
            let Some(last) = points.last() else { continue };
            let words = fitting(&format!("{name}, {:.1}", last.1), 12, WIDTH - RIGHT - 14.0);
            sheet.words(RIGHT + 12.0, labels[number] + 4.0, &format!("v-c{colour}"), 12, &words);
        }
    }
}

/// `10,000`.
fn thousands(value: f64) -> String {
    let digits = format!("{value}");
    let mut said = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 && !digits.contains('.') {
            said.push(',');
        }
        said.push(digit);
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::faults;

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([100.0, 1000.0, 10_000.0, 0.25].map(thousands), ["100", "1,000", "10,000", "0.25"]);
    }

    #[test]
    fn lines_are_named_where_they_end() {
        let plot = Plot {
            title: "One placement of 64 VMs",
            across: "nodes of the fleet",
            up: "median time, ms",
            series: vec![
                ("empty", vec![(100.0, 1.6), (10_000.0, 55.9)]),
                ("full", vec![(100.0, 1.5), (10_000.0, 55.0)]),
            ],
            goal: Some((200.0, "goal: 200 ms")),
        };
        let svg = plot.draw();
        assert_eq!(faults(&svg), Vec::<String>::new());
        for words in ["empty, 55.9", "full, 55.0", "10,000", "goal: 200 ms", "nodes of the fleet"] {
            assert!(svg.contains(words), "{words}");
        }
        assert_eq!(faults(&Plot { title: "nothing", ..Plot::default() }.draw()), Vec::<String>::new());
    }
}
