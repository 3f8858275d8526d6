//! Pictures of the guest's throughput over time: one line per mode.

use std::fmt::Write as _;

use super::measure::{Load, Row};
use super::mover::Backing;

const WIDTH: f64 = 960.0;
const PANEL: f64 = 240.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 210.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 45.0;
/// Colours that are readable on white and that people with colour blindness can tell apart (after Okabe and Ito).
const COLOURS: [&str; 13] = [
    "#999999", "#000000", "#56b4e9", "#0072b2", "#cc79a7", "#8f4a78", "#e69f00", "#009e73", "#d55e00",
    "#e69f00", "#009e73", "#d55e00", "#b8a800",
];

/// For each backing and load: one panel with QEMU's modes and one with vmove's, on the same time scale, with one line per mode.
/// Time 0 is the request.
#[must_use]
pub fn picture(rows: &[Row], title: &str) -> String {
    let mut cases: Vec<(Backing, Load)> = rows.iter().map(|row| (row.case.backing, row.case.load)).collect();
    cases.dedup();
    let mut panels = Vec::new();
    for (backing, load) in cases {
        let all = || rows.iter().filter(|row| (row.case.backing, row.case.load) == (backing, load));
        let ends = all().filter_map(|row| row.median.as_ref()?.throughput.last()).map(|(at, _)| *at);
        let longest = ends.fold(100.0, f64::max);
        for (whose, vmove) in [("QEMU's own modes", false), ("vmove", true)] {
            let mine: Vec<_> = all().filter(|row| row.case.mode.is_vmove() == vmove).collect();
            if !mine.is_empty() {
                let title = format!("{}, guest load: {}; {whose}", backing.name(), load.label());
                panels.push((mine, title, longest));
            }
        }
    }
    let height = PANEL * panels.len() as f64 + 30.0;
    let mut svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}' \
         font-family='sans-serif' font-size='12'>\n<rect width='100%' height='100%' fill='white'/>\n\
         <text x='{LEFT}' y='20' font-size='14' font-weight='bold'>{}</text>\n",
        escape(title)
    );
    for (number, (rows, title, longest)) in panels.iter().enumerate() {
        panel(&mut svg, rows, title, *longest, PANEL * number as f64 + 20.0);
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel(svg: &mut String, rows: &[&Row], title: &str, longest: f64, y: f64) {
    let lines: Vec<_> = rows.iter().filter_map(|row| Some((row.case.mode, row.median.as_ref()?))).collect();
    // As a part of the full rate, so that all lines begin at the same height. After a stall a guest may exceed it a little.
    let (plot_width, plot_height) = (WIDTH - LEFT - RIGHT, PANEL - TOP - BOTTOM);
    let from = -200.0;
    let x = |at: f64| LEFT + (at - from) / (longest - from) * plot_width;
    let up = |share: f64| y + TOP + plot_height * (1.0 - share.clamp(0.0, 1.25) / 1.25);
    let _ = writeln!(
        svg,
        "<text x='{LEFT}' y='{:.0}' font-weight='bold'>{}</text>",
        y + TOP - 10.0,
        escape(title)
    );
    for percent in [0, 25, 50, 75, 100] {
        let at = up(f64::from(percent) / 100.0);
        let _ = writeln!(
            svg,
            "<line x1='{LEFT}' x2='{:.1}' y1='{at:.1}' y2='{at:.1}' stroke='#dddddd'/>\
             <text x='{:.1}' y='{:.1}' text-anchor='end'>{percent} %</text>",
            LEFT + plot_width,
            LEFT - 6.0,
            at + 4.0
        );
    }
    let step = nice_step((longest - from) / 8.0);
    let mut tick = 0.0;
    while tick <= longest {
        let _ = writeln!(
            svg,
            "<line x1='{0:.1}' x2='{0:.1}' y1='{1:.1}' y2='{2:.1}' stroke='#eeeeee'/>\
             <text x='{0:.1}' y='{3:.1}' text-anchor='middle'>{4} s</text>",
            x(tick),
            up(1.25),
            up(0.0),
            up(0.0) + 16.0,
            tick / 1000.0
        );
        tick += step;
    }
    for (number, (mode, outcome)) in lines.iter().enumerate() {
        let colour = COLOURS[*mode as usize % COLOURS.len()];
        let points: Vec<_> = outcome
            .throughput
            .iter()
            .filter(|(at, _)| *at >= from)
            .map(|(at, rate)| format!("{:.1},{:.1}", x(*at), up(rate / outcome.full_rate)))
            .collect();
        let dashes = if mode.is_aligned() { " stroke-dasharray='5,3'" } else { "" };
        let legend = y + TOP + 14.0 * number as f64 + 8.0;
        let _ = writeln!(
            svg,
            "<polyline fill='none' stroke='{colour}' stroke-width='1.3'{dashes} points='{}'/>\
             <line x1='{1:.0}' x2='{2:.0}' y1='{3:.0}' y2='{3:.0}' stroke='{colour}' stroke-width='3'{dashes}/>\
             <text x='{4:.0}' y='{5:.0}'>{6}</text>",
            points.join(" "),
            WIDTH - RIGHT + 15.0,
            WIDTH - RIGHT + 35.0,
            legend,
            WIDTH - RIGHT + 40.0,
            legend + 4.0,
            escape(mode.label())
        );
    }
}

/// 1, 2 or 5 times a power of ten, at least `wanted`.
fn nice_step(wanted: f64) -> f64 {
    let power = 10_f64.powf(wanted.max(1.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|step| step * power)
        .find(|step| *step >= wanted)
        .unwrap_or(power * 10.0)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::{Case, Outcome};
    use crate::bench::mover::Mode;

    #[test]
    fn steps_are_round() {
        for (wanted, step) in [(0.3, 1.0), (1.0, 1.0), (130.0, 200.0), (201.0, 500.0), (999.0, 1000.0)] {
            assert!((nice_step(wanted) - step).abs() < 1e-9, "{wanted}: {}", nice_step(wanted));
        }
    }

    #[test]
    fn a_picture_has_a_line_and_a_name_for_each_mode() {
        let rows: Vec<_> = [Mode::QemuPrecopy, Mode::VmoveHybrid]
            .into_iter()
            .map(|mode| {
                let case = Case {
                    mode,
                    backing: Backing::Thp,
                    load: Load::Steady,
                    memory_mib: 1024,
                    working_set_mib: 512,
                    qemu: "q".into(),
                    cold_memory: false,
                };
                let throughput = (-20..200).map(|i| (f64::from(i) * 10.0, 1e5)).collect();
                Row::new(case, vec![Ok(Outcome { throughput, full_rate: 1e5, ..Outcome::default() })])
            })
            .collect();
        let svg = picture(&rows, "a < b");
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("vmove hybrid") && svg.contains("QEMU pre-copy") && svg.contains("a &lt; b"));
        assert!(!svg.contains("NaN"), "{svg}");
    }
}
