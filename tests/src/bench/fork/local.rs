//! Forks on the parent's own host.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::Value;

use super::{children, ms, number};
use crate::daemon::Node;
use crate::forks::{Parent, done, names};
use crate::scene::STEP_TIMEOUT;

/// Forks of one guest with the same number of children, by round.
#[derive(Debug, Clone, Serialize)]
pub struct Forks {
    /// The guest's memory, in MiB.
    pub memory_mib: u32,
    /// The part of it that the guest has filled, in MiB.
    pub live_mib: u32,
    /// Number of children of each fork.
    pub children: usize,
    /// Times with prepared QEMUs.
    pub prepared: Times,
    /// Times with QEMUs started after the request.
    pub cold: Times,
    /// Errors that children found in their memory.
    pub guest_errors: u64,
}

/// Times in milliseconds, one figure for each round.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Times {
    /// From the request until the last child executed guest code, according to the daemon.
    pub all_running_ms: Vec<f64>,
    /// From the start of the command until the benchmark saw each child work. This is later than the true moment, because the benchmark
    /// looks only after the command has ended.
    pub seen_ms: Vec<f64>,
    /// The parent's pause.
    pub pause_ms: Vec<f64>,
}

/// Forks the guest without and with prepared QEMUs, in turn.
///
/// # Errors
/// When a child is not made, or does not work.
pub fn forks(node: &Node, parent: &Parent, count: usize, rounds: usize) -> Result<Forks> {
    let config = &parent.guest.config;
    let mut forks = Forks {
        memory_mib: parent.guest.memory_mib,
        live_mib: config.working_set_mib + config.cold_mib,
        children: count,
        prepared: Times::default(),
        cold: Times::default(),
        guest_errors: 0,
    };
    for _ in 0..rounds {
        forks.guest_errors += fork(node, parent, count, false, &mut forks.cold)?;
        done(node, &["warm", &parent.name, "--count", &count.to_string()])?;
        forks.guest_errors += fork(node, parent, count, true, &mut forks.prepared)?;
    }
    Ok(forks)
}

/// One fork. Afterwards, the parent and the host are as before. Returns the number of errors that children found.
fn fork(node: &Node, parent: &Parent, count: usize, prepared: bool, times: &mut Times) -> Result<u64> {
    let begun = Instant::now();
    let answer = done(node, &["create", &parent.name, "--count", &count.to_string()])?;
    let errors = at_work(parent, &answer)?;
    let seen = ms(begun);
    let all = answer["children"].as_array().map(Vec::as_slice).unwrap_or_default();
    let as_asked = all.iter().filter(|child| child["warm"] == prepared).count();
    ensure!(
        as_asked == count,
        "expected {count} children with warm = {prepared}, found {as_asked} of {}",
        all.len()
    );
    let (running, pause) = (number(&answer, "all_running_ms")?, number(&answer, "parent_pause_ms")?);
    eprintln!(
        "{} x {count}, {}: {running:.0} ms, seen after {seen:.0} ms, parent {pause:.1} ms",
        parent.name,
        if prepared { "prepared" } else { "not prepared" }
    );
    times.all_running_ms.push(running);
    times.seen_ms.push(seen);
    times.pause_ms.push(pause);
    end(node, &answer)?;
    Ok(errors)
}

/// Waits until each child's guest works. Returns the number of errors that they found.
pub(super) fn at_work(parent: &Parent, answer: &Value) -> Result<u64> {
    let deadline = Instant::now() + STEP_TIMEOUT;
    let mut still = Vec::new();
    for (name, pid) in children(answer)? {
        let page = parent.page_in(pid)?;
        let first = page.read();
        still.push((name, page, first));
    }
    let mut errors = 0;
    loop {
        still.retain(|(_, page, first)| match (page.read(), first) {
            (Some(now), Some(first)) if now.beats > first.beats => {
                errors += now.errors;
                false
            }
            _ => true,
        });
        if still.is_empty() {
            return Ok(errors);
        }
        let names: Vec<_> = still.iter().map(|(name, ..)| name).collect();
        ensure!(
            Instant::now() < deadline,
            "expected all children to work, found these to stand still: {names:?}"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Ends the children of an answer.
pub(super) fn end(node: &Node, answer: &Value) -> Result<()> {
    names(answer).iter().try_for_each(|name| done(node, &["kill", name]).map(drop))
}

/// Saves the guest as a template and removes the template. Returns the guest's pauses, by round.
///
/// # Errors
/// When it cannot be saved.
pub fn saves(node: &Node, parent: &Parent, rounds: usize) -> Result<Vec<f64>> {
    let mut pauses = Vec::new();
    for round in 0..rounds {
        let name = format!("kept-{round}");
        let saved = done(node, &["template", "save", &parent.name, &name])?;
        let pause = number(&saved, "parent_pause_ms")?;
        eprintln!("{}, template save: parent {pause:.1} ms", parent.name);
        pauses.push(pause);
        done(node, &["template", "rm", &name])?;
    }
    Ok(pauses)
}
