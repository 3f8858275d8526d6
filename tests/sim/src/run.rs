//! One schedule, from the guest's start to the last look at what is left.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::sleep;
use vmove_node::peer::PROTOCOL_VERSION;
use vmove_types::group::{GroupOutcome, GroupProgress};
use vmove_types::report::HeadStartStats;

use crate::oracle;
use crate::plan::Schedule;
use crate::world::World;
use crate::world::daemon;
use crate::world::guest::Guest;
use crate::world::operator;

/// Between two looks at how far it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Blows that have not come by then would find nothing under way.
const BLOWS_LAST: Duration = Duration::from_secs(20);
/// A migration that goes wrong is asked for again so many times.
const ATTEMPTS: u32 = 3;
/// When everything works again, each migration must have ended by then: that is longer than any time limit of a session.
const SETTLES_WITHIN: Duration = Duration::from_secs(400);
/// How often an operator tries to help.
const RECOVERIES: u32 = 4;

/// What came of a schedule.
#[derive(Debug, Clone)]
pub struct Report {
    /// The schedule.
    pub schedule: Schedule,
    /// What must not be and was.
    pub violations: Vec<String>,
    /// Of all that happened.
    pub hash: u64,
    /// Things that the daemon of each node has done.
    pub steps: [u64; 2],
    /// Blows that came while something was under way.
    pub struck: usize,
    /// By the clock of the simulation.
    pub took: Duration,
    /// Migrations by which a member of a group followed the others later.
    pub followed: usize,
    /// How often a guest was told to go on though another of its group lacked its device.
    pub early_resumes: usize,
    /// What finished migrations say of memory that was sent ahead while the guest had its device.
    pub head_starts: Vec<HeadStartStats>,
    /// Whether the guest was on a visit that has ended.
    pub visited: bool,
    /// How it ended.
    pub end: End,
}

/// How a schedule ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// The guest is at the other node.
    Moved,
    /// It is where it was.
    Stayed,
    /// Its QEMU was killed.
    Died,
}

/// Runs a schedule. `memory_dir`: a folder on tmpfs, which is empty and is so again afterwards. `prints`: all that happens.
///
/// # Errors
/// The simulation itself does not work here.
pub fn run(schedule: Schedule, memory_dir: &Path, prints: bool) -> anyhow::Result<Report> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    let report = runtime.block_on(async {
        let world = World::new(schedule, memory_dir, prints);
        let end = walk(&world).await;
        let steps = world.steps();
        let followed: Vec<String> = operator::groups(&world).iter().flat_map(followed).collect();
        // What a daemon does not know of holds no VM.
        let told = world.told();
        for id in followed.iter().filter(|id| !told.lock().is_ok_and(|told| told.contains(*id))) {
            world.violation(format!("the daemon was not told of migration {id}"));
        }
        let head_starts = operator::head_starts(&world);
        let visited = operator::has_visited(&world);
        world.end();
        let end = end?;
        let schedule = world.state().schedule.clone();
        let struck = world.state().struck;
        anyhow::Ok(Report {
            schedule,
            violations: world.violations(),
            hash: world.hash(),
            steps,
            struck,
            took: world.elapsed(),
            followed: followed.len(),
            early_resumes: world.state().early_resumes,
            head_starts,
            visited,
            end,
        })
    });
    drop(runtime);
    for node in crate::plan::NODES {
        // What a violation has left over.
        let _ = std::fs::remove_dir_all(memory_dir.join(node));
    }
    report
}

async fn walk(world: &World) -> anyhow::Result<End> {
    for node in 0..crate::plan::NODES.len() {
        daemon::start(world, node, PROTOCOL_VERSION);
    }
    sleep(LOOK_INTERVAL).await;
    let guests = world.state().schedule.guests;
    for vm in 0..guests {
        operator::start_guest(world, 0, vm).await.context("the guest did not start")?;
    }
    crate::world::guest::start(world);
    world.begin_blows();
    under_blows(world).await;
    world.no_more_blows();
    while !world.is_calm() {
        sleep(LOOK_INTERVAL).await;
    }
    settle(world).await;
    if world.state().schedule.and_back && world.violations().is_empty() && !is_lost(world) {
        move_back(world).await;
    }
    oracle::look(world).await;
    Ok(match (is_lost(world), operator::home(world)) {
        (true, _) => End::Died,
        (false, Some(0)) => End::Stayed,
        (false, _) => End::Moved,
    })
}

