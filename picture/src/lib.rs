//! What all pictures share: paper and colours for light and dark screens, texts that fit, scales.

#[cfg(any(test, feature = "check"))]
pub mod check;
pub mod plot;
mod scale;

use svg::node::element::{Group, Line, Polyline, Rectangle, Style, Text, Title};
use svg::{Document, Node as _};

pub use scale::{apart, decades, round_step};

/// Width of most pictures. Unit: pixels, as all lengths here.
pub const WIDTH: f64 = 960.0;
/// Free at each edge.
pub const MARGIN: f64 = 20.0;
/// Colours that differ, `v-c0` to `v-c5` for areas and `v-l0` to `v-l5` for lines; the first four are readable as words, too.
pub const COLOURS: usize = 6;
/// Width of a character, in sizes of its font: of a wide one, so that less is drawn than there is room for.
const CHARACTER: f64 = 0.62;

/// Colours after Okabe and Ito, lighter on dark: people with colour blindness can tell them apart.
const STYLE: &str = "
.v-paper{fill:#ffffff}.v-ink{fill:#1b1f24}.v-soft{fill:#59636e}.v-rule{stroke:#d1d9e0}.v-bad{fill:#b3261e}
.v-line{fill:none;stroke-width:2}.v-bold{font-weight:600}
.v-c0{fill:#0072b2}.v-c1{fill:#c04f00}.v-c2{fill:#007a59}.v-c3{fill:#8f4a78}.v-c4{fill:#56b4e9}.v-c5{fill:#e69f00}
.v-l0{stroke:#0072b2}.v-l1{stroke:#c04f00}.v-l2{stroke:#007a59}.v-l3{stroke:#8f4a78}.v-l4{stroke:#56b4e9}.v-l5{stroke:#e69f00}
@media (prefers-color-scheme:dark){
.v-paper{fill:#15191e}.v-ink{fill:#e6edf3}.v-soft{fill:#9da7b1}.v-rule{stroke:#3a424b}.v-bad{fill:#ff8f87}
.v-c0{fill:#4aa3e0}.v-c1{fill:#f0883e}.v-c2{fill:#2bc596}.v-c3{fill:#d7a0c4}.v-c4{fill:#b5dcf5}.v-c5{fill:#f2d05c}
.v-l0{stroke:#4aa3e0}.v-l1{stroke:#f0883e}.v-l2{stroke:#2bc596}.v-l3{stroke:#d7a0c4}.v-l4{stroke:#b5dcf5}.v-l5{stroke:#f2d05c}
}
";

/// Shapes that become one picture. Texts of others are nodes of their own, which are escaped; attributes would not be.
#[derive(Debug)]
pub struct Sheet {
    shapes: Group,
}

impl Default for Sheet {
    fn default() -> Self {
        Self { shapes: Group::new() }
    }
}

impl Sheet {
    /// Draws a shape over those before.
    pub fn add(&mut self, shape: impl svg::Node) {
        self.shapes.append(shape);
    }

    /// Writes words, beginning at `x`.
    pub fn words(&mut self, x: f64, y: f64, class: &str, size: u32, words: &str) {
        self.add(text(x, y, class, size, words));
    }

    /// Draws a straight line.
    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let line = Line::new().set("class", class).set("x1", tenth(from.0)).set("y1", tenth(from.1));
        self.add(line.set("x2", tenth(to.0)).set("y2", tenth(to.1)));
    }

    /// Draws a line through points.
    pub fn polyline(&mut self, class: &str, points: &[(f64, f64)]) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.add(Polyline::new().set("class", class).set("points", points.join(" ")));
    }

    /// The picture, on paper of `width` and `height`; `style` is for classes of its own.
    #[must_use]
    pub fn finish(self, title: &str, (width, height): (f64, f64), style: &str) -> String {
        let (width, height) = (width.ceil(), height.ceil());
        let paper = Rectangle::new().set("class", "v-paper").set("width", width).set("height", height);
        Document::new()
            .set("viewBox", (0, 0, width, height))
            .set("width", width)
            .set("height", height)
            .set("role", "img")
            .set("font-family", "system-ui, sans-serif")
            .add(Title::new(title))
            .add(Style::new(format!("{STYLE}{style}")))
            .add(paper)
            .add(self.shapes)
            .to_string()
    }
}

/// Words that begin at `x`.
#[must_use]
pub fn text(x: f64, y: f64, class: &str, size: u32, words: &str) -> Text {
    Text::new(words).set("class", class).set("x", tenth(x)).set("y", tenth(y)).set("font-size", size)
}

/// Words that end at `x`.
#[must_use]
pub fn text_to(x: f64, y: f64, class: &str, size: u32, words: &str) -> Text {
    text(x, y, class, size, words).set("text-anchor", "end")
}

/// Words around `x`.
#[must_use]
pub fn text_around(x: f64, y: f64, class: &str, size: u32, words: &str) -> Text {
    text(x, y, class, size, words).set("text-anchor", "middle")
}

/// Rounded to a tenth, which is enough for drawing.
#[must_use]
pub fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// How wide words may be.
#[must_use]
pub fn width_of(words: &str, size: u32) -> f64 {
    count(words.chars().count()) * CHARACTER * f64::from(size)
}

/// A number of things as a factor.
#[must_use]
pub fn count(things: usize) -> f64 {
    u32::try_from(things).map_or(f64::from(u32::MAX), f64::from)
}

/// Words that are not wider than `room`: cut in their middle, because names often differ in their ends.
#[must_use]
pub fn fitting(words: &str, size: u32, room: f64) -> String {
    let all = words.chars().count();
    let fits = (1..=all).rev().find(|most| count(*most) * CHARACTER * f64::from(size) <= room).unwrap_or(0);
    if fits == all {
        return words.to_owned();
    }
    let kept = fits.saturating_sub(1);
    let head = kept.div_ceil(2);
    words.chars().take(head).chain(['…']).chain(words.chars().skip(all - (kept - head))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_words_are_cut_in_their_middle() {
        assert_eq!(fitting("short", 10, 100.0), "short");
        assert_eq!(fitting("gpu-node-rack10-0036", 10, 62.0), "gpu-n…0036");
        assert!(width_of(&fitting("gpu-node-rack10-0036", 10, 62.0), 10) <= 62.0);
        assert_eq!(fitting("anything", 10, 0.0), "…");
        assert_eq!(fitting("", 10, 0.0), "");
    }
}
