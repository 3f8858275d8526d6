//! The figures as a table and as JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use vmove_picture::plot::Plot;

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

/// The median pause by the size of the guest, a line for what else differs.
#[must_use]
pub fn picture(rows: &[Row]) -> String {
    let mut lines: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows {
        let Case { memory, fill, writes, mode, .. } = &row.case;
        let Some((_, median, _)) = row.spread(|m| m.downtime_ms) else { continue };
        let line = lines.entry(format!("{mode}, {}, {}", fill.label(), writes.label())).or_default();
        line.push((f64::from(memory.0) / 1024.0, median));
    }
    let plot = Plot {
        title: "How long a guest stands still in a move, by its size",
        across: "memory of the guest, GiB",
        up: "median pause, ms",
        series: lines.iter().map(|(name, points)| (name.as_str(), points.clone())).collect(),
        goal: None,
    };
    plot.draw()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::pause::{Fill, Memory, Writes};
    use vmove_picture::check::faults;

    #[test]
    fn the_picture_has_a_line_for_what_differs_and_a_point_for_each_size() {
        let row = |gib: u32, fill, pause: &[f64]| Row {
            case: Case {
                memory: Memory(gib << 10),
                fill,
                writes: Writes::Ring,
                mode: "hybrid".to_owned(),
                runs: 3,
            },
            moves: pause.iter().map(|ms| Move { downtime_ms: *ms, ..Move::default() }).collect(),
            failure: None,
        };
        let rows = [
            row(1, Fill::Empty, &[2.0, 9.0, 2.5]),
            row(1024, Fill::Empty, &[9.3]),
            row(8, Fill::Half, &[11.8]),
            row(64, Fill::Half, &[]),
        ];
        let svg = picture(&rows);
        assert_eq!(faults(&svg), Vec::<String>::new());
        assert_eq!(svg.matches("<circle").count(), 3, "what was not measured has no point");
        for words in ["hybrid, empty, ring, 9.3", "hybrid, half full, ring, 11.8", "1,024"] {
            assert!(svg.contains(words), "{words}");
        }
    }
}
