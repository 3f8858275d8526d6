//! Forks of one busy guest, one each second, and its migration right after a fork: what a fork leaves of its parent.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use vmove_guest::config::{Config, Rate};

use super::local::{at_work, end};
use super::{ms, number};
use crate::daemon::Node;
use crate::forks::{Parent, done};
use crate::guest::Guest;
use crate::sampler::{Measure, Sampler, now};
use crate::scene::{STEP_TIMEOUT, vmove};

/// From one fork to the next.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long the guest's pace is measured beforehand.
const PACE: Duration = Duration::from_secs(3);
/// What the guest is watched for after a fork, at least, to see it at its pace again.
const AFTERWARDS: Duration = Duration::from_millis(600);

/// A fork of a guest that has been forked before.
#[derive(Debug, Clone, Serialize)]
pub struct Again {
    /// From the request until the child executed guest code, according to the daemon.
    pub all_running_ms: f64,
    /// From the start of the command to its end: the guest has memory of its own then.
    pub answered_ms: f64,
    /// All that the guest stood still, in whatever step, according to the daemon.
    pub stood_still_ms: f64,
    /// The pause in which it was frozen.
    pub pause_ms: f64,
    /// Work that the guest missed from the request until it ran at full rate again, in milliseconds of full-rate work.
    pub lost_work_ms: f64,
    /// The longest time in which the guest was seen to do nothing.
    pub longest_stall_ms: f64,
}

/// Forks of one guest, and migrations of it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Series {
    /// The guest's memory, in MiB.
    pub memory_mib: u32,
    /// The part of it that it has filled and writes to, in MiB.
    pub live_mib: u32,
    /// Pages that it writes in a second.
    pub pages_per_second: f64,
    /// One each second, in order.
    pub forks: Vec<Again>,
    /// Migrations, from the start of the command to its end, without a fork.
    pub moves_ms: Vec<f64>,
    /// The same right after a fork.
    pub moves_after_fork_ms: Vec<f64>,
    /// Errors that children found in their memory.
    pub guest_errors: u64,
}

/// A guest of `memory_mib` that rewrites `live_mib` of its memory, 20,000 pages in a second.
///
/// # Errors
/// When there is no QEMU to run it.
pub fn guest(memory_mib: u32, live_mib: u32) -> Result<Guest> {
    let config = Config {
        working_set_mib: live_mib,
        cold_mib: 0,
        rate: Rate::PagesPerSecond(20_000),
        verify: 1_000,
        ..Config::default()
    };
    Guest::new(memory_mib, config)
}

/// Forks the guest `count` times, one each second, and moves it `rounds` times to `other` without and right after a fork, in turn.
///
/// # Errors
/// When a child is not made or does not work, or the guest does not move.
pub fn series(node: &Node, other: &Node, parent: &Parent, count: usize, rounds: usize) -> Result<Series> {
    let config = &parent.guest.config;
    let mut series = Series {
        memory_mib: parent.guest.memory_mib,
        live_mib: config.working_set_mib + config.cold_mib,
        ..Series::default()
    };
    forks(node, parent, count, &mut series)?;
    for _ in 0..rounds {
        series.moves_ms.push(moved(node, other, parent)?);
        moved(other, node, parent)?;
        let answer = done(node, &["create", &parent.name, "--count", "1"])?;
        series.moves_after_fork_ms.push(moved(node, other, parent)?);
        end(node, &answer)?;
        moved(other, node, parent)?;
    }
    Ok(series)
}

fn forks(node: &Node, parent: &Parent, count: usize, series: &mut Series) -> Result<()> {
    let page = || parent.page(&node.vm(&parent.name)?);
    let sampler = Sampler::start(page()?, Duration::from_millis(1))?;
    let (since, _) = (now(), std::thread::sleep(PACE));
    let rate = sampler.series().rate(Measure::Work, since, now()).context("the guest was not sampled")?;
    series.pages_per_second = rate;
    for _ in 0..count {
        let (begun, since) = (Instant::now(), now());
        let answer = done(node, &["create", &parent.name, "--count", "1"])?;
        let (answered_ms, answered) = (ms(begun), now());
        series.guest_errors += at_work(parent, &answer)?;
        end(node, &answer)?;
        std::thread::sleep(AFTERWARDS.max(INTERVAL.saturating_sub(begun.elapsed())));
        let seen = sampler.series();
        let loss = seen.loss(Measure::Work, rate, since, answered).context("the guest was not sampled")?;
        let figure = |field| number(&answer, field);
        let fork = Again {
            all_running_ms: figure("all_running_ms")?,
            answered_ms,
            // Without the field, from a daemon that does not tell: the pause is all it knows of.
            stood_still_ms: figure("parent_stood_still_ms").or_else(|_| figure("parent_pause_ms"))?,
            pause_ms: figure("parent_pause_ms")?,
            lost_work_ms: loss.lost_ms,
            longest_stall_ms: seen.longest_stall(Measure::Work, since, loss.full_rate_at) as f64 / 1e6,
        };
        eprintln!("{}, forked again: {fork:?}", parent.name);
        series.forks.push(fork);
    }
    Ok(())
}

/// Waits until the guest works at a node, and has found no error so far.
fn works_on(node: &Node, parent: &Parent) -> Result<()> {
    let first = parent.beacon(node, &parent.name)?;
    let deadline = Instant::now() + STEP_TIMEOUT;
    loop {
        let beacon = parent.beacon(node, &parent.name)?;
        ensure!(beacon.errors == 0, "{} found wrong memory: {}", parent.name, beacon.verdict());
        if beacon.beats > first.beats + 50 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{} stands still: {beacon:?}", parent.name);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Moves the guest. Milliseconds from the start of the command to its end.
fn moved(from: &Node, to: &Node, parent: &Parent) -> Result<f64> {
    let begun = Instant::now();
    let end = vmove(from, &["migrate", &parent.name, "--to", to.name(), "--mode", "hybrid"])?;
    let took = ms(begun);
    ensure!(end.code == 0, "{} does not move: {} {}", parent.name, end.answer, end.said);
    eprintln!("{} moved from {} to {}: {took:.0} ms", parent.name, from.name(), to.name());
    works_on(to, parent)?;
    Ok(took)
}
