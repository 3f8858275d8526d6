//! Played QEMUs: processes with a run state, a mapping of their RAM file, and a migration that behaves as QEMU's does. In particular one whose stream
//! breaks before it has completed runs the guest on by itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWriteExt as _, DuplexStream};
use tokio::sync::Notify;
use vmove_memory::{Mapping, PageIndex, PageRun, PageTable, RamFile, Want};
use vmove_types::device::PciAddress;

use crate::plan::{NODES, NodeIndex};
use crate::world::guest::{self, PAGES};
use crate::world::status::Status;
use crate::world::{State, World};

/// Beginning of a device state.
const DEVICE_STATE: [u8; 8] = *b"devices:";
/// Its length in bytes.
pub const STATE_LEN: usize = 600;

/// Where a migration from here stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// None.
    None,
    /// Under way; the guest is not stopped.
    Active,
    /// The guest is stopped.
    Stopped,
    /// And nothing writes its memory any more.
    Drained,
    /// All was sent.
    Completed,
    /// The stream broke.
    Failed,
}

impl Stage {
    /// QEMU plugs no device in or out meanwhile. It does again after a migration that broke, though nobody has cancelled that
    /// (`migration_is_running()` of 10.0, `migration_is_idle()` of 7.2).
    pub const fn is_running(self) -> bool {
        matches!(self, Self::Active | Self::Stopped | Self::Drained)
    }
}

/// One QEMU process.
#[derive(Debug)]
pub struct Machine {
    pub pid: i32,
    /// The guest that it has, or waits for.
    pub vm: usize,
    pub node: NodeIndex,
    pub vm_dir: PathBuf,
    pub alive: bool,
    pub status: Status,
    pub memory: Arc<Mapping>,
    pub ram: PathBuf,
    /// The copy of the guest that it has: of its run of that number.
    pub copy: Option<u64>,
    /// Where the pages stand that it took faults for.
    pub table: Option<Arc<PageTable>>,
    /// The page that its main loop has touched.
    pub touched: Option<PageIndex>,
    pub stage: Stage,
    pub exited: Arc<Notify>,
    /// Its memory is that of before a visit: what it wrote while it started went elsewhere.
    pub is_home: bool,
    /// The guest has come for a visit, and gets only pages that it waits for.
    pub visits: bool,
    /// Devices of the node that it has plugged in, by id.
    pub devices: BTreeMap<String, PciAddress>,
    /// By number: pages that were written since a tracker looked last.
    trackers: BTreeMap<u64, Vec<bool>>,
    last_tracker: u64,
}

impl Machine {
    /// Whether the guest can have this page now. On a visit it says that it waits for it, and a page that it has is marked as one that it may have
    /// written, as whoever serves its faults does it.
    pub fn has(&self, page: PageIndex) -> bool {
        let Some(table) = &self.table else { return true };
        if !self.visits {
            return table.state(page).is_final();
        }
        match table.want(page) {
            // Dropped, the page is still wanted: readers find it so.
            Want::Fetch(_) | Want::OnItsWay => false,
            Want::MapNow | Want::ZeroNow | Want::MapAgain => {
                table.mark_mapped(PageRun::new(page, 1));
                true
            }
            Want::Poisoned => true,
        }
    }

    /// A page was written.
    pub fn written(&mut self, page: u64) {
        for dirty in self.trackers.values_mut() {
            dirty[usize::try_from(page).unwrap_or(0)] = true;
        }
    }

    /// Begins to follow writes.
    pub fn track(&mut self) -> u64 {
        self.last_tracker += 1;
        self.trackers.insert(self.last_tracker, vec![false; usize::try_from(PAGES).unwrap_or(0)]);
        self.last_tracker
    }

    /// Pages written since this was asked last.
    pub fn take_written(&mut self, tracker: u64) -> Vec<bool> {
        let dirty = self.trackers.get_mut(&tracker);
        dirty.map_or_else(Vec::new, |dirty| std::mem::replace(dirty, vec![false; dirty.len()]))
    }

    /// Ends it.
    pub fn end_tracking(&mut self, tracker: u64) {
        self.trackers.remove(&tracker);
    }
}

impl State {
    /// The process of this id, if it has not ended.
    pub fn machine(&mut self, pid: i32) -> Option<&mut Machine> {
        self.machines.iter_mut().find(|machine| machine.pid == pid && machine.alive)
    }
}

/// Starts a process. It is none of the daemon's: it outlives it.
///
/// # Errors
/// Its RAM file cannot be opened.
pub fn start(
    world: &World,
    node: NodeIndex,
    vm_dir: &Path,
    ram: &Path,
    status: Status,
) -> Result<i32, vmove_memory::MemoryError> {
    let memory = RamFile::open(ram)?.map()?;
    let pid = world.new_pid();
    let machine = Machine {
        pid,
        vm: guest::of_folder(vm_dir),
        node,
        vm_dir: vm_dir.to_owned(),
        alive: true,
        status,
        memory,
        ram: ram.to_owned(),
        copy: None,
        table: None,
        touched: None,
        stage: Stage::None,
        exited: Arc::default(),
        is_home: false,
        visits: false,
        devices: BTreeMap::new(),
        trackers: BTreeMap::new(),
        last_tracker: 0,
    };
    world.state().machines.push(machine);
    world.note(NODES[node], format!("QEMU {pid} starts"));
    Ok(pid)
}

/// Who ends a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ender {
    /// A blow.
    Blow,
    /// A daemon, which may not end the only copy of the guest.
    Daemon,
    /// An operator, by force.
    Operator,
}

