//! What was measured over what was promised, as SVG.

use svg::Document;
use svg::node::element::{Circle, Line, Text};

use super::{Move, Outcome, Pair, RIGHT, done};

const PANEL: f64 = 420.0;
const MARGIN: f64 = 60.0;
/// Colours of the modes, which people with colour blindness can tell apart (after Okabe and Ito).
const MODES: [(&str, &str); 3] = [("precopy", "#0072b2"), ("hybrid", "#009e73"), ("postcopy", "#d55e00")];

/// A panel: both axes are logarithmic, and the same.
struct Panel {
    /// Pixels of its left edge.
    left: f64,
    /// Powers of ten at its ends.
    low: f64,
    high: f64,
}

impl Panel {
    fn over(pairs: &[Pair], left: f64) -> Self {
        let values =
            pairs.iter().flat_map(|pair| [pair.promised, pair.measured]).filter(|value| *value > 0.0);
        let (low, high) =
            values.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), v| (low.min(v), high.max(v)));
        let (low, high) = if low > high { (1.0, 10.0) } else { (low, high) };
        Self { left, low: low.log10().floor(), high: high.log10().ceil().max(low.log10().floor() + 1.0) }
    }

    fn at(&self, promised: f64, measured: f64) -> (f64, f64) {
        let share = |value: f64| (value.log10() - self.low) / (self.high - self.low);
        let inside = PANEL - 2.0 * MARGIN;
        (self.left + MARGIN + share(promised) * inside, PANEL - MARGIN - share(measured) * inside)
    }

    /// The line on which measured is so many times promised.
    fn ratio(&self, factor: f64, colour: &str) -> Line {
        let (low, high) = (10_f64.powf(self.low), 10_f64.powf(self.high));
        let (from, to) = (
            (low.max(low / factor), low.max(low * factor)),
            (high.min(high / factor), high.min(high * factor)),
        );
        line(self.at(from.0, from.1), self.at(to.0, to.1), colour)
    }

    fn draw(&self, mut picture: Document, title: &str, points: &[(Pair, &str)]) -> Document {
        let (low, high) = (10_f64.powf(self.low), 10_f64.powf(self.high));
        let mut decade = low;
        while decade <= high * 1.01 {
            picture = picture.add(line(self.at(decade, low), self.at(decade, high), "#dddddd")).add(line(
                self.at(low, decade),
                self.at(high, decade),
                "#dddddd",
            ));
            let (x, y) = self.at(decade, low);
            picture = picture.add(text(x - 8.0, y + 16.0, format!("{decade}")));
            let (x, y) = self.at(low, decade);
            picture = picture.add(text(x - 44.0, y + 4.0, format!("{decade}")));
            decade *= 10.0;
        }
        for (factor, colour) in [(1.0, "#000000"), (RIGHT, "#999999"), (RIGHT.recip(), "#999999")] {
            picture = picture.add(self.ratio(factor, colour));
        }
        for (pair, colour) in points {
            let (x, y) = self.at(pair.promised, pair.measured);
            let point = Circle::new().set("cx", x).set("cy", y).set("r", 3).set("fill", *colour);
            picture = picture.add(point.set("fill-opacity", 0.7));
        }
        let right = points.iter().filter(|(pair, _)| pair.is_right()).count();
        picture
            .add(text(
                self.left + MARGIN,
                MARGIN - 16.0,
                format!("{title}: {right} of {} within {RIGHT} x", points.len()),
            ))
            .add(text(self.left + PANEL / 2.0 - 60.0, PANEL - 16.0, "promised, ms (across)".to_owned()))
            .add(text(self.left + 8.0, MARGIN - 36.0, "measured, ms (up)".to_owned()))
    }
}

/// Two panels, of pauses and of times, with the diagonal and the bounds of what counts as right.
#[must_use]
pub fn picture(outcomes: &[Outcome]) -> String {
    let moves = done(outcomes);
    let colour = |one: &Move| MODES.iter().find(|(mode, _)| *mode == one.mode).map_or("#000000", |(_, c)| *c);
    let mut picture = Document::new()
        .set("viewBox", (0, 0, 2.0 * PANEL, PANEL + 24.0))
        .set("xmlns", "http://www.w3.org/2000/svg");
    for (number, (title, of)) in
        [("pause", (|one| one.pause) as fn(&Move) -> Pair), ("time", |one| one.time)].into_iter().enumerate()
    {
        let points: Vec<(Pair, &str)> = moves.iter().map(|one| (of(one), colour(one))).collect();
        let pairs: Vec<Pair> = points.iter().map(|(pair, _)| *pair).collect();
        picture = Panel::over(&pairs, PANEL * number as f64).draw(picture, title, &points);
    }
    for (number, (mode, colour)) in MODES.iter().enumerate() {
        let x = MARGIN + 110.0 * number as f64;
        let point = Circle::new().set("cx", x).set("cy", PANEL + 8.0).set("r", 4).set("fill", *colour);
        picture = picture.add(point).add(text(x + 8.0, PANEL + 12.0, (*mode).to_owned()));
    }
    picture.to_string()
}

fn line(from: (f64, f64), to: (f64, f64), colour: &str) -> Line {
    Line::new().set("x1", from.0).set("y1", from.1).set("x2", to.0).set("y2", to.1).set("stroke", colour)
}

fn text(x: f64, y: f64, words: String) -> Text {
    Text::new(words).set("x", x).set("y", y).set("font-size", 12).set("font-family", "sans-serif")
}
