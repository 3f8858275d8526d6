//! An account as a picture, for light and dark screens.

use svg::node::element::{Group, Line, Polyline, Rectangle, Style, Text, Title};
use svg::{Document, Node as _};
use vmove_types::report::{PhaseTime, ProgressPoint};
use vmove_types::units::{format_bytes, format_ms, format_rate, to_f64};

use super::account::{Account, TimeLine, time};
use super::text::rates;

const WIDTH: f64 = 960.0;
const MARGIN: f64 = 20.0;
/// Where scales begin and end.
const LEFT: f64 = 220.0;
const RIGHT: f64 = 840.0;
const ROW: f64 = 22.0;
const CHART: f64 = 140.0;
/// Characters of a name, of a line.
const NAME: usize = 30;
const LINE: usize = 120;
/// Phases in which the guest stands still.
const STILL: [&str; 2] = ["switchover", "hand-over"];

/// Colours after Okabe and Ito, lighter on dark: people with colour blindness can tell them apart.
pub const STYLE: &str = "
.v-paper{fill:#ffffff}.v-ink{fill:#1b1f24}.v-soft{fill:#59636e}.v-rule{stroke:#d1d9e0}
.v-bar{fill:#0072b2}.v-tick{stroke:#0072b2}.v-still{fill:#d55e00;stroke:#d55e00}
.v-band{fill:#d55e00;fill-opacity:.25}.v-rate{stroke:#0072b2}.v-left{stroke:#8f4a78}
.v-rate-ink{fill:#0072b2}.v-left-ink{fill:#8f4a78}.v-bad{fill:#b3261e}
.v-line{fill:none;stroke-width:2}
@media (prefers-color-scheme:dark){
.v-paper{fill:#15191e}.v-ink{fill:#e6edf3}.v-soft{fill:#9da7b1}.v-rule{stroke:#3a424b}
.v-bar{fill:#56b4e9}.v-tick{stroke:#56b4e9}.v-still{fill:#f0883e;stroke:#f0883e}
.v-band{fill:#f0883e}.v-rate{stroke:#56b4e9}.v-left{stroke:#d7a0c4}
.v-rate-ink{fill:#56b4e9}.v-left-ink{fill:#d7a0c4}.v-bad{fill:#ff8f87}
}
";

/// Draws it.
pub fn draw(account: &Account) -> String {
    let mut picture = Picture { shapes: Group::new(), y: 36.0 };
    picture.words(MARGIN, "v-ink", 18, &shortened(&account.title, LINE * 2 / 3));
    picture.y += 22.0;
    picture.words(
        MARGIN,
        if account.bad { "v-bad" } else { "v-soft" },
        13,
        &shortened(&account.standing, LINE),
    );
    picture.y += 16.0;
    if account.over_time.len() > 1 {
        picture.over_time(&account.over_time, account.stood_still, longest(account));
    }
    for line in &account.time_lines {
        picture.time_line(line);
    }
    picture.amounts(&account.bytes);
    let height = picture.y + MARGIN;
    let paper = Rectangle::new().set("class", "v-paper").set("width", WIDTH).set("height", height);
    Document::new()
        .set("viewBox", (0, 0, WIDTH, height))
        .set("width", WIDTH)
        .set("height", height)
        .set("role", "img")
        .set("font-family", "system-ui, sans-serif")
        .add(Title::new(&account.title))
        .add(Style::new(STYLE))
        .add(paper)
        .add(picture.shapes)
        .to_string()
}

/// The end of the scale that all of it shares.
fn longest(account: &Account) -> f64 {
    let line = account.time_lines.first().map_or(0.0, TimeLine::end_ms);
    account.over_time.last().map_or(line, |last| line.max(last.at_ms))
}

/// A picture that grows downwards. Texts of others are nodes of their own, which are escaped; attributes would not be.
struct Picture {
    shapes: Group,
    y: f64,
}

/// A scale from 0 to `end` across the picture.
#[derive(Clone, Copy)]
struct Scale {
    end: f64,
}

impl Scale {
    fn x(self, value: f64) -> f64 {
        LEFT + self.length(value)
    }

    fn length(self, value: f64) -> f64 {
        if self.end > 0.0 { (RIGHT - LEFT) * (value / self.end).clamp(0.0, 1.0) } else { 0.0 }
    }
}

impl Picture {
    fn add(&mut self, shape: impl svg::Node) {
        self.shapes.append(shape);
    }

    fn words(&mut self, x: f64, class: &str, size: u32, words: &str) {
        self.add(text(x, self.y, class, size, words));
    }

    fn heading(&mut self, title: &str, note: &str) {
        self.y += 30.0;
        self.words(MARGIN, "v-ink", 14, &shortened(title, NAME));
        if !note.is_empty() {
            self.add(text(LEFT, self.y, "v-soft", 12, &shortened(note, LINE)));
        }
        self.y += 10.0;
    }

    fn time_line(&mut self, line: &TimeLine) {
        self.heading(&line.title, &line.note);
        let scale = Scale { end: line.end_ms() };
        let rows = u32::try_from(line.steps.len()).map_or(0.0, f64::from);
        self.ticks(scale, ROW * rows);
        for step in &line.steps {
            self.step(scale, step);
        }
        self.y += 18.0;
    }

    fn step(&mut self, scale: Scale, step: &PhaseTime) {
        let still = if STILL.contains(&step.name.as_str()) { " v-still" } else { "" };
        let (x, took) = (scale.x(step.start_ms), time(step.duration_ms));
        let title = Title::new(format!("{}: {took}, from {} on", step.name, time(step.start_ms)));
        let bar = Rectangle::new().set("class", format!("v-bar{still}")).set("x", x).set("y", self.y + 4.0);
        let bar = bar.set("width", scale.length(step.duration_ms)).set("height", ROW - 8.0);
        self.add(bar.add(title));
        // A step that is too short for a bar is seen, too.
        let tick = Line::new().set("class", format!("v-tick{still}")).set("x1", x).set("x2", x);
        self.add(tick.set("y1", self.y + 4.0).set("y2", self.y + ROW - 4.0));
        self.row(&step.name, &took);
    }

    /// The name and the figure of a row, below which the next begins.
    fn row(&mut self, name: &str, figure: &str) {
        let at = self.y + ROW - 7.0;
        self.add(text(MARGIN, at, "v-ink", 12, &shortened(name, NAME)));
        self.add(text(RIGHT + 12.0, at, "v-ink", 12, figure));
        self.y += ROW;
    }

    /// Lines and times below what is `height` high from here on.
    fn ticks(&mut self, scale: Scale, height: f64) {
        let step = round_step(scale.end / 5.0);
        let mut at = 0.0;
        while at <= scale.end && step > 0.0 {
            let x = scale.x(at);
            let rule = Line::new().set("class", "v-rule").set("x1", x).set("x2", x);
            self.add(rule.set("y1", self.y).set("y2", self.y + height));
            let words = text(x, self.y + height + 14.0, "v-soft", 11, &format_ms(at));
            self.add(words.set("text-anchor", "middle"));
            at += step;
        }
    }

    fn over_time(&mut self, points: &[ProgressPoint], stood_still: Option<(f64, f64)>, end: f64) {
        self.heading("Over time", "each line on a scale of its own; the guest stood still in the band");
        let scale = Scale { end };
        self.ticks(scale, CHART);
        if let Some((from, to)) = stood_still {
            let band = Rectangle::new().set("class", "v-band").set("x", scale.x(from)).set("y", self.y);
            let title = Title::new(format!("the guest stood still for {}", format_ms(to - from)));
            let width = scale.length(to - from).max(1.0);
            self.add(band.set("width", width).set("height", CHART).add(title));
        }
        let rates = rates(points);
        let fastest = rates.iter().map(|(_, _, rate)| *rate).fold(0.0, f64::max);
        let most = points.iter().map(|point| point.left_bytes).max().unwrap_or(0);
        let steps = rates.iter().flat_map(|(from, to, rate)| [(*from, *rate), (*to, *rate)]);
        self.line("v-line v-rate", scale, fastest, steps);
        self.line(
            "v-line v-left",
            scale,
            to_f64(most),
            points.iter().map(|p| (p.at_ms, to_f64(p.left_bytes))),
        );
        let (rate, left) = (
            format!("sent, at most {}", format_rate(fastest)),
            format!("left, at most {}", format_bytes(most)),
        );
        self.add(text(MARGIN, self.y + 16.0, "v-rate-ink", 12, &rate));
        self.add(text(MARGIN, self.y + 34.0, "v-left-ink", 12, &left));
        self.y += CHART + 18.0;
    }

    fn line(&mut self, class: &str, scale: Scale, most: f64, points: impl Iterator<Item = (f64, f64)>) {
        let up = |value: f64| self.y + CHART * (1.0 - if most > 0.0 { value / most } else { 0.0 });
        let points: Vec<_> =
            points.map(|(at, value)| format!("{:.1},{:.1}", scale.x(at), up(value))).collect();
        self.add(Polyline::new().set("class", class).set("points", points.join(" ")));
    }

    fn amounts(&mut self, bytes: &[(String, u64)]) {
        if bytes.is_empty() {
            return;
        }
        self.heading("Bytes", "");
        let scale = Scale { end: bytes.iter().map(|(_, bytes)| to_f64(*bytes)).fold(0.0, f64::max) };
        for (name, bytes) in bytes {
            let bar = Rectangle::new().set("class", "v-amount v-bar").set("x", LEFT).set("y", self.y + 4.0);
            let bar = bar.set("width", scale.length(to_f64(*bytes))).set("height", ROW - 8.0);
            self.add(bar.add(Title::new(format!("{name}: {bytes} bytes"))));
            self.row(name, &format_bytes(*bytes));
        }
    }
}

fn text(x: f64, y: f64, class: &str, size: u32, words: &str) -> Text {
    Text::new(words).set("class", class).set("x", x).set("y", y).set("font-size", size)
}

fn shortened(words: &str, most: usize) -> String {
    if words.chars().count() <= most {
        return words.to_owned();
    }
    words.chars().take(most - 1).chain(['…']).collect()
}

/// 1, 2 or 5 times a power of ten: the next that is not less.
fn round_step(least: f64) -> f64 {
    if least <= 0.0 || !least.is_finite() {
        return 0.0;
    }
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|times| times * power)
        .find(|step| *step >= least)
        .unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use roxmltree::{Document, Node};

    use super::super::account::tests::HOSTILE;
    use super::super::tests::{finished, snapshot};
    use super::super::{of_fork, of_migration};
    use super::*;

    fn bars<'a>(xml: &'a Document<'_>) -> Vec<Node<'a, 'a>> {
        let is_bar =
            |node: &Node<'_, '_>| node.attribute("class").is_some_and(|class| class.starts_with("v-bar"));
        xml.descendants().filter(is_bar).collect()
    }

    fn number(node: &Node<'_, '_>, name: &str) -> f64 {
        node.attribute(name).unwrap().parse().unwrap()
    }

    #[test]
    fn bars_are_as_long_as_their_steps_and_where_these_were() {
        let account = of_migration::account(&finished());
        let svg = draw(&account);
        let xml = Document::parse(&svg).unwrap();
        let drawn = bars(&xml);
        let steps: Vec<_> = account
            .time_lines
            .iter()
            .flat_map(|line| line.steps.iter().map(move |step| (step, line.end_ms())))
            .collect();
        assert!(steps.len() > 8 && drawn.len() == steps.len(), "{} of {}", drawn.len(), steps.len());
        for (bar, (step, end)) in drawn.iter().zip(steps) {
            let (x, width) = (number(bar, "x"), number(bar, "width"));
            let across = RIGHT - LEFT;
            assert!((width - across * step.duration_ms / end).abs() < 0.01, "{}: {width}", step.name);
            assert!((x - LEFT - across * step.start_ms / end).abs() < 0.01, "{}: {x}", step.name);
        }
    }

    #[test]
    fn it_is_one_picture_for_light_and_dark() {
        let svg = draw(&of_migration::account(&finished()));
        let xml = Document::parse(&svg).unwrap();
        assert_eq!(xml.root_element().tag_name().name(), "svg");
        assert_eq!(
            xml.descendants()
                .filter(|node| node.has_tag_name("polyline") || node.tag_name().name() == "polyline")
                .count(),
            2
        );
        assert!(svg.contains("prefers-color-scheme:dark") && !svg.contains("http://www.w3.org/1999/xlink"));
        for outside in ["<script", "href=", "@import", "url("] {
            assert!(!svg.contains(outside), "{outside}");
        }
    }

    #[test]
    fn a_hostile_name_is_text() {
        let mut progress = finished();
        HOSTILE.clone_into(&mut progress.vm);
        let vmove_types::progress::Outcome::Done { report } = &mut progress.outcome else { panic!() };
        HOSTILE.clone_into(&mut report.vm);
        HOSTILE.clone_into(&mut report.phases[0].name);
        HOSTILE.clone_into(&mut report.slowest_faults[0].block);
        let svg = draw(&of_migration::account(&progress));
        let xml = Document::parse(&svg).unwrap();
        assert!(!svg.contains("<script") && xml.descendants().all(|node| node.tag_name().name() != "script"));
        let texts: Vec<_> = xml.descendants().filter_map(|node| node.text()).collect();
        assert!(texts.iter().any(|text| text.contains("<script>")), "the name is not shown as it is");
    }

    #[test]
    fn whatever_there_is_is_drawn() {
        let mut none = snapshot();
        none.phases.clear();
        none.elapsed_ms = 0.0;
        let fork = vmove_types::fork_report::ForkProgress::default();
        for account in [
            of_migration::account(&none),
            of_migration::account(&snapshot()),
            of_fork::account(&fork),
            Account::default(),
        ] {
            let svg = draw(&account);
            Document::parse(&svg).unwrap();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn ticks_are_at_round_times() {
        for (least, step) in [(0.7, 1.0), (1.0, 1.0), (130.0, 200.0), (21.0, 50.0), (501.0, 1000.0)] {
            assert!((round_step(least) - step).abs() < 1e-9, "{least}: {}", round_step(least));
        }
        assert!(round_step(0.0).abs() < 1e-9 && round_step(f64::NAN).abs() < 1e-9);
    }
}
