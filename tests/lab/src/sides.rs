//! Which side should move the bytes: READ by the destination beside WRITE by the source, in turns.

use std::path::Path;

use anyhow::{Context, Result};

use crate::check::both;
use crate::host::address;
use crate::supervisor::Lab;

const PORT: u16 = 7473;
/// Requests under way.
const DEPTH: usize = 16;
/// Sizes, and how many requests of each.
const SIZES: [(usize, usize); 2] = [(64 << 10, 1500), (1 << 20, 100)];

/// One transfer: speed, and processor time per GiB.
#[derive(Debug, Clone, Copy)]
struct Cost {
    mib_per_s: f64,
    /// Milliseconds of the source's process, the source's host, and the destination's process and host.
    cpu_per_gib: [f64; 4],
}

/// Measures, and prints a table in Markdown. Bytes go from h1 to h2 both ways.
///
/// # Errors
/// Something did not run; the message has its words.
pub fn run(lab: &Lab, program: &Path, rounds: usize) -> Result<()> {
    let program = program.canonicalize().with_context(|| format!("no program {}", program.display()))?;
    let program = program.display();
    let serve = format!("{program} serve 0.0.0.0:{PORT}");
    let (source, destination) = (1, 2);
    let mut rows: Vec<(String, Vec<Cost>)> = Vec::new();
    for round in 1..=rounds {
        for (bytes, count) in SIZES {
            let gib = (bytes * count) as f64 / f64::from(1 << 30);
            for (name, word, server, client) in [
                ("READ by the destination", "bandwidth", source, destination),
                ("WRITE by the source", "write", destination, source),
            ] {
                let ask = format!("{program} {word} {}:{PORT} {bytes} {count} {DEPTH}", address(server));
                let (served, asked) = both(lab, (server, &serve), (client, &ask))?;
                let (theirs, ours) = (used(&served)?, used(&asked)?);
                let [from, to] = if client == destination { [theirs, ours] } else { [ours, theirs] };
                let cpu_per_gib = [from[0], from[1], to[0], to[1]].map(|ms| ms / gib);
                let name = format!("{name}, {} KiB", bytes >> 10);
                let cost = Cost { mib_per_s: number_after(&asked, "average")?, cpu_per_gib };
                match rows.iter_mut().find(|row| row.0 == name) {
                    Some(row) => row.1.push(cost),
                    None => rows.push((name, vec![cost])),
                }
            }
        }
        eprintln!("round {round} of {rounds}");
    }
    println!(
        "| {DEPTH} requests under way | MiB/s | source: process, ms/GiB | host | destination: process, ms/GiB | host |"
    );
    println!("|---|---|---|---|---|---|");
    for (name, costs) in rows {
        let columns: Vec<String> =
            (0..4).map(|at| spread(costs.iter().map(|cost| cost.cpu_per_gib[at]))).collect();
        println!(
            "| {name} | {} | {} |",
            spread(costs.iter().map(|cost| cost.mib_per_s)),
            columns.join(" | ")
        );
    }
    Ok(())
}

/// Median, lowest and highest.
fn spread(values: impl Iterator<Item = f64>) -> String {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
    format!("{:.0} ({:.0} to {:.0})", at(values.len() / 2), at(0), at(values.len() - 1))
}

/// Milliseconds of the process and of its host.
fn used(text: &str) -> Result<[f64; 2]> {
    Ok([number_after(text, "process")?, number_after(text, "host")?])
}

fn number_after(text: &str, word: &str) -> Result<f64> {
    let found = text.split_whitespace().skip_while(|found| *found != word).nth(1);
    found
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("no number after '{word}' in: {text}"))
}