fn followed(group: &GroupProgress) -> Vec<String> {
    match &group.outcome {
        GroupOutcome::Done { report } => report.followed.clone(),
        _ => Vec::new(),
    }
}

/// Whether a guest is lost: the others are looked at all the same.
fn is_lost(world: &World) -> bool {
    lost(world).any(|lost| lost)
}

fn lost(world: &World) -> impl Iterator<Item = bool> {
    let state = world.state();
    let gone = |vm| !state.machines.iter().any(|machine| machine.alive && machine.vm == vm);
    let of = |(vm, guest): (usize, &Guest)| guest.is_lost || guest.may_be_lost && gone(vm);
    state.guests.iter().enumerate().map(of).collect::<Vec<_>>().into_iter()
}

/// Asks for a migration, again if it was called off, while blows come.
async fn under_blows(world: &World) {
    let (mut begun, mut seen) = (0, None);
    let until = world.elapsed() + BLOWS_LAST;
    while world.elapsed() < until {
        if operator::home(world) == Some(0) && begun < ATTEMPTS && !has_left(world) {
            begun += u32::from(operator::send_off(world).await);
        }
        sleep(LOOK_INTERVAL).await;
        if operator::visitor(world).is_some() {
            let after_ms = world.state().schedule.visit.map_or(0, |visit| visit.after_ms);
            let since = *seen.get_or_insert(world.elapsed());
            if world.elapsed() >= since + Duration::from_millis(after_ms) {
                operator::end_visit(world).await;
            }
        }
        if has_left(world) && oracle::all_ended(world) {
            return;
        }
    }
}

/// The guest is at the other node, or was there for a visit.
fn has_left(world: &World) -> bool {
    operator::home(world) == Some(1) || operator::has_visited(world)
}

/// Everything works again: waits for migrations to end, and does what an operator does where one cannot by itself.
async fn settle(world: &World) {
    for _ in 0..RECOVERIES {
        let until = world.elapsed() + SETTLES_WITHIN;
        while !(world.is_calm() && oracle::all_ended(world)) && world.elapsed() < until {
            // A side that cannot go on by itself keeps the other one waiting.
            if oracle::needs_help(world) && world.elapsed() + SETTLES_WITHIN > until + daemon::RECONNECT_FOR {
                break;
            }
            sleep(LOOK_INTERVAL).await;
            // Otherwise it lasts.
            operator::end_visit(world).await;
        }
        if !oracle::needs_help(world) {
            break;
        }
        operator::recover(world).await;
        for (vm, lost) in lost(world).enumerate() {
            if lost {
                operator::end_guest(world, vm).await;
            }
        }
        sleep(LOOK_INTERVAL).await;
    }
    let may_be_lost: Vec<bool> = world.state().guests.iter().map(|guest| guest.may_be_lost).collect();
    for (vm, may_be_lost) in may_be_lost.into_iter().enumerate() {
        if may_be_lost && oracle::needs_help(world) {
            operator::end_guest(world, vm).await;
        }
    }
    // Words that nobody waits for, records that are owed.
    sleep(Duration::from_secs(15)).await;
    operator::mend_devices(world).await;
    if let Some(stuck) = oracle::first_not_ended(world) {
        world.violation(format!("a migration does not end: {stuck}"));
    }
}

/// What was left over would be in the way.
async fn move_back(world: &World) {
    let Some(from) = operator::home(world) else { return };
    let begun = operator::migrate(world, from).await;
    let until = world.elapsed() + SETTLES_WITHIN;
    while !(begun && oracle::all_ended(world)) && world.elapsed() < until {
        sleep(LOOK_INTERVAL).await;
    }
    if operator::home(world) != Some(1 - from) {
        let why = oracle::newest_failure(world);
        world.violation(format!("a migration with no blow did not arrive (begun: {begun}): {why:?}"));
    }
    sleep(Duration::from_secs(15)).await;
}
