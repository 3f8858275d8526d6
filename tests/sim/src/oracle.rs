//! What must hold. Two owners and wrong pages are seen when they happen ([`crate::world::qemu::run`], [`crate::world::guest`]); here is the rest: every migration
//! ends, the guest is somewhere, and nothing is left over.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use vmove_types::progress::{Outcome, Progress};

use crate::plan::NODES;
use crate::world::World;
use crate::world::cards;
use crate::world::guest;
use crate::world::operator::{groups, home_of, listed};
use crate::world::status::Status;

/// What all daemons list; nothing if one is down.
fn all(world: &World) -> Option<Vec<(&'static str, Progress)>> {
    let mut all = Vec::new();
    for (node, name) in NODES.iter().enumerate() {
        all.extend(listed(world, node)?.into_iter().map(|progress| (*name, progress)));
    }
    Some(all)
}

/// Whether each migration has ended, on both sides.
#[must_use]
pub fn all_ended(world: &World) -> bool {
    all(world).is_some_and(|all| all.iter().all(|(_, progress)| progress.outcome.is_end()))
        && groups(world).iter().all(|group| group.outcome.is_end())
}

/// One that has not.
#[must_use]
pub fn first_not_ended(world: &World) -> Option<String> {
    let Some(all) = all(world) else { return Some("a daemon is down".to_owned()) };
    if let Some(group) = groups(world).iter().find(|group| !group.outcome.is_end()) {
        return Some(format!("a group: {:?}", group.outcome));
    }
    let open = all.iter().find(|(_, progress)| !progress.outcome.is_end())?;
    let (node, Progress { role, phase, outcome, unwritten, .. }) = open;
    Some(format!("{role:?} at {node} in {phase:?}: {outcome:?}, {unwritten:?}"))
}

/// Whether an operator has to do something before the guest is in somebody's hands, or before all is freed.
#[must_use]
pub fn needs_help(world: &World) -> bool {
    let held = all(world).is_none_or(|all| all.iter().any(|(_, p)| p.outcome.holds_vm() || asks(&p.outcome)));
    let damaged = world
        .state()
        .nodes
        .iter()
        .any(|node| node.daemon.as_ref().is_none_or(|daemon| !daemon.vms.damaged().is_empty()));
    held || damaged
}

fn asks(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Failed { error, .. } if error.contains("vmove recover"))
}

/// Why the newest migration has failed, if one has.
#[must_use]
pub fn newest_failure(world: &World) -> Option<String> {
    all(world)?.into_iter().find_map(|(node, progress)| match progress.outcome {
        Outcome::Done { .. } => None,
        other => Some(format!("{node}: {other:?}")),
    })
}

/// At the end: the guest is somewhere, as it was, and nothing else is left.
pub async fn look(world: &World) {
    tokio::task::yield_now().await;
    if world.violations().is_empty() {
        let guests = world.state().guests.len();
        let wrong = (0..guests)
            .filter_map(|vm| guest_is_wrong(world, vm))
            .chain(is_parted(world))
            .chain(left_over(world))
            .chain(cards::wrong(world))
            .collect::<Vec<_>>();
        wrong.into_iter().for_each(|what| world.violation(what));
    }
}

/// Guests that move together are at one node, whatever broke: unless one has died, and with it its memory.
fn is_parted(world: &World) -> Option<String> {
    let guests: Vec<bool> =
        world.state().guests.iter().map(|guest| guest.is_lost || guest.may_be_lost).collect();
    let homes: Vec<_> = (0..guests.len()).map(|vm| home_of(world, vm)).collect();
    let parted = homes.iter().any(|home| *home != homes[0]) && !guests.contains(&true);
    parted.then(|| format!("the group is parted: {homes:?}"))
}

fn guest_is_wrong(world: &World, vm: usize) -> Option<String> {
    let (machines, newest, may_have_ended, paused) = {
        let state = world.state();
        let machines: Vec<_> = state.machines.iter().filter(|m| m.alive && m.vm == vm).collect();
        let seen: Vec<_> =
            machines.iter().map(|m| (m.pid, m.node, m.status, m.copy, Arc::clone(&m.memory))).collect();
        let guest = &state.guests[vm];
        (seen, guest.epoch, guest.is_lost || guest.may_be_lost, state.schedule.paused)
    };
    if may_have_ended && machines.is_empty() {
        return None;
    }
    let [(pid, node, status, copy, memory)] = machines.as_slice() else {
        return Some(format!("expected one QEMU, found {}", machines.len()));
    };
    let expected = if paused { Status::Paused } else { Status::Running };
    // A guest that was paused and whose migration was called off may be left in a state of its own.
    if *status != expected {
        return Some(format!("nobody runs the guest: QEMU {pid} is {}", status.as_str()));
    }
    if *copy != Some(newest) {
        return Some(format!("QEMU {pid} has copy {copy:?} of the guest, the newest is {newest}"));
    }
    let wrong = guest::wrong_pages(world, vm, memory);
    if !wrong.is_empty() {
        return Some(format!("pages {wrong:?} of the guest are not what it wrote"));
    }
    let daemon = world.state().nodes[*node].daemon.clone()?;
    match daemon.vms.get(guest::NAMES[vm]) {
        Ok(vm) if vm.pid == *pid => None,
        other => Some(format!("QEMU {pid} at {} is not among its VMs: {other:?}", NODES[*node])),
    }
}

fn left_over(world: &World) -> Vec<String> {
    let mut found = Vec::new();
    let here: BTreeSet<PathBuf> = world
        .state()
        .machines
        .iter()
        .filter(|machine| machine.alive)
        .map(|machine| machine.ram.clone())
        .collect();
    let mut records = 0;
    for (node, name) in NODES.iter().enumerate() {
        for file in files_below(&world.memory_dir(node)) {
            if !here.contains(&file) {
                found.push(format!("left at {name}: {}", file.display()));
            }
        }
        let Some(daemon) = world.state().nodes[node].daemon.clone() else { continue };
        for holder in daemon.reservations.holders() {
            found.push(format!("memory is still reserved at {name} for {holder}"));
        }
        for vm in daemon.vms.list() {
            records += 1;
            if vm.session.is_some() {
                found.push(format!("the record of the guest at {name} still names a migration"));
            }
        }
        let files = Arc::clone(&world.state().nodes[node].files);
        let files = files.lock().unwrap_or_else(PoisonError::into_inner);
        let parts = files.paths().into_iter().filter(|path| path.extension().is_some_and(|e| e == "part"));
        found.extend(parts.map(|path| format!("left at {name}: {}", path.display())));
    }
    if records != here.len() {
        found.push(format!("expected {} records of VMs, found {records}", here.len()));
    }
    let registered = world.memories().registered();
    if registered > 0 {
        found.push(format!("{registered} pieces of memory are still registered"));
    }
    let connections = world.connections();
    if connections > 0 {
        found.push(format!("{connections} connections are still open"));
    }
    found
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() { found.extend(files_below(&path)) } else { found.push(path) }
    }
    found
}
