//! A plot of measurements as SVG.

use svg::Document;
use svg::node::element::{Circle, Line, Polyline, Text};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
const MARGIN: f64 = 60.0;

/// A logarithmic axis over whole decades.
struct Axis {
    /// Powers of ten at its ends.
    low: f64,
    high: f64,
    /// Pixels at its ends.
    from: f64,
    to: f64,
}

impl Axis {
    /// One on which all values have their place.
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (low, high) = values
            .filter(|value| *value > 0.0)
            .fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low > high { (1.0, 10.0) } else { (low, high) };
        let low = low.log10().floor();
        Self { low, high: high.log10().ceil().max(low + 1.0), from, to }
    }

    fn pixel(&self, value: f64) -> f64 {
        self.from + (value.log10() - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// Powers of ten, for grid lines.
    fn decades(&self) -> impl Iterator<Item = f64> + use<> {
        let (low, high) = (self.low, self.high);
        std::iter::successors(Some(low), |decade| Some(decade + 1.0))
            .take_while(move |decade| *decade <= high)
            .map(|decade| 10_f64.powf(decade))
    }
}

/// Points (both coordinates above 0) as a line; both axes are logarithmic.
#[must_use]
pub fn plot(x_label: &str, y_label: &str, points: &[(f64, f64)]) -> String {
    let x_axis = Axis::over(points.iter().map(|point| point.0), MARGIN, WIDTH - MARGIN);
    let y_axis = Axis::over(points.iter().map(|point| point.1), HEIGHT - MARGIN, MARGIN);
    let mut picture =
        Document::new().set("viewBox", (0, 0, WIDTH, HEIGHT)).set("xmlns", "http://www.w3.org/2000/svg");
    for value in x_axis.decades() {
        let x = x_axis.pixel(value);
        picture = picture.add(grid_line((x, MARGIN), (x, HEIGHT - MARGIN)));
        picture = picture.add(text(x - 10.0, HEIGHT - MARGIN + 18.0, format!("{value}")));
    }
    for value in y_axis.decades() {
        let y = y_axis.pixel(value);
        picture = picture.add(grid_line((MARGIN, y), (WIDTH - MARGIN, y)));
        picture = picture.add(text(MARGIN - 40.0, y + 4.0, format!("{value}")));
    }
    let pixels: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x_axis.pixel(*x), y_axis.pixel(*y))).collect();
    let path: Vec<String> = pixels.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let line = Polyline::new().set("points", path.join(" ")).set("fill", "none");
    picture = picture.add(line.set("stroke", "#06c").set("stroke-width", 2));
    for ((x, y), (_, value)) in pixels.into_iter().zip(points) {
        picture = picture.add(Circle::new().set("cx", x).set("cy", y).set("r", 4).set("fill", "#06c"));
        picture = picture.add(text(x + 6.0, y - 6.0, format!("{value:.1}")));
    }
    picture
        .add(text(WIDTH / 2.0, HEIGHT - 16.0, x_label.to_owned()))
        .add(text(12.0, MARGIN - 16.0, y_label.to_owned()))
        .to_string()
}

fn text(x: f64, y: f64, words: String) -> Text {
    Text::new(words).set("x", x).set("y", y).set("font-size", 12).set("font-family", "sans-serif")
}

fn grid_line(from: (f64, f64), to: (f64, f64)) -> Line {
    Line::new().set("x1", from.0).set("y1", from.1).set("x2", to.0).set("y2", to.1).set("stroke", "#ccc")
}
