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
const SIZES: [(usize, usize); 3] = [(64 << 10, 300), (1 << 20, 30), (4 << 20, 8)];

/// Measures, and prints a table in Markdown.
///
/// # Errors
/// Something did not run; the message has its words.
pub fn run(lab: &Lab, program: &Path, rounds: usize) -> Result<()> {
    let program = program.canonicalize().with_context(|| format!("no program {}", program.display()))?;
    let program = program.display();
    let serve = format!("{program} serve 0.0.0.0:{PORT}");
    let at = format!("{}:{PORT}", address(1));
    println!("| READ, one side emulated host to another | round | perftest | fabric | fabric / perftest |");
    println!("|---|---|---|---|---|");
    for round in 1..=rounds {
        let theirs = perftest(lab, (1, 2), "ib_read_lat", 4096, SAMPLES, "")?;
        let command = format!("{program} latency {at} 4096 {SAMPLES}");
        let ours = numbers(&pair(lab, (1, &serve), (2, &command))?);
        for (name, theirs, ours) in [
            ("4 KiB, typical latency in us", figure(&theirs, 4)?, figure(&ours, 0)?),
            ("4 KiB, average latency in us", figure(&theirs, 5)?, figure(&ours, 1)?),
        ] {
            println!("| {name} | {round} | {theirs:.0} | {ours:.0} | {:.2} |", ours / theirs);
        }
        for (bytes, count) in SIZES {
            let more = format!("-t {DEPTH} -o {DEPTH}");
            let theirs = figure(&perftest(lab, (1, 2), "ib_read_bw", bytes, count, &more)?, 3)?;
            let command = format!("{program} bandwidth {at} {bytes} {count} {DEPTH}");
            let ours = figure(&numbers(&pair(lab, (1, &serve), (2, &command))?), 0)?;
            let size = bytes >> 10;
            println!(
                "| {size} KiB, bandwidth in MiB/s | {round} | {theirs:.1} | {ours:.1} | {:.2} |",
                ours / theirs
            );
        }
    }
    Ok(())
}

/// The numbers with a decimal point, in order.
fn numbers(text: &str) -> Vec<f64> {
    text.split_whitespace().filter(|word| word.contains('.')).filter_map(|word| word.parse().ok()).collect()
}
