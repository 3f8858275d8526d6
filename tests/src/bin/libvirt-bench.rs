//! `virsh migrate --live` by libvirt alone, and carried by vmove, one after the other with the same guest: downtime, lost work, total time.
//!
//! Downtime: from STOP of the source's QEMU to RESUME of the destination's, as `virsh qemu-monitor-event` on each host sees them. Lost work: what the guest, which
//! writes as fast as it can, has not done while it was moved and for a while after, in milliseconds at the rate that it had just before.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use vmove_guest::config::{Config, Rate};
use vmove_tests::guest::Guest;
use vmove_tests::libvirt::{self, Arm, Host, Pair};
use vmove_tests::process::Guarded;

/// Compares `virsh migrate --live` with and without vmove
#[derive(Debug, Parser)]
struct Args {
    /// Moves in each arm
    #[arg(long, default_value_t = 6)]
    moves: usize,
    /// Memory of the guest in MiB
    #[arg(long, default_value_t = 1024)]
    memory: u32,
    /// MiB that it rewrites
    #[arg(long, default_value_t = 64)]
    working_set: u32,
    /// Pages that it rewrites in a second
    #[arg(long, default_value_t = 5_000)]
    rate: u32,
}

/// How long the rate is watched before a move, and how long after it lost work is counted.
const WATCHED: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
struct Figures {
    downtime: Vec<f64>,
    lost: Vec<f64>,
    total: Vec<f64>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    libvirt::ready()?;
    let config = Config {
        working_set_mib: args.working_set,
        cold_mib: args.memory - args.working_set - 192,
        rate: Rate::PagesPerSecond(args.rate),
        ..Config::default()
    };
    let guest = Guest::new(args.memory, config)?;
    println!(
        "{} MiB, {} MiB rewritten at {} pages/s, {} moves each",
        args.memory, args.working_set, args.rate, args.moves
    );
    println!("{:<10} {:<12} {:>9} {:>9} {:>9}", "", "", "min", "median", "max");
    let mut medians = Vec::new();
    for (name, arm) in [("libvirt", Arm::InFiles), ("vmove", Arm::Enabled)] {
        let pair = Pair::running_as(&guest, arm)?;
        pair.hosts[0].beacon()?;
        let mut figures = Figures::default();
        let (mut number, mut unseen) = (0, 0);
        while figures.total.len() < args.moves {
            if !measure(&pair, number % 2, &mut figures).with_context(|| pair.logs())? {
                unseen += 1;
                ensure!(unseen <= args.moves, "virsh has told no event of {unseen} moves");
            }
            number += 1;
        }
        if unseen > 0 {
            println!("{name:<10} {unseen} more moves, of which virsh did not tell both events, do not count");
        }
        medians.push(figures.print(name));
        print_phases(&pair)?;
    }
    for (index, what) in ["downtime", "lost work", "total"].iter().enumerate() {
        println!("{what:<12} vmove / libvirt (medians): {:.2}", medians[1][index] / medians[0][index]);
    }
    Ok(())
}

/// What the daemons say of the time that their migrations took: the median of each phase.
fn print_phases(pair: &Pair) -> Result<()> {
    let mut phases: Vec<(String, Vec<f64>)> = Vec::new();
    for host in &pair.hosts {
        let history = host.node.ask(&["history"])?;
        let all = history["migrations"].as_array().into_iter().flatten();
        for migration in all.filter(|migration| migration["role"] == "source") {
            for phase in migration["outcome"]["report"]["phases"].as_array().into_iter().flatten() {
                let name = phase["name"].as_str().unwrap_or_default();
                let ms = phase["duration_ms"].as_f64().unwrap_or_default();
                match phases.iter_mut().find(|(known, _)| known == name) {
                    Some((_, all)) => all.push(ms),
                    None => phases.push((name.to_owned(), vec![ms])),
                }
            }
        }
    }
    for (name, mut values) in phases {
        values.sort_by(f64::total_cmp);
        println!("{:<10} {:<12} {:>9} {:>9.1}", "  phase", name, "", values[values.len() / 2]);
    }
    Ok(())
}

/// Whether both events were seen; only then it counts.
fn measure(pair: &Pair, from: usize, figures: &mut Figures) -> Result<bool> {
    let (here, there) = (&pair.hosts[from], &pair.hosts[1 - from]);
    // They listen some time after their start: with 300 ms, an event was missed.
    let (stop, resume) = (Watcher::start(here, "STOP")?, Watcher::start(there, "RESUME")?);
    let before = here.beacon()?;
    let first = work(&before)?;
    std::thread::sleep(WATCHED);
    let (at, done) = work(&before)?;
    let rate = (done - first.1) / (at - first.0).as_secs_f64();
    let begun = Instant::now();
    pair.migrate(from, &[])?;
    let total = begun.elapsed().as_secs_f64() * 1e3;
    let after = there.beacon()?;
    std::thread::sleep(WATCHED);
    let (end, all) = work(&after)?;
    let elapsed = (end - at).as_secs_f64();
    pair.alive_at(1 - from)?;
    let (Some(stop), Some(resume)) = (stop.seconds()?, resume.seconds()?) else { return Ok(false) };
    figures.total.push(total);
    figures.lost.push((elapsed - (all - done) / rate) * 1e3);
    figures.downtime.push((resume - stop) * 1e3);
    Ok(true)
}

fn work(page: &vmove_tests::beacon::BeaconPage) -> Result<(Instant, f64)> {
    let beacon = page.read().context("the guest's page has moved")?;
    ensure!(beacon.errors == 0, "{}", beacon.verdict());
    Ok((Instant::now(), beacon.work as f64))
}

/// `virsh qemu-monitor-event`, which ends with the first event.
struct Watcher(Guarded);

impl Watcher {
    fn start(host: &Host, event: &str) -> Result<Self> {
        let mut command: Command = host.command("virsh");
        command.args(["-q", "-c", "qemu:///system", "qemu-monitor-event"]);
        command.args(["--event", event, "--timestamp", "--timeout", "120"]);
        Ok(Self(command.stdout(Stdio::piped()).spawn()?.into()))
    }

    /// When it was, in seconds of the day. Nothing if it was not seen, as happens with libvirt 9.0 at the destination.
    fn seconds(mut self) -> Result<Option<f64>> {
        if self.0.wait(Duration::from_secs(1))?.is_none() {
            return Ok(None);
        }
        let said = self.0.output()?;
        // 2026-11-27 11:39:00.123+0000: event STOP for domain ...
        let time = said.split(' ').nth(1).with_context(|| format!("no event: {said}"))?;
        let time = time.split('+').next().unwrap_or_default();
        let parts = time.split(':').map(str::parse::<f64>).collect::<Result<Vec<_>, _>>();
        let parts = parts.with_context(|| format!("expected the time of an event, virsh said {said:?}"))?;
        ensure!(parts.len() == 3, "expected a time, found {time}");
        Ok(Some(parts[0] * 3600.0 + parts[1] * 60.0 + parts[2]))
    }
}

impl Figures {
    fn print(&mut self, arm: &str) -> [f64; 3] {
        let mut medians = [0.0; 3];
        let all =
            [("downtime ms", &mut self.downtime), ("lost ms", &mut self.lost), ("total ms", &mut self.total)];
        for (index, (what, values)) in all.into_iter().enumerate() {
            values.sort_by(f64::total_cmp);
            let median = values[values.len() / 2];
            println!(
                "{arm:<10} {what:<12} {:>9.1} {median:>9.1} {:>9.1}",
                values[0],
                values[values.len() - 1]
            );
            medians[index] = median;
        }
        medians
    }
}
