//! The progress bar. Only on a terminal.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use vmove_types::progress::{Outcome, Phase, Progress};

use vmove_types::units::{format_bytes, format_ms, format_rate};

/// A bar on standard error, or nothing when that is no terminal.
#[derive(Debug)]
pub struct Bar(Option<ProgressBar>);

impl Bar {
    pub fn new() -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
        // A template that does not parse would be a mistake of ours; the plain bar does then.
        if let Ok(style) = ProgressStyle::with_template("{spinner} [{bar:24}] {wide_msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(Some(bar))
    }

    pub fn update(&self, progress: &Progress) {
        if let Some(bar) = &self.0 {
            bar.set_length(progress.bytes_total.max(1));
            bar.set_position(progress.bytes_done.min(progress.bytes_total));
            bar.set_message(line(progress));
            bar.tick();
        }
    }

    /// Prints a line above the bar, or on standard error.
    pub fn note(&self, text: &str) {
        match &self.0 {
            Some(bar) => bar.suspend(|| crate::output::note(text)),
            None => crate::output::note(text),
        }
    }

    pub fn clear(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// Everything worth a look, in one line.
pub fn line(progress: &Progress) -> String {
    let mut parts = vec![progress.phase.as_str().to_owned()];
    if let Outcome::Reconnecting { error, .. } = &progress.outcome {
        parts.push(format!("peer lost, trying again ({error})"));
    }
    if let Some(unwritten) = &progress.unwritten {
        parts.push(unwritten.clone());
    }
    if progress.phase == Phase::Rounds && progress.round > 0 {
        parts.push(format!("round {}", progress.round));
    }
    if progress.bytes_total > 0 {
        parts.push(format!(
            "{} of {}",
            format_bytes(progress.bytes_done),
            format_bytes(progress.bytes_total)
        ));
    }
    if progress.rate_bytes_per_s > 0.0 {
        parts.push(format_rate(progress.rate_bytes_per_s));
    }
    if progress.dirty_pages_per_s > 0.0 {
        parts.push(format!("dirties {:.0} pages/s", progress.dirty_pages_per_s));
    }
    if let Some(eta) = progress.eta_ms {
        parts.push(format!("{} left", format_ms(eta)));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use vmove_types::progress::Role;

    use super::*;

    #[test]
    fn the_line_has_phase_round_bytes_rates_and_time_left() {
        let progress = Progress {
            mode: Some("hybrid".to_owned()),
            phase: Phase::Rounds,
            elapsed_ms: 100.0,
            bytes_total: 1 << 30,
            bytes_done: 1 << 29,
            bytes_sent: 1 << 29,
            rate_bytes_per_s: 2e9,
            dirty_pages_per_s: 100_000.0,
            round: 2,
            eta_ms: Some(250.0),
            ..Progress::begun("1", "v", Role::Source, "b")
        };
        assert_eq!(
            line(&progress),
            "rounds, round 2, 512.00 MiB of 1.00 GiB, 2.00 GB/s, dirties 100000 pages/s, 250.0 ms left"
        );
    }
}
