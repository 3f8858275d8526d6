//! An account as a picture, for light and dark screens.

use svg::node::element::{Line, Rectangle, Title};
use vmove_picture::{MARGIN, Sheet, WIDTH, fitting, round_step, text, text_around};
use vmove_types::report::{PhaseTime, ProgressPoint};
use vmove_types::units::{format_bytes, format_ms, format_rate, number_of, to_f64};

use super::account::{Account, STOOD_STILL, TimeLine, time};
use super::text::rates;

/// Where scales begin and end.
const LEFT: f64 = 240.0;
const RIGHT: f64 = 840.0;
const ROW: f64 = 22.0;
const CHART: f64 = 140.0;
/// Room of a name, of what is written from the begin of scales on, of a line.
const NAME: f64 = LEFT - MARGIN - 8.0;
const NOTE: f64 = WIDTH - MARGIN - LEFT;
const LINE: f64 = WIDTH - 2.0 * MARGIN;
/// Phases in which the guest stands still.
const STILL: [&str; 3] = ["switchover", "hand-over", STOOD_STILL];
const ORANGE: &str = "orange: the guest stands still";

const STYLE: &str = "
.v-bar{fill:#0072b2}.v-tick{stroke:#0072b2}.v-still{fill:#d55e00;stroke:#d55e00}
.v-band{fill:#d55e00;fill-opacity:.25}.v-begin{stroke:#d55e00}.v-rate{stroke:#0072b2}.v-left{stroke:#8f4a78}
.v-rate-ink{fill:#0072b2}.v-left-ink{fill:#8f4a78}
@media (prefers-color-scheme:dark){
.v-bar{fill:#56b4e9}.v-tick{stroke:#56b4e9}.v-still{fill:#f0883e;stroke:#f0883e}
.v-band{fill:#f0883e}.v-begin{stroke:#f0883e}.v-rate{stroke:#56b4e9}.v-left{stroke:#d7a0c4}
.v-rate-ink{fill:#56b4e9}.v-left-ink{fill:#d7a0c4}
}
";

/// Draws it.
pub fn draw(account: &Account) -> String {
    let mut picture = Picture { sheet: Sheet::default(), y: 36.0 };
    picture.words(MARGIN, "v-ink", 18, &fitting(&account.title, 18, LINE));
    picture.y += 22.0;
    picture.words(
        MARGIN,
        if account.bad { "v-bad" } else { "v-soft" },
        13,
        &fitting(&account.standing, 13, LINE),
    );
    picture.y += 16.0;
    if account.over_time.len() > 1 {
        picture.over_time(&account.over_time, account.stood_still, longest(account));
    }
    picture.children_over_time(&account.began_to_run, account.stood_still, longest(account));
    for line in &account.time_lines {
        picture.time_line(line);
    }
    picture.amounts(&account.bytes);
    let height = picture.y + MARGIN;
    picture.sheet.finish(&account.title, (WIDTH, height), STYLE)
}

fn is_still(step: &PhaseTime) -> bool {
    STILL.contains(&step.name.as_str())
}

/// A name that fits: without the domain of a host at its end, if there is too little room.
fn row_name(name: &str) -> String {
    let word = name.rsplit(' ').next().unwrap_or_default();
    let domain =
        word.match_indices('.').nth(1).and_then(|_| word.find('.')).map_or(0, |dot| word.len() - dot);
    if fitting(name, 12, NAME) == name {
        return name.to_owned();
    }
    fitting(&name[..name.len() - domain], 12, NAME)
}

/// The end of the scale that all of it shares.
fn longest(account: &Account) -> f64 {
    let line = account.time_lines.first().map_or(0.0, TimeLine::end_ms);
    let last = account
        .over_time
        .last()
        .map(|last| last.at_ms)
        .into_iter()
        .chain(account.began_to_run.last().copied());
    last.fold(line, f64::max)
}

/// A picture that grows downwards.
struct Picture {
    sheet: Sheet,
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
        self.sheet.add(shape);
    }

    fn words(&mut self, x: f64, class: &str, size: u32, words: &str) {
        self.add(text(x, self.y, class, size, words));
    }

    fn heading(&mut self, title: &str, note: &str) {
        self.y += 30.0;
        self.words(MARGIN, "v-ink", 14, &fitting(title, 14, NAME));
        if !note.is_empty() {
            self.add(text(LEFT, self.y, "v-soft", 12, &fitting(note, 12, NOTE)));
        }
        self.y += 10.0;
    }

    fn time_line(&mut self, line: &TimeLine) {
        let stands_still = line.steps.iter().any(is_still);
        let notes = [line.note.as_str(), ORANGE];
        let note = notes.into_iter().take(if stands_still { 2 } else { 1 }).filter(|note| !note.is_empty());
        let note = note.collect::<Vec<_>>().join("; ");
        self.heading(&line.title, &note);
        let scale = Scale { end: line.end_ms() };
        let rows = u32::try_from(line.steps.len()).map_or(0.0, f64::from);
        self.ticks(scale, ROW * rows);
        for step in &line.steps {
            self.step(scale, step);
        }
        self.y += 18.0;
    }

    fn step(&mut self, scale: Scale, step: &PhaseTime) {
        let still = if is_still(step) { " v-still" } else { "" };
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
        self.add(text(MARGIN, at, "v-ink", 12, &row_name(name)));
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
            self.add(text_around(x, self.y + height + 14.0, "v-soft", 11, &format_ms(at)));
            at += step;
        }
    }

    /// A field of curves over time, in which the time is marked when the guest stood still.
    fn chart(&mut self, note: &str, stood_still: Option<(f64, f64)>, end: f64) -> Scale {
        let orange = stood_still.map(|_| format!("; {ORANGE}")).unwrap_or_default();
        self.heading("Over time", &format!("{note}{orange}"));
        let scale = Scale { end };
        self.ticks(scale, CHART);
        if let Some((from, to)) = stood_still {
            let band = Rectangle::new().set("class", "v-band").set("x", scale.x(from)).set("y", self.y);
            let title = Title::new(format!("the guest stood still for {}", format_ms(to - from)));
            let width = scale.length(to - from).max(1.0);
            self.add(band.set("width", width).set("height", CHART).add(title));
            // Pauses are short: where they begin is seen, too.
            let x = scale.x(from);
            self.sheet.line("v-begin", (x, self.y - 4.0), (x, self.y + CHART));
        }
        scale
    }

    /// How many children ran, from the request on.
    fn children_over_time(&mut self, ran: &[f64], stood_still: Option<(f64, f64)>, end: f64) {
        if ran.is_empty() {
            return;
        }
        let scale = self.chart("children that ran, from the request on", stood_still, end);
        let all = to_f64(ran.len() as u64);
        let counts = (0u32..).map(f64::from);
        // Up where one begins to run, level until the next does.
        let steps = ran.iter().zip(counts).flat_map(|(at, before)| [(*at, before), (*at, before + 1.0)]);
        let points = [(0.0, 0.0)].into_iter().chain(steps).chain([(end, all)]);
        self.line("v-line v-rate", scale, all, points);
        let many = number_of(ran.len() as u64, "child ran", "children ran");
        self.add(text(MARGIN, self.y + 16.0, "v-rate-ink", 12, &many));
        self.y += CHART + 18.0;
    }

    fn over_time(&mut self, points: &[ProgressPoint], stood_still: Option<(f64, f64)>, end: f64) {
        let scale = self.chart("each line on a scale of its own", stood_still, end);
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
        let points: Vec<_> = points.map(|(at, value)| (scale.x(at), up(value))).collect();
        self.sheet.polyline(class, &points);
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

#[cfg(test)]
mod tests {
    use roxmltree::{Document, Node};

    use super::super::account::tests::HOSTILE;
    use super::super::tests::{finished, snapshot};
    use super::super::{of_fork, of_migration};
    use super::*;
    use vmove_picture::check::faults;
    use vmove_types::fork_report::{ChildReport, ForkProgress, ForkReport};

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
        let fork = ForkProgress::default();
        for account in [
            of_migration::account(&none),
            of_migration::account(&snapshot()),
            of_fork::account(&fork),
            Account::default(),
        ] {
            let svg = draw(&account);
            // An account of nothing has no name either.
            let wrong: Vec<_> = faults(&svg).into_iter().filter(|fault| fault != "no title").collect();
            assert_eq!(wrong, Vec::<String>::new());
        }
    }

    #[test]
    fn a_fork_has_its_pause_and_its_children_on_one_axis() {
        let child = |name: &str, at| ChildReport {
            name: name.to_owned(),
            running_ms: Some(at),
            ..ChildReport::default()
        };
        let report = ForkReport {
            parent_stopped_ms: Some(20.0),
            parent_pause_ms: 5.0,
            complete_ms: 200.0,
            children: vec![child("web.1", 100.0), child("web.2", 50.0)],
            ..ForkReport::default()
        };
        let mut progress =
            ForkProgress { parent: "web".to_owned(), report: Some(report), ..ForkProgress::default() };
        let svg = draw(&of_fork::account(&progress));
        assert_eq!(faults(&svg), Vec::<String>::new());
        let xml = Document::parse(&svg).unwrap();
        let class = |name: &str| xml.descendants().find(|node| node.attribute("class") == Some(name));
        let x = |ms: f64| LEFT + (RIGHT - LEFT) * ms / 200.0;
        assert!((number(&class("v-band").unwrap(), "x") - x(20.0)).abs() < 0.1);
        let points = class("v-line v-rate").unwrap().attribute("points").unwrap();
        let at: Vec<&str> = points.split(' ').filter_map(|point| point.split(',').next()).collect();
        let wanted = [0.0, 50.0, 50.0, 100.0, 100.0, 200.0].map(|ms| format!("{:.1}", x(ms)));
        assert_eq!(at, wanted);
        assert!(svg.contains(STOOD_STILL) && svg.contains(ORANGE) && svg.contains("2 children ran"), "{svg}");
        // One of an earlier release, which did not tell when.
        progress.report.as_mut().unwrap().parent_stopped_ms = None;
        let svg = draw(&of_fork::account(&progress));
        assert!(!svg.contains("\"v-band\"") && !svg.contains(ORANGE) && svg.contains("2 children ran"));
    }

    #[test]
    fn nothing_leaves_it_and_ends_of_names_are_seen() {
        let mut progress = finished();
        progress.vm = format!("{}-42", "a-name-that-goes-on".repeat(9));
        progress.id = "0b7ff2a4-1111-4222-8333-444455556666".to_owned();
        let mut account = of_migration::account(&progress);
        let begin = account.time_lines[0].steps[0].clone();
        let name = format!("{} at node-17", "child-of-a-guest".repeat(3));
        account.time_lines[0].steps.push(PhaseTime { name, ..begin });
        account.standing = "it failed ".repeat(40);
        let svg = draw(&account);
        assert_eq!(faults(&svg), Vec::<String>::new());
        let xml = Document::parse(&svg).unwrap();
        let texts: Vec<_> = xml.descendants().filter(|node| node.tag_name().name() == "text").collect();
        let ends =
            |end: &str| texts.iter().any(|node| node.text().is_some_and(|text| text.trim().ends_with(end)));
        assert!(ends(&progress.id), "{svg}");
        assert!(ends("at node-17") && svg.contains(ORANGE), "{svg}");
        assert_eq!(svg.matches("\"v-begin\"").count(), 1);
        assert_eq!(
            row_name("template at gpu-node-rack12-0001.cluster.example.org"),
            "template at gp…e-rack12-0001"
        );
        assert!(row_name(&format!("{}.7 ran", "long".repeat(9))).ends_with("long.7 ran"));
    }
}
