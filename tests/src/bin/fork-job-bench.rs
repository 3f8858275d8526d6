//! `./run bench fork-job`: a search that a guest shares with its children, beside the same search by the guest alone.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde::Serialize;
use vmove_tests::bench::report::Setting;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::forks::{Parent, done};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, ready};
use vmove_tests::typist::{self, Typist, With};

/// For one search.
const TIMEOUT: Duration = Duration::from_secs(600);

/// How long a search takes that a guest shares with its children, beside the guest alone.
#[derive(Debug, Parser)]
#[command(name = "./run bench fork-job")]
struct Arguments {
    /// Children that share the search; each number is measured
    #[arg(long, value_delimiter = ',', default_value = "2,8,32")]
    children: Vec<usize>,
    /// Sequences in the database: 8000 take a core that emulates some 20 s
    #[arg(long, default_value_t = 8000)]
    sequences: u32,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Folder for fork-job.json and fork-job.md
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
}

#[derive(Debug, Serialize)]
struct Report {
    setting: Setting,
    processors: usize,
    sequences: u32,
    /// The guest alone. Seconds, of each round.
    alone: Vec<f64>,
    shared: Vec<Shared>,
}

/// The search by so many children.
#[derive(Debug, Serialize)]
struct Shared {
    children: usize,
    /// Their QEMUs were started beforehand.
    prepared: bool,
    /// From the request until the parent was told that all run. Seconds, of each round.
    fork: Vec<f64>,
    /// From before the fork until the results were merged. Seconds, of each round.
    whole: Vec<f64>,
}

fn main() -> ExitCode {
    vmove_tests::bench::report::exit("fork-job", run())
}

fn run() -> Result<()> {
    let arguments = Arguments::parse();
    ready()?;
    ensure!(arguments.rounds > 0, "expected one round at least, found 0");
    let parameters = "a guest of 224 MiB with one processor, emulated, without other work";
    let mut report = Report {
        setting: Setting::begin("./run bench fork-job", parameters, &arguments.out)?,
        processors: std::thread::available_parallelism()?.get(),
        sequences: arguments.sequences,
        alone: Vec::new(),
        shared: Vec::new(),
    };
    measure(&arguments, &mut report)?;
    let text = report.text();
    report.setting.write(&arguments.out, "fork-job", &report, &text)?;
    println!("{text}\nwritten: {0}/fork-job.json, {0}/fork-job.md", arguments.out.display());
    Ok(())
}

fn measure(arguments: &Arguments, report: &mut Report) -> Result<()> {
    let sandbox = Sandbox::new()?;
    let most = arguments.children.iter().max().copied().unwrap_or_default();
    let config = format!("[fork]\nfrom-guest = true\nmax-children = {most}\n");
    let node = Node::start(&sandbox, "a", NodeOptions { config, ..NodeOptions::default() })?;
    let guest = typist::guest(sandbox.path(), 0, With::Nothing)?;
    Parent::start(&node, NAME, "thp", guest)?;
    let mut typist = Typist::at(&node, NAME)?;
    let mut search = |children: usize| -> Result<(Option<f64>, f64, String)> {
        let line = format!("dna-search --sequences {} --children {children}", arguments.sequences);
        let end = typist.line(&line, TIMEOUT)?;
        ensure!(end.code == 0, "{line} ended with {}: {}", end.code, end.printed);
        let whole = seconds_after(&end.printed, "children: ").with_context(|| end.printed.clone())?;
        let hits = end.printed.lines().filter(|line| line.contains("score")).collect::<Vec<_>>().join("\n");
        Ok((seconds_after(&end.printed, "children run after "), whole, hits))
    };
    let mut expected = None;
    for _ in 0..arguments.rounds {
        let (_, whole, hits) = search(0)?;
        ensure!(
            expected.get_or_insert_with(|| hits.clone()) == &hits,
            "the guest alone finds something else"
        );
        report.alone.push(whole);
    }
    for (children, prepared) in arguments.children.iter().flat_map(|count| [(*count, false), (*count, true)])
    {
        let (mut fork, mut whole) = (Vec::new(), Vec::new());
        for _ in 0..arguments.rounds {
            if prepared {
                done(&node, &["warm", NAME, "--count", &children.to_string()])?;
            }
            let (until_they_run, all, hits) = search(children)?;
            ensure!(expected.as_ref() == Some(&hits), "{children} children find something else: {hits}");
            fork.extend(until_they_run);
            whole.push(all);
        }
        report.shared.push(Shared { children, prepared, fork, whole });
    }
    Ok(())
}

/// The number behind the last of these words.
fn seconds_after(printed: &str, words: &str) -> Option<f64> {
    printed.rsplit_once(words)?.1.split(' ').next()?.parse().ok()
}

impl Report {
    fn text(&self) -> String {
        let alone = median(&self.alone);
        let mut text = format!(
            "{}\n\nA search in {} sequences, by a guest alone and by its children, on {} processors. Medians, minimum and maximum in \
             parentheses.\n\n| | children run after | whole search | times as fast as alone |\n|---|--:|--:|--:|\n\
             | the guest alone | | {} | 1 |\n",
            self.setting.line(),
            self.sequences,
            self.processors,
            shown(&self.alone),
        );
        for shared in &self.shared {
            let how = if shared.prepared { "prepared" } else { "not prepared" };
            let (fork, whole) = (shown(&shared.fork), shown(&shared.whole));
            let gain = alone / median(&shared.whole);
            let _ = writeln!(text, "| {} children, {how} | {fork} | {whole} | {gain:.2} |", shared.children);
        }
        text
    }
}

fn shown(values: &[f64]) -> String {
    let (least, most) = values.iter().fold((f64::INFINITY, 0.0_f64), |(a, b), v| (a.min(*v), b.max(*v)));
    format!("{:.2} s ({least:.2} to {most:.2})", median(values))
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
