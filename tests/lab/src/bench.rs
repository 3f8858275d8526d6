//! READs through the fabric beside those of perftest, between the same two hosts, in turns.

use std::path::Path;

use anyhow::{Context, Result};

use crate::check::{figure, pair, perftest};
use crate::host::address;
use crate::supervisor::Lab;

/// Port at which the program of ours introduces its queue pairs.
const PORT: u16 = 7471;
/// READs of 4 KiB of which the latency is taken.
const SAMPLES: usize = 1000;
/// READs under way when bandwidth is measured: what the fabric's connections have, and what perftest is told to have.
const DEPTH: usize = 16;
/// Sizes of which the bandwidth is measured, and how many READs of each.
const SIZES: [(usize, usize); 3] = [(64 << 10, 300), (1 << 20, 30), (4 << 20, 16)];

/// What was measured by one and by the other, round by round.
struct Row {
    name: String,
    pairs: Vec<(f64, f64)>,
}

impl Row {
    /// Medians, the ratio of each round, and how many rounds there were.
    fn line(&self) -> String {
        let median = |values: Vec<f64>| {
            let mut values = values;
            values.sort_unstable_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
        };
        let theirs = median(self.pairs.iter().map(|pair| pair.0).collect());
        let ours = median(self.pairs.iter().map(|pair| pair.1).collect());
        let mut ratios: Vec<f64> = self.pairs.iter().map(|(theirs, ours)| ours / theirs).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let all: Vec<String> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
        let (name, ratio) = (&self.name, median(ratios));
        format!("| {name} | {theirs:.1} | {ours:.1} | {ratio:.2} | {} |", all.join(" "))
    }
}

/// Measures, and prints a table in Markdown.
///
/// # Errors
/// Something did not run; the message has its words.
pub fn run(lab: &Lab, program: &Path, rounds: usize) -> Result<()> {
    let program = program.canonicalize().with_context(|| format!("no program {}", program.display()))?;
    let program = program.display();
    let serve = format!("{program} serve 0.0.0.0:{PORT}");
    let at = format!("{}:{PORT}", address(1));
    let names = ["4 KiB, typical latency in us", "4 KiB, average latency in us"].map(str::to_owned);
    let sizes = SIZES.map(|(bytes, _)| format!("{} KiB, bandwidth in MiB/s", bytes >> 10));
    let mut rows: Vec<Row> =
        names.into_iter().chain(sizes).map(|name| Row { name, pairs: Vec::new() }).collect();
    for round in 1..=rounds {
        let theirs = perftest(lab, (1, 2), "ib_read_lat", 4096, SAMPLES, "")?;
        let command = format!("{program} latency {at} 4096 {SAMPLES}");
        let ours = numbers(&pair(lab, (1, &serve), (2, &command))?);
        rows[0].pairs.push((figure(&theirs, 4)?, figure(&ours, 0)?));
        rows[1].pairs.push((figure(&theirs, 5)?, figure(&ours, 1)?));
        for (row, (bytes, count)) in rows[2..].iter_mut().zip(SIZES) {
            let more = format!("-t {DEPTH} -o {DEPTH}");
            let theirs = figure(&perftest(lab, (1, 2), "ib_read_bw", bytes, count, &more)?, 3)?;
            let command = format!("{program} bandwidth {at} {bytes} {count} {DEPTH}");
            let ours = figure(&numbers(&pair(lab, (1, &serve), (2, &command))?), 0)?;
            row.pairs.push((theirs, ours));
        }
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().unwrap_or_default();
        eprintln!("round {round} of {rounds}; load of this machine: {load} (the lab alone: about 2)");
    }
    println!("| READ from one emulated host by another | perftest | fabric | ratio | ratio, all rounds |");
    println!("|---|---|---|---|---|");
    for row in rows {
        println!("{}", row.line());
    }
    Ok(())
}

/// The numbers with a decimal point, in order.
fn numbers(text: &str) -> Vec<f64> {
    text.split_whitespace().filter(|word| word.contains('.')).filter_map(|word| word.parse().ok()).collect()
}