/// Ends a process.
pub fn end(world: &World, pid: i32, by: Ender) {
    let (node, verdict) = {
        let mut state = world.state();
        let state = &mut *state;
        let Some(machine) = state.machines.iter_mut().find(|m| m.pid == pid && m.alive) else { return };
        let vm = machine.vm;
        let guest = &mut state.guests[vm];
        let newest = guest.epoch;
        machine.alive = false;
        machine.stage = Stage::None;
        machine.exited.notify_waiters();
        machine.devices.clear();
        let (node, had_newest) = (machine.node, machine.copy == Some(newest));
        let card = &mut state.nodes[node].card;
        card.plugged = card.plugged.filter(|by| *by != pid);
        let others = state.machines.iter().any(|m| m.alive && m.vm == vm && m.copy == Some(newest));
        let known_lost = guest.is_lost || guest.may_be_lost;
        match (had_newest, others, by) {
            (true, false, Ender::Blow) => guest.is_lost = true,
            (true, true, Ender::Blow) => guest.may_be_lost = true,
            _ => {}
        }
        (node, had_newest && !others && by == Ender::Daemon && !known_lost)
    };
    world.note(NODES[node], format!("QEMU {pid} ends by {by:?}"));
    if verdict {
        world.violation(format!("QEMU {pid}, which a daemon ended, had the only copy of the guest"));
    }
}

/// All QEMUs of a node die.
pub fn kill_all_of(world: &World, node: NodeIndex) {
    let pids: Vec<i32> =
        world.state().machines.iter().filter(|m| m.alive && m.node == node).map(|m| m.pid).collect();
    pids.into_iter().for_each(|pid| end(world, pid, Ender::Blow));
}

/// Lets the guest run in a QEMU. Whether it was there to do so.
pub fn run(world: &World, pid: i32) -> bool {
    let wrong = {
        let mut state = world.state();
        let state = &mut *state;
        let Some(vm) = state.machine(pid).map(|machine| machine.vm) else { return false };
        let newest = state.guests[vm].epoch;
        let elsewhere = state
            .machines
            .iter()
            .find(|m| m.alive && m.vm == vm && m.pid != pid && m.status == Status::Running)
            .map(|m| m.pid);
        let lost = state.guests[vm].is_lost;
        let Some(machine) = state.machine(pid) else { return false };
        if machine.status == Status::Running {
            return true;
        }
        let copy = machine.copy;
        machine.status = Status::Running;
        machine.copy = Some(newest + 1);
        state.guests[vm].epoch = newest + 1;
        match elsewhere {
            Some(other) => Some(format!("two owners: QEMU {pid} runs the guest while QEMU {other} does")),
            None if copy != Some(newest) && !lost => Some(format!(
                "two owners: QEMU {pid} runs copy {copy:?} of the guest, the newest is {newest}"
            )),
            None => None,
        }
    };
    world.note("world", format!("QEMU {pid} runs the guest"));
    wrong.into_iter().for_each(|what| world.violation(what));
    true
}

/// QEMU stops the guest and sends its state into `pipe`, whoever listens at the other end.
pub fn begin_migration(world: &World, pid: i32, mut pipe: DuplexStream) {
    let world = world.clone();
    tokio::spawn(async move {
        guest::moment(&world).await;
        let was_running = {
            let mut state = world.state();
            let Some(machine) = state.machine(pid) else { return };
            let was_running = machine.status == Status::Running;
            if was_running {
                machine.status = Status::FinishMigrate;
            }
            machine.stage = Stage::Stopped;
            was_running
        };
        world.note("world", format!("QEMU {pid} stops the guest"));
        guest::moment(&world).await;
        let copy = {
            let mut state = world.state();
            let Some(machine) = state.machine(pid) else { return };
            machine.stage = Stage::Drained;
            machine.copy.unwrap_or(0)
        };
        let sent = async {
            let bytes = device_state(copy);
            for part in bytes.chunks(STATE_LEN / 3) {
                guest::moment(&world).await;
                pipe.write_all(part).await?;
            }
            guest::moment(&world).await;
            pipe.shutdown().await
        };
        let sent = sent.await;
        guest::moment(&world).await;
        {
            let mut state = world.state();
            let Some(machine) = state.machine(pid) else { return };
            machine.stage = if sent.is_ok() { Stage::Completed } else { Stage::Failed };
            machine.status = match (&sent, was_running) {
                (Ok(()), _) => Status::PostMigrate,
                (Err(_), true) => machine.status,
                (Err(_), false) => Status::Paused,
            };
        }
        world.note("world", format!("QEMU {pid} has sent its state: {}", sent.is_ok()));
        if sent.is_err() && was_running {
            run(&world, pid);
        }
    });
}

fn device_state(copy: u64) -> Vec<u8> {
    let mut bytes = DEVICE_STATE.to_vec();
    bytes.extend(copy.to_le_bytes());
    bytes.resize(STATE_LEN, 0xab);
    bytes
}

/// Of which copy of the guest a device state is; nothing if it is not whole.
#[must_use]
pub fn copy_in(bytes: &[u8]) -> Option<u64> {
    let rest = bytes.strip_prefix(&DEVICE_STATE)?;
    let copy = u64::from_le_bytes(*rest.first_chunk()?);
    (bytes.len() == STATE_LEN).then_some(copy)
}

/// Between two looks at what QEMU does.
pub const LOOK_INTERVAL: Duration = Duration::from_millis(1);
