//! What is told of a migration or a fork, whether as text, as a picture or as a page.

use vmove_types::report::{PhaseTime, ProgressPoint};
use vmove_types::units::format_ms;

/// What the pause of a fork's parent is called among what followed the request.
pub const STOOD_STILL: &str = "the parent stood still";

/// All of it. Its texts come from elsewhere: they have no control characters, and are otherwise as they came.
#[derive(Debug, Default)]
pub struct Account {
    /// What was done with which guest.
    pub title: String,
    /// How it ended, or where it is.
    pub standing: String,
    /// Something went wrong.
    pub bad: bool,
    /// Names and values.
    pub facts: Vec<(String, String)>,
    /// What followed what.
    pub time_lines: Vec<TimeLine>,
    /// How far it was over time.
    pub over_time: Vec<ProgressPoint>,
    /// When each child began to run, in milliseconds from the request on, the earliest first.
    pub began_to_run: Vec<f64>,
    /// When the guest stood still in that, from and to, in milliseconds.
    pub stood_still: Option<(f64, f64)>,
    /// Bytes by what they were.
    pub bytes: Vec<(String, u64)>,
    /// Figures in rows.
    pub tables: Vec<Table>,
}

/// Steps on one scale of time.
#[derive(Debug, Default)]
pub struct TimeLine {
    /// What they make.
    pub title: String,
    /// Steps, in the order in which they are drawn.
    pub steps: Vec<PhaseTime>,
    /// What is not there, or what it is measured from.
    pub note: String,
}

impl TimeLine {
    /// Where the last step ends, in milliseconds.
    pub fn end_ms(&self) -> f64 {
        self.steps.iter().map(|step| step.start_ms + step.duration_ms).fold(0.0, f64::max)
    }
}

/// A time, in microseconds where it is shorter than a millisecond.
pub fn time(ms: f64) -> String {
    if (0.0..1.0).contains(&ms) { format!("{:.0} us", ms * 1e3) } else { format_ms(ms) }
}

/// Figures in rows.
#[derive(Debug, Default)]
pub struct Table {
    /// What they are of.
    pub title: String,
    /// Names of the columns. Where there is no room for all, the last are left out.
    pub head: Vec<&'static str>,
    /// Cells.
    pub rows: Vec<Vec<String>>,
}

impl Account {
    /// The same without control characters: a name must not steer a terminal, and XML has none of them.
    pub fn clean(mut self) -> Self {
        let lines = self.time_lines.iter_mut().flat_map(|line| {
            let steps = line.steps.iter_mut().map(|step| &mut step.name);
            steps.chain([&mut line.title, &mut line.note])
        });
        let cells = self
            .tables
            .iter_mut()
            .flat_map(|table| table.rows.iter_mut().flatten().chain([&mut table.title]));
        let facts = self.facts.iter_mut().flat_map(|(name, value)| [name, value]);
        let bytes = self.bytes.iter_mut().map(|(name, _)| name);
        [&mut self.title, &mut self.standing]
            .into_iter()
            .chain(lines)
            .chain(cells)
            .chain(facts)
            .chain(bytes)
            .for_each(clean);
        self
    }
}

fn clean(text: &mut String) {
    if text.contains(is_hidden) {
        *text = text.replace(is_hidden, "\u{fffd}");
    }
}

/// Control characters, those that turn the direction of text, and what is no character.
fn is_hidden(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{fffe}' | '\u{ffff}')
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A name that would end an element, an attribute and a script, and steer a terminal.
    pub const HOSTILE: &str = "</text></title><script>alert('1')</script>&amp;\"x=\u{1b}[2J\u{202e}\u{0}";

    #[test]
    fn no_text_steers_a_terminal() {
        let step = PhaseTime { name: HOSTILE.to_owned(), start_ms: 0.0, duration_ms: 1.0 };
        let hostile = || HOSTILE.to_owned();
        let account = Account {
            title: hostile(),
            standing: hostile(),
            facts: vec![(hostile(), hostile())],
            time_lines: vec![TimeLine { title: hostile(), steps: vec![step], note: hostile() }],
            bytes: vec![(hostile(), 1)],
            tables: vec![Table { title: hostile(), head: vec!["A"], rows: vec![vec![hostile()]] }],
            ..Account::default()
        };
        let shown = format!("{:?}", account.clean());
        assert!(
            shown.contains("<script>")
                && !shown.contains("\\u{1b}")
                && !shown.contains("\\0")
                && !shown.contains("202e"),
            "{shown}"
        );
    }
}
