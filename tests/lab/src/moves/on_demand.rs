//! Guests whose memory is registered for on-demand paging: nothing is pinned, and what is read is what is there. Needs hosts
//! whose soft RoCE can do that.

use anyhow::{Context, Result, ensure};

use super::trouble::RunCase;
use super::{Moves, expect, figures, report};
use crate::check::collect;

/// Less than the guest has.
const BOUND: &str = "--max-registered 8MiB";
/// The daemon's queue pairs, rings and trial pages.
const OWN_KIB: u64 = 16 << 10;

/// Runs them.
pub(crate) fn all(moves: &Moves<'_>, case: &RunCase<'_>) -> Result<()> {
    case("on_demand_memory_that_may_not_be_pinned_crosses_over_rdma", &|| unless_missing(moves, not_pinned))?;
    case("on_demand_memory_that_was_given_back_is_read_as_it_is_now", &|| unless_missing(moves, given_back))?;
    case("on_demand_paging_that_is_forbidden_is_not_used", &|| unless_missing(moves, forbidden))
}

fn unless_missing(moves: &Moves<'_>, case: fn(&Moves<'_>) -> Result<()>) -> Result<()> {
    let said = moves.must(1, "grep -o 'on_demand=[a-z]*' /run/lab/vmoved.log | tail -1")?;
    if said.trim() != "on_demand=true" {
        vmove_skip::skip!(
            test = "on-demand",
            "soft RoCE of this kernel has no on-demand paging; './run lab test on-demand' has a newer one"
        );
        return Ok(());
    }
    case(moves)
}

/// Both daemons anew, with these flags.
fn restart(moves: &Moves<'_>, flags: &str) -> Result<()> {
    for host in [1, 2] {
        moves.stop(host)?;
        moves.start(host, flags)?;
    }
    Ok(())
}

fn not_pinned(moves: &Moves<'_>) -> Result<()> {
    restart(moves, BOUND)?;
    moves.guest("g")?;
    let moving = moves.moving("--mode postcopy --verify --bandwidth 2MB", "fetch")?;
    for host in [1, 2] {
        let held = moves.held(host)?;
        let pinned = moves.must(host, "grep VmPin /proc/$(cat /run/vmoved.pid)/status | tr -dc 0-9")?;
        let kib: u64 = pinned.trim().parse().with_context(|| pinned.clone())?;
        println!("  h{host}: {held} RDMA objects, {kib} KiB pinned");
        ensure!(held > 0 && kib <= OWN_KIB, "{kib} KiB are pinned on h{host}");
    }
    let done = collect(&moving).context("h1 went away")?;
    ensure!(done.status == 0, "ended with {}: {}", done.status, done.text);
    moved(moves, &report(&done.text)?, 2)?;
    let report = moves.migrate("g", 2, 1, "--mode hybrid --verify")?;
    moved(moves, &report, 1)
}

fn given_back(moves: &Moves<'_>) -> Result<()> {
    restart(moves, "--rdma-on-demand always")?;
    moves.given_back()
}

fn forbidden(moves: &Moves<'_>) -> Result<()> {
    restart(moves, &format!("{BOUND} --rdma-on-demand never"))?;
    moves.guest("g")?;
    let report = moves.migrate("g", 1, 2, "--mode postcopy --verify")?;
    expect(&report, "fabric", "tcp")?;
    moves.works(2, "g")
}

fn moved(moves: &Moves<'_>, report: &serde_json::Value, to: usize) -> Result<()> {
    expect(report, "fabric", "verbs")?;
    ensure!(report["verified"] == true, "{report}");
    println!("  {}", figures(report));
    moves.works(to, "g")
}
