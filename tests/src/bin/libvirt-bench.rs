//! `virsh migrate --live` by libvirt alone, and carried by vmove, one after the other with the same guest: downtime, lost work, total time.
//!
//! Downtime: from STOP of the source's QEMU to RESUME of the destination's, as `virsh qemu-monitor-event` on each host sees them. Lost work: what the guest, which
//! writes as fast as it can, has not done while it was moved and for a while after, in milliseconds at the rate that it had just before.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use vmove_guest::config::{Config, Rate};
use vmove_tests::guest::Guest;
use vmove_tests::libvirt::{self, Arm, Host, Pair};

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
        for number in 0..args.moves {
            measure(&pair, number % 2, &mut figures).with_context(|| pair.logs())?;
        }
        medians.push(figures.print(name));
    }
    for (index, what) in ["downtime", "lost work", "total"].iter().enumerate() {
        println!("{what:<12} vmove / libvirt (medians): {:.2}", medians[1][index] / medians[0][index]);
    }
    Ok(())
}

fn measure(pair: &Pair, from: usize, figures: &mut Figures) -> Result<()> {
    let (here, there) = (&pair.hosts[from], &pair.hosts[1 - from]);
    let before = here.beacon()?;
    let first = work(&before)?;
    std::thread::sleep(WATCHED);
    let (at, done) = work(&before)?;
    let rate = (done - first.1) / (at - first.0).as_secs_f64();
    let (stop, resume) = (Watcher::start(here, "STOP")?, Watcher::start(there, "RESUME")?);
    // They listen some milliseconds after their start.
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    pair.migrate(from, &[])?;
    figures.total.push(begun.elapsed().as_secs_f64() * 1e3);
    let after = there.beacon()?;
    std::thread::sleep(WATCHED);
    let (end, all) = work(&after)?;
    let elapsed = (end - at).as_secs_f64();
    figures.lost.push((elapsed - (all - done) / rate) * 1e3);
    figures.downtime.push((resume.seconds()? - stop.seconds()?) * 1e3);
    pair.alive_at(1 - from)
}

fn work(page: &vmove_tests::beacon::BeaconPage) -> Result<(Instant, f64)> {
    let beacon = page.read().context("the guest's page has moved")?;
    ensure!(beacon.errors == 0, "{}", beacon.verdict());
    Ok((Instant::now(), beacon.work as f64))
}

/// `virsh qemu-monitor-event`, which ends with the first event.
struct Watcher(Child, String);

impl Watcher {
    fn start(host: &Host, event: &str) -> Result<Self> {
        let mut command: Command = host.command("virsh");
        command.args([
            "-q",
            "-c",
            "qemu:///system",
            "qemu-monitor-event",
            "--event",
            event,
            "--timestamp",
            "--timeout",
            "120",
        ]);
        Ok(Self(command.stdout(Stdio::piped()).spawn()?, format!("{event} at {}", host.node.name())))
    }

    /// When it was, in seconds of the day.
    fn seconds(mut self) -> Result<f64> {
        let mut said = String::new();
        self.0.stdout.take().context("no output")?.read_to_string(&mut said)?;
        self.0.wait()?;
        // 2026-11-27 11:39:00.123+0000: event STOP for domain ...
        let time = said.split(' ').nth(1).with_context(|| format!("no event: {said}"))?;
        let time = time.split('+').next().unwrap_or_default();
        let parts = time.split(':').map(str::parse::<f64>).collect::<Result<Vec<_>, _>>();
        let parts = parts.with_context(|| format!("expected the time of {}, virsh said {said:?}", self.1))?;
        ensure!(parts.len() == 3, "expected a time, found {time}");
        Ok(parts[0] * 3600.0 + parts[1] * 60.0 + parts[2])
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
