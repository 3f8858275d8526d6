//! The figures as a table and as JSON.

use serde::Serialize;

use super::{Case, Move};
use crate::bench::report::{Setting, aligned, shorten};

/// The moves of one case, or why there are none.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// What was measured.
    pub case: Case,
    /// All of its moves.
    pub moves: Vec<Move>,
    /// Why there are none.
    pub failure: Option<String>,
}

/// The content of the JSON file.
#[derive(Debug, Clone, Serialize)]
pub struct Report<'a> {
    /// Version of this format.
    pub schema: u32,
    /// The machine and the settings.
    pub setting: &'a Setting,
    /// All cases.
    pub rows: &'a [Row],
}

/// Steps with a column of their own; the names are those of a report's `pause`.
const STEPS: [&str; 8] = ["drain", "scan", "register", "tell", "load", "complete", "commit", "resume"];

impl Row {
    /// Smallest, median and largest of a figure.
    #[must_use]
    pub fn spread(&self, figure: impl Fn(&Move) -> f64) -> Option<(f64, f64, f64)> {
        let mut all: Vec<f64> = self.moves.iter().map(figure).collect();
        all.sort_by(f64::total_cmp);
        Some((*all.first()?, *all.get(all.len() / 2)?, *all.last()?))
    }

    fn cells(&self) -> [String; 14] {
        let mut cells: [String; 14] = std::array::from_fn(|_| "-".to_owned());
        cells[0] = self.case.memory.to_string();
        cells[1] = self.case.fill.label().to_owned();
        cells[2].clone_from(&self.case.mode);
        self.case.writes.label().clone_into(&mut cells[3]);
        if let Some((least, median, most)) = self.spread(|m| m.downtime_ms) {
            cells[4] = format!("{median:.1} ({least:.1}-{most:.1})");
        }
        for (cell, name) in cells[5..].iter_mut().zip(STEPS) {
            let of = |m: &Move| m.pause.iter().find(|s| s.name == name).map_or(0.0, |s| s.ms);
            if let Some((_, median, _)) = self.spread(of) {
                *cell = format!("{median:.1}");
            }
        }
        cells[13] = match &self.failure {
            Some(why) => shorten(&why.replace(['\n', '|'], " "), 100),
            None => self
                .spread(|m| m.used_mib)
                .map_or_else(String::new, |(_, _, most)| format!("{most:.0} MiB in use")),
        };
        cells
    }
}

/// A Markdown table.
#[must_use]
pub fn text(rows: &[Row]) -> String {
    let head = ["guest", "memory", "mode", "KVM notes", "pause ms"].into_iter().chain(STEPS).chain(["note"]);
    let head: Vec<String> = head.map(str::to_owned).collect();
    let mut lines: Vec<[String; 14]> = vec![std::array::from_fn(|column| head[column].clone())];
    lines.extend(rows.iter().map(Row::cells));
    aligned(&lines, &[0, 1, 2, 3, 13])
}
