//! What `vmove status ID --follow` writes to standard output while it waits.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use serde::Serialize;
use vmove_types::progress::Phase;

use super::bar::Lines;
use crate::output::{End, say_json};

/// How often a program is told how far it is, if the phase stays the same.
const OBJECTS_INTERVAL: Duration = Duration::from_secs(1);

/// Who is shown how far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    /// Somebody who waits for the end: standard error has it, standard output is for the answer.
    Waiting,
    /// Whoever reads the standard output of `status --follow`, which is no terminal.
    Lines,
    /// The same, with `--json`.
    Objects,
}

impl Reader {
    /// `only_follows`: it is `status --follow` that waits.
    pub(super) fn of(only_follows: bool, json: bool) -> Self {
        Self::of_output(only_follows, json, std::io::stdout().is_terminal())
    }

    const fn of_output(only_follows: bool, json: bool, terminal: bool) -> Self {
        match (only_follows, json, terminal) {
            (true, true, _) => Self::Objects,
            (true, false, false) => Self::Lines,
            (true, false, true) | (false, _, _) => Self::Waiting,
        }
    }
}

/// One object a line, for programs that follow.
#[derive(Debug, Default)]
pub(super) struct Snapshots(Option<Lines>);

impl Snapshots {
    pub(super) fn of(reader: Reader) -> Self {
        Self((reader == Reader::Objects).then(Lines::default))
    }

    /// Prints it, if a line is due.
    pub(super) fn add<T: Serialize>(&self, snapshot: &T, phase: Phase) -> Result<(), End> {
        match &self.0 {
            Some(lines) if lines.are_due(phase, Instant::now(), OBJECTS_INTERVAL) => say_json(snapshot),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_reads_standard_output_decides() {
        let follower = |json, terminal| Reader::of_output(true, json, terminal);
        assert_eq!(follower(false, true), Reader::Waiting, "a bar");
        assert_eq!(follower(false, false), Reader::Lines);
        assert_eq!(follower(true, true), Reader::Objects);
        assert_eq!(follower(true, false), Reader::Objects);
        for json in [false, true] {
            assert_eq!(Reader::of_output(false, json, false), Reader::Waiting, "vmove migrate");
        }
    }
}
