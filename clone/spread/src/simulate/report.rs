//! Outcomes for people: a table and a picture.

use std::fmt::Write;

use svg::Document;
use svg::node::element::{Line, Polyline, Rectangle, Text};

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

const COLOURS: [&str; 4] = ["#0b6e99", "#c2571a", "#3d7a2e", "#7a3d8f"];

/// Hosts that have everything, over time.
pub(super) fn picture(outcomes: &[Outcome]) -> String {
    let (left, top, width, height) = (60.0, 20.0, 640.0, 300.0);
    let longest = outcomes.iter().map(|outcome| outcome.complete.1).fold(1e-9, f64::max);
    let text = |x: f64, y: f64, anchor: &str, label: String| {
        Text::new(label).set("x", x).set("y", y).set("text-anchor", anchor).set("font-size", 12)
    };
    let mut document = Document::new()
        .set("viewBox", (0, 0, 720, 380))
        .set("font-family", "sans-serif")
        .add(Rectangle::new().set("width", 720).set("height", 380).set("fill", "white"));
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let (x, y) = (left + width * part, top + height * (1.0 - part));
        let line = Line::new().set("x1", left).set("x2", left + width).set("y1", y).set("y2", y);
        document = document
            .add(line.set("stroke", "#dddddd"))
            .add(text(left - 6.0, y + 4.0, "end", format!("{:.0} %", part * 100.0)))
            .add(text(x, top + height + 16.0, "middle", format!("{:.3} s", longest * part)));
    }
    for (index, outcome) in outcomes.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let mut points: Vec<String> = Vec::new();
        let place = |time: f64, part: f64| {
            format!("{:.1},{:.1}", left + width * time / longest, top + height * (1.0 - part))
        };
        let mut before = 0.0;
        for (time, part) in &outcome.progress {
            points.push(place(*time, before));
            points.push(place(*time, *part));
            before = *part;
        }
        let line = Polyline::new().set("points", points.join(" ")).set("fill", "none");
        #[allow(clippy::cast_precision_loss)]
        let x = left + 150.0 * index as f64;
        document = document
            .add(line.set("stroke", colour).set("stroke-width", 2))
            .add(text(x, top + height + 44.0, "start", outcome.way.to_string()).set("fill", colour));
    }
    document.to_string()
}
