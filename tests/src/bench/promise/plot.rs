//! What was measured over what was promised, as SVG.

use svg::node::element::Circle;
use vmove_picture::{MARGIN, Sheet, WIDTH, count, decades, fitting, tenth, text, text_around, text_to};

use super::{Move, Outcome, Pair, RIGHT, done};

/// Width of a panel with its numbers, and of what is between its axes.
const PANEL: f64 = (WIDTH - 2.0 * MARGIN) / 2.0;
const LEFT: f64 = 64.0;
const INSIDE: f64 = PANEL - LEFT - 44.0;
const TOP: f64 = 104.0;
const TITLE: &str = "Promised and measured";
/// Modes, each in a colour of its own: blue, green and orange.
const MODES: [(&str, &str); 3] = [("precopy", "v-c0"), ("hybrid", "v-c2"), ("postcopy", "v-c1")];

const STYLE: &str = "
.v-same{stroke:#59636e}.v-right{stroke:#59636e;stroke-dasharray:4 3}.v-point{fill-opacity:.7}
@media (prefers-color-scheme:dark){.v-same,.v-right{stroke:#9da7b1}}
";

/// A panel: both axes are logarithmic, and the same.
struct Panel {
    /// Pixels of its left edge.
    left: f64,
    /// Powers of ten at its ends.
    low: i32,
    high: i32,
}

impl Panel {
    fn over(pairs: &[Pair], left: f64) -> Self {
        let (low, high) = decades(pairs.iter().flat_map(|pair| [pair.promised, pair.measured]));
        Self { left, low, high }
    }

    /// Where a figure is between the ends of an axis, 0 to 1.
    fn share(&self, value: f64) -> f64 {
        (value.log10() - f64::from(self.low)) / f64::from(self.high - self.low)
    }

    fn at(&self, promised: f64, measured: f64) -> (f64, f64) {
        (self.left + LEFT + self.share(promised) * INSIDE, TOP + (1.0 - self.share(measured)) * INSIDE)
    }

    /// The line on which measured is so many times promised, named where it ends.
    fn ratio(&self, sheet: &mut Sheet, factor: f64, class: &str, name: &str) {
        let (low, high) = (10_f64.powi(self.low), 10_f64.powi(self.high));
        let from = self.at(low.max(low / factor), low.max(low * factor));
        let to = self.at(high.min(high / factor), high.min(high * factor));
        sheet.line(class, from, to);
        if factor > 1.0 {
            sheet.add(text_around(to.0, to.1 - 4.0, "v-soft", 11, name));
        } else {
            sheet.words(to.0 + 4.0, to.1 + 4.0, "v-soft", 11, name);
        }
    }

    fn axes(&self, sheet: &mut Sheet) {
        let (low, high) = (10_f64.powi(self.low), 10_f64.powi(self.high));
        for exponent in self.low..=self.high {
            let decade = 10_f64.powi(exponent);
            sheet.line("v-rule", self.at(decade, low), self.at(decade, high));
            sheet.line("v-rule", self.at(low, decade), self.at(high, decade));
            let (x, y) = self.at(decade, low);
            sheet.add(text_around(x, y + 16.0, "v-soft", 12, &format!("{decade}")));
            let (x, y) = self.at(low, decade);
            sheet.add(text_to(x - 8.0, y + 4.0, "v-soft", 12, &format!("{decade}")));
        }
        let across = self.left + LEFT + INSIDE / 2.0;
        sheet.add(text_around(across, TOP + INSIDE + 36.0, "v-soft", 12, "promised, ms"));
        sheet.words(self.left, TOP - 10.0, "v-soft", 12, "measured, ms");
    }

    fn draw(&self, sheet: &mut Sheet, title: &str, points: &[(Pair, &str)]) {
        let right = points.iter().filter(|(pair, _)| pair.is_right()).count();
        let said = format!("{title}: {right} of {} within {RIGHT} x", points.len());
        let said = fitting(&said, 13, PANEL - LEFT);
        sheet.words(self.left + LEFT, TOP - 26.0, "v-ink v-bold", 13, &said);
        self.axes(sheet);
        let bound = format!("{RIGHT} x");
        self.ratio(sheet, 1.0, "v-same", "same");
        self.ratio(sheet, RIGHT, "v-right", &bound);
        self.ratio(sheet, RIGHT.recip(), "v-right", &bound);
        for (pair, class) in points.iter().filter(|(pair, _)| pair.promised > 0.0 && pair.measured > 0.0) {
            let (x, y) = self.at(pair.promised, pair.measured);
            let point = Circle::new().set("class", format!("v-point {class}")).set("cx", tenth(x));
            sheet.add(point.set("cy", tenth(y)).set("r", 3));
        }
    }
}

/// Two panels, of pauses and of times, with the diagonal and the bounds of what counts as right.
#[must_use]
pub fn picture(outcomes: &[Outcome]) -> String {
    let moves = done(outcomes);
    let colour = |one: &Move| MODES.iter().find(|(mode, _)| *mode == one.mode).map_or("v-ink", |(_, c)| *c);
    let mut sheet = Sheet::default();
    sheet.words(MARGIN, 32.0, "v-ink v-bold", 16, TITLE);
    let mut x = MARGIN;
    for (mode, class) in MODES {
        sheet.add(Circle::new().set("class", class).set("cx", x + 4.0).set("cy", 50).set("r", 4));
        sheet.add(text(x + 14.0, 54.0, "v-ink", 12, mode));
        x += 110.0;
    }
    for (number, (title, of)) in
        [("pause", (|one| one.pause) as fn(&Move) -> Pair), ("time", |one| one.time)].into_iter().enumerate()
    {
        let points: Vec<(Pair, &str)> = moves.iter().map(|one| (of(one), colour(one))).collect();
        let pairs: Vec<Pair> = points.iter().map(|(pair, _)| *pair).collect();
        Panel::over(&pairs, MARGIN + PANEL * count(number)).draw(&mut sheet, title, &points);
    }
    sheet.finish(TITLE, (WIDTH, TOP + INSIDE + 36.0 + MARGIN), STYLE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::promise::{Drawn, Link};
    use crate::blows::deck::Dice;
    use vmove_picture::check::faults;

    #[test]
    fn figures_are_beside_what_counts_as_right() {
        let moved = |mode: &str, measured: f64| {
            Outcome::Moved(Box::new(Move {
                guest: Drawn::new(&mut Dice::from(1)),
                link: Link { limit_mib: None, mode: "auto" },
                mode: mode.to_owned(),
                known: 1,
                pause: Pair { promised: 10.0, measured },
                pause_up_to: Pair { promised: 12.0, measured },
                time: Pair { promised: 100.0, measured: measured * 400.0 },
                basis: String::new(),
            }))
        };
        let all = [moved("hybrid", 14.9), moved("precopy", 15.1), Outcome::Refused(String::new())];
        let svg = picture(&all);
        assert_eq!(faults(&svg), Vec::<String>::new());
        for words in ["pause: 1 of 2 within 1.5 x", "\n1.5 x\n", "\nsame\n", "measured, ms", "promised, ms"] {
            assert!(svg.contains(words), "{words}");
        }
        assert_eq!(svg.matches("v-point v-c2").count(), 2);
        assert_eq!(faults(&picture(&[])), Vec::<String>::new());
    }
}
