//! Commands that wait long for one answer: what they wait for is shown, and Ctrl-C leaves it to itself.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::Future;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};
use vmove_types::units::format_ms;

use crate::failure::Failure;
use crate::output::{End, note, say_json};

/// Exit code after a Ctrl-C: what was asked for goes on, so none of the others would be true.
pub const LEFT_RUNNING: u8 = 130;
/// An answer that comes sooner needs no line.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// How often a line says that it still waits, where there is no terminal.
pub const LINES_INTERVAL: Duration = Duration::from_secs(5);
/// How often the time on a terminal is written anew.
const REDRAW_INTERVAL: Duration = Duration::from_millis(200);

/// Columns of the spinner before the line.
const BEFORE_LINE: usize = 2;

/// What is waited for. The daemon that was asked finishes it whether anybody waits or not.
#[derive(Debug)]
pub struct Wait {
    /// The command that waits: `vmove` or `vfork`.
    pub program: &'static str,
    /// What is being done, such as `web is given memory of its own`.
    pub what: String,
    /// For whoever presses Ctrl-C: what goes on, how to look at it, how to undo it.
    pub left: String,
    /// A program reads the output.
    pub json: bool,
}

impl Wait {
    /// Something that `vfork` asked for.
    pub fn of_vfork(json: bool, what: impl Into<String>, left: impl Into<String>) -> Self {
        Self { program: "vfork", what: what.into(), left: left.into(), json }
    }

    /// Something that `vmove` asked for.
    pub fn of_vmove(json: bool, what: impl Into<String>, left: impl Into<String>) -> Self {
        Self { program: "vmove", what: what.into(), left: left.into(), json }
    }

    /// The answer.
    ///
    /// # Errors
    /// Why it was refused, or [`End::Left`] after Ctrl-C.
    pub async fn answer<T, E: Into<Failure>>(
        &self,
        answer: impl Future<Output = Result<T, E>>,
    ) -> Result<T, End> {
        self.answer_of_steps(&Step::default(), answer).await
    }

    /// The answer of several steps: what is waited for changes meanwhile, and each is told.
    ///
    /// # Errors
    /// As [`Self::answer`].
    pub async fn answer_of_steps<T, E: Into<Failure>>(
        &self,
        step: &Step,
        answer: impl Future<Output = Result<T, E>>,
    ) -> Result<T, End> {
        self.answer_shown(answer, self.show(step)).await
    }

    /// The answer, while something else is shown.
    ///
    /// # Errors
    /// As [`Self::answer`].
    pub async fn answer_shown<T, E: Into<Failure>>(
        &self,
        answer: impl Future<Output = Result<T, E>>,
        show: impl Future<Output = Infallible>,
    ) -> Result<T, End> {
        let mut presses = signal(SignalKind::interrupt())?;
        tokio::select! {
            answer = answer => return Ok(answer.map_err(Into::into)?),
            never = show => match never {},
            _ = presses.recv() => {}
        }
        note(&format!("{}: {}", self.program, self.left));
        if self.json {
            say_json(&json!({ "code": "interrupted", "error": self.left, "exit_code": LEFT_RUNNING }))?;
        }
        Err(End::Left)
    }

    /// Shows what is waited for, until it is dropped.
    async fn show(&self, step: &Step) -> Infallible {
        if self.json {
            return std::future::pending().await;
        }
        let begun = Instant::now();
        let line = |room| {
            let step = step.0.borrow();
            let seconds = Duration::from_secs(begun.elapsed().as_secs());
            fitted(step.as_ref().unwrap_or(&self.what), &time(seconds), room)
        };
        if std::io::stderr().is_terminal() {
            let shown = OneLine::new();
            loop {
                let columns = ratatui::crossterm::terminal::size().map_or(80, |(columns, _)| columns);
                shown.0.set_message(line(usize::from(columns).saturating_sub(BEFORE_LINE)));
                sleep(REDRAW_INTERVAL).await;
            }
        }
        sleep(PATIENCE).await;
        loop {
            note(&format!("{}: {}", self.program, line(usize::MAX)));
            sleep(LINES_INTERVAL).await;
        }
    }
}

/// The step that is waited for now. None yet: what the whole is waited for.
#[derive(Debug, Default)]
pub struct Step(RefCell<Option<String>>);

impl Step {
    /// The next step begins.
    pub fn set(&self, what: impl Into<String>) {
        *self.0.borrow_mut() = Some(what.into());
    }
}

/// `3 s`, `2m 05s`: without the fractions that a clock which runs does not need.
pub fn time(passed: Duration) -> String {
    let seconds = passed.as_secs();
    if seconds < 60 { format!("{seconds} s") } else { format_ms(passed.as_secs_f64() * 1e3) }
}

/// What is waited for and for how long, in so many columns: the end of the former is left out first, which shows.
fn fitted(what: &str, time: &str, room: usize) -> String {
    let whole = format!("waiting: {what} ({time})");
    if whole.width() <= room {
        return whole;
    }
    let around = format!("waiting: … ({time})").width();
    let mut left = room.saturating_sub(around);
    let fits = |c: &char| {
        let wide = c.width().unwrap_or(0);
        let fits = wide <= left;
        left = left.saturating_sub(wide);
        fits
    };
    let begin: String = what.chars().take_while(fits).collect();
    format!("waiting: {}… ({time})", begin.trim_end())
}

/// A line on a terminal, which goes away with this.
struct OneLine(ProgressBar);

impl OneLine {
    fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
        // A template that does not parse would be a mistake of ours; the plain line does then.
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(REDRAW_INTERVAL);
        Self(bar)
    }
}

impl Drop for OneLine {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_too_long_shows_that_it_was_cut_and_keeps_the_time() {
        let line = |room| fitted("web is given memory of its own", "2m 05s", room);
        assert_eq!(line(48), "waiting: web is given memory of its own (2m 05s)");
        assert_eq!(line(47), "waiting: web is given memory of its o… (2m 05s)");
        assert_eq!(line(30), "waiting: web is given… (2m 05s)".replace("given", "give"));
        assert_eq!(line(usize::MAX), line(48));
        assert_eq!(fitted("機械 waits", "3 s", 18), "waiting: 機… (3 s)");
        assert_eq!(line(0), "waiting: … (2m 05s)");
    }

    #[test]
    fn a_clock_has_whole_seconds() {
        let told = |seconds: u64| time(Duration::from_millis(seconds * 1000 + 999));
        assert_eq!([told(0), told(59), told(125)], ["0 s", "59 s", "2m 05s"]);
    }
}
