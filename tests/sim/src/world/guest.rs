//! The guest: what is in each of its pages, and which copy of it is the newest. It runs in one QEMU at a time, writes, and looks whether its memory
//! is what it last was.

use std::path::Path;
use std::time::Duration;

use vmove_memory::{ByteLen, FileOffset, Mapping, PageIndex};

use crate::world::World;
use crate::world::status::Status;

/// Pages of its memory: two parts of which a journal or a message speaks, so that some crosses later.
pub const PAGES: u64 = 128;
/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Pages that it writes again and again.
const HOT: u64 = 6;
/// What QEMU writes into its own copy while it starts.
pub const FIRMWARE: u64 = u64::MAX;

/// The guest, wherever it is.
#[derive(Debug)]
pub struct Guest {
    /// How often it was let run: the newest copy is of that number.
    pub epoch: u64,
    /// What it has written last to each page; 0 where nothing was.
    pub pages: Vec<u64>,
    written: u64,
    /// The QEMU that held the newest copy was ended by a blow.
    pub is_lost: bool,
    /// A QEMU with one of several copies was ended by a blow: whether the guest goes on depends on which counts.
    pub may_be_lost: bool,
    /// It was told to leave its device alone.
    pub is_quiet: bool,
}

impl Default for Guest {
    fn default() -> Self {
        let pages = vec![0; usize::try_from(PAGES).unwrap_or(0)];
        Self { epoch: 1, pages, written: 0, is_lost: false, may_be_lost: false, is_quiet: false }
    }
}

impl Guest {
    /// Something that was never written before.
    pub fn stamp(&mut self) -> u64 {
        self.written += 1;
        self.written
    }
}

/// Writes a stamp to both ends of a page.
pub fn write(memory: &Mapping, page: u64, stamp: u64) {
    for at in [0, PAGE - 8] {
        // A file that was cut off is found by who reads it.
        let _ = memory.copy_in(FileOffset(page * PAGE + at), &stamp.to_le_bytes());
    }
}

/// What is in a page; nothing if its ends differ, or if it cannot be read.
#[must_use]
pub fn read(memory: &Mapping, page: u64) -> Option<u64> {
    let at = |at| {
        let mut bytes = [0; 8];
        memory.copy_out(FileOffset(page * PAGE + at), &mut bytes).ok()?;
        Some(u64::from_le_bytes(bytes))
    };
    let (first, last) = (at(0)?, at(PAGE - 8)?);
    (first == last).then_some(first)
}

/// Names of the guests: a second one moves with the first.
pub const NAMES: [&str; 2] = ["guest", "other"];

/// The guest whose QEMU has this working folder.
#[must_use]
pub fn of_folder(vm_dir: &Path) -> usize {
    NAMES.iter().position(|name| vm_dir.file_name() == Some(name.as_ref())).unwrap_or(0)
}

/// Half of the guest's pages hold something at first.
pub fn fill(world: &World, vm: usize, memory: &Mapping) {
    let mut state = world.state();
    let state = &mut *state;
    for page in 0..PAGES {
        if state.rng.percent(50) {
            let stamp = state.guests[vm].stamp();
            state.guests[vm].pages[usize::try_from(page).unwrap_or(0)] = stamp;
            write(memory, page, stamp);
        }
    }
}

/// Lets it work wherever it runs, until the schedule is over.
pub fn start(world: &World) {
    let world = world.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(world.micros(3_000, 30_000)).await;
            let wrong = work(&world);
            wrong.into_iter().for_each(|what| world.violation(what));
        }
    });
}

/// A few accesses of each QEMU that runs it.
fn work(world: &World) -> Option<String> {
    let mut state = world.state();
    let state = &mut *state;
    for machine in state.machines.iter_mut().filter(|m| m.alive && m.status == Status::Running) {
        let guest = &mut state.guests[machine.vm];
        if state.nodes[machine.node].card.opened_by() == Some(machine.pid) {
            // What a device writes is seen by no tracker.
            let page = state.rng.below(PAGES);
            let stamp = guest.stamp();
            guest.pages[usize::try_from(page).unwrap_or(0)] = stamp;
            write(&machine.memory, page, stamp);
        }
        for _ in 0..state.rng.between(1, 4) {
            let page = if state.rng.percent(70) { state.rng.below(HOT) } else { state.rng.below(PAGES) };
            let index = usize::try_from(page).unwrap_or(0);
            if !machine.has(PageIndex(page)) {
                // It waits for the page.
                continue;
            }
            let (found, expected) = (read(&machine.memory, page), guest.pages[index]);
            if found != Some(expected) {
                return Some(format!("page {page} of the guest holds {found:?}, not {expected}"));
            }
            if state.rng.percent(60) {
                // Now and then it clears a page: zeros do not cross.
                let stamp = if state.rng.percent(20) { 0 } else { guest.stamp() };
                guest.pages[index] = stamp;
                write(&machine.memory, page, stamp);
                machine.written(page);
            }
        }
    }
    None
}

/// Pages that are not what the guest wrote last.
#[must_use]
pub fn wrong_pages(world: &World, vm: usize, memory: &Mapping) -> Vec<u64> {
    let state = world.state();
    (0..PAGES)
        .zip(&state.guests[vm].pages)
        .filter(|(page, expected)| read(memory, *page) != Some(**expected))
        .map(|(page, _)| page)
        .collect()
}

/// Length of its memory.
#[must_use]
pub const fn bytes() -> ByteLen {
    ByteLen(PAGES * PAGE)
}

/// A moment in which QEMU does something.
pub async fn moment(world: &World) {
    let time: Duration = world.micros(200, 12_000);
    tokio::time::sleep(time).await;
}
