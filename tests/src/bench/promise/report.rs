//! The figures as a table and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::{Move, Outcome, Pair, RIGHT, done};
use crate::bench::report::Setting;

/// The content of the JSON file.
#[derive(Debug, Clone, Serialize)]
pub struct Report<'a> {
    /// Version of this format.
    pub schema: u32,
    /// The machine and the settings.
    pub setting: &'a Setting,
    /// All moves.
    pub outcomes: &'a [Outcome],
}

/// A move in a line.
pub(super) fn line(one: &Move) -> String {
    let pair = |pair: Pair| format!("{:.0} / {:.0} ms", pair.promised, pair.measured);
    let limit = one.link.limit_mib.map_or_else(|| "no limit".to_owned(), |mib| format!("{mib} MiB/s"));
    format!("{} ({}), {limit}: pause {}, time {}", one.mode, one.link.mode, pair(one.pause), pair(one.time))
}

/// Of how many moves something was right, and what the ratios of measured to promised are: smallest, median, largest.
fn share(moves: &[&Move], of: impl Fn(&Move) -> Pair) -> String {
    if moves.is_empty() {
        return "-".to_owned();
    }
    let right = moves.iter().filter(|one| of(one).is_right()).count();
    let mut ratios: Vec<f64> = moves.iter().map(|one| of(one).measured / of(one).promised).collect();
    ratios.sort_by(f64::total_cmp);
    let percent = 100.0 * right as f64 / moves.len() as f64;
    format!(
        "{percent:.0} % ({right} of {}); {:.2}, {:.2}, {:.2}",
        moves.len(),
        ratios[0],
        ratios[ratios.len() / 2],
        ratios[ratios.len() - 1]
    )
}

/// Of how many moves the longest pause that was promised was kept, exactly and with some room.
fn kept(moves: &[&Move]) -> String {
    let percent = |times| {
        let kept = moves.iter().filter(|one| one.pause_up_to.is_kept(times)).count();
        100.0 * kept as f64 / moves.len() as f64
    };
    if moves.is_empty() { "-".to_owned() } else { format!("{:.0} %, {:.0} %", percent(1.0), percent(RIGHT)) }
}

/// A Markdown table: the share of moves of which the promise was right.
#[must_use]
pub fn text(outcomes: &[Outcome]) -> String {
    let moves = done(outcomes);
    let refused = outcomes.len() - moves.len();
    let mut out = format!(
        "Within {RIGHT} x of what was promised; measured / promised: smallest, median, largest. \
         \"up to\": moves whose pause was no longer than promised for nine of ten, and than {RIGHT} x of that.\n\n\
         | moves | pause | up to | time |\n|---|---|---|---|\n"
    );
    let mut row = |name: &str, of: &dyn Fn(&Move) -> bool| {
        let some: Vec<&Move> = moves.iter().copied().filter(|one| of(one)).collect();
        let (pause, time) = (share(&some, |one| one.pause), share(&some, |one| one.time));
        let _ = writeln!(out, "| {name} | {pause} | {} | {time} |", kept(&some));
    };
    row("all", &|_| true);
    row("the first to a node", &|one| one.known == 0);
    row("later ones", &|one| one.known > 0);
    for mode in ["precopy", "hybrid", "postcopy"] {
        row(mode, &|one| one.mode == mode);
    }
    row("with a limit", &|one| one.link.limit_mib.is_some());
    row("without", &|one| one.link.limit_mib.is_none());
    let _ = writeln!(out, "\nNot begun, since nothing could be promised: {refused}.");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::promise::{Drawn, Link};
    use crate::blows::deck::Dice;

    #[test]
    fn the_share_is_that_of_moves_within_the_bounds() {
        let moved = |measured: f64| Move {
            guest: Drawn::new(&mut Dice::from(1)),
            link: Link { limit_mib: None, mode: "auto" },
            mode: "hybrid".to_owned(),
            known: 1,
            pause: Pair { promised: 10.0, measured },
            pause_up_to: Pair { promised: 10.0, measured },
            time: Pair { promised: 100.0, measured: 100.0 },
            basis: String::new(),
        };
        let all: Vec<_> = [6.6, 6.7, 14.9, 15.1]
            .into_iter()
            .map(|measured| Outcome::Moved(Box::new(moved(measured))))
            .chain([Outcome::Refused(String::new())])
            .collect();
        let told = text(&all);
        assert!(
            told.contains("| all | 50 % (2 of 4); 0.66, 1.49, 1.51 | 50 %, 75 % | 100 % (4 of 4)"),
            "{told}"
        );
        assert!(told.contains("could be promised: 1."), "{told}");
    }
}
