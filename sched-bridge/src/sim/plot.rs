//! A plot of measurements as SVG, both axes logarithmic.

use svg::Document;
use svg::node::element::{Circle, Line, Polyline, Text};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
const MARGIN: f64 = 60.0;

/// Points (both coordinates above 0) as a line, with the labels of the axes.
#[must_use]
pub fn plot(x_label: &str, y_label: &str, points: &[(f64, f64)]) -> String {
    let decades = |values: &mut dyn Iterator<Item = f64>| {
        let (low, high) = values
            .filter(|value| *value > 0.0)
            .fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low > high { (1.0, 10.0) } else { (low, high) };
        (low.log10().floor(), (high.log10().ceil()).max(low.log10().floor() + 1.0))
    };
    let (x_low, x_high) = decades(&mut points.iter().map(|point| point.0));
    let (y_low, y_high) = decades(&mut points.iter().map(|point| point.1));
    let at_x = |value: f64| MARGIN + (value.log10() - x_low) / (x_high - x_low) * (WIDTH - 2.0 * MARGIN);
    let at_y =
        |value: f64| HEIGHT - MARGIN - (value.log10() - y_low) / (y_high - y_low) * (HEIGHT - 2.0 * MARGIN);
    let text = |x: f64, y: f64, words: String| {
        Text::new(words).set("x", x).set("y", y).set("font-size", 12).set("font-family", "sans-serif")
    };
    let line = |from: (f64, f64), to: (f64, f64)| {
        Line::new().set("x1", from.0).set("y1", from.1).set("x2", to.0).set("y2", to.1).set("stroke", "#ccc")
    };
    let mut picture =
        Document::new().set("viewBox", (0, 0, WIDTH, HEIGHT)).set("xmlns", "http://www.w3.org/2000/svg");
    let mut decade = x_low;
    while decade <= x_high {
        let value = 10_f64.powf(decade);
        let x = at_x(value);
        picture = picture.add(line((x, MARGIN), (x, HEIGHT - MARGIN))).add(text(
            x - 10.0,
            HEIGHT - MARGIN + 18.0,
            format!("{value}"),
        ));
        decade += 1.0;
    }
    let mut decade = y_low;
    while decade <= y_high {
        let value = 10_f64.powf(decade);
        let y = at_y(value);
        picture = picture.add(line((MARGIN, y), (WIDTH - MARGIN, y))).add(text(
            MARGIN - 40.0,
            y + 4.0,
            format!("{value}"),
        ));
        decade += 1.0;
    }
    let way: Vec<String> = points.iter().map(|(x, y)| format!("{:.1},{:.1}", at_x(*x), at_y(*y))).collect();
    picture = picture.add(
        Polyline::new()
            .set("points", way.join(" "))
            .set("fill", "none")
            .set("stroke", "#06c")
            .set("stroke-width", 2),
    );
    for (x, y) in points {
        let dot = Circle::new().set("cx", at_x(*x)).set("cy", at_y(*y)).set("r", 4).set("fill", "#06c");
        picture = picture.add(dot).add(text(at_x(*x) + 6.0, at_y(*y) - 6.0, format!("{y:.1}")));
    }
    picture
        .add(text(WIDTH / 2.0, HEIGHT - 16.0, x_label.to_owned()))
        .add(text(12.0, MARGIN - 16.0, y_label.to_owned()))
        .to_string()
}
