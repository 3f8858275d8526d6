//! Which disks of this node get another image just now, and what came of those that did.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio_util::sync::CancellationToken;
use vmove_qmp::disks::DiskCounters;
use vmove_types::disk_move::DiskMove;

/// Moves that have ended and are still told of.
const REMEMBERED: usize = 32;

/// All moves of disks of a node. A VM has one at a time at most.
#[derive(Debug, Default)]
pub(crate) struct DiskMoves(Mutex<VecDeque<Arc<Told>>>);

/// A move: what is told of it.
#[derive(Debug)]
pub(crate) struct Told {
    now: Mutex<DiskMove>,
    /// What the guest had done with the disk when it got the new image.
    switched: OnceLock<DiskCounters>,
    /// Calls it off.
    pub(crate) cancel: CancellationToken,
}

impl Told {
    pub(crate) fn new(begun: DiskMove) -> Arc<Self> {
        Arc::new(Self { now: Mutex::new(begun), switched: OnceLock::new(), cancel: CancellationToken::new() })
    }

    /// As it is now.
    pub(crate) fn now(&self) -> DiskMove {
        self.lock().clone()
    }

    /// Notes what the guest had done with the disk when it got the new image.
    pub(crate) fn switched(&self, counters: Option<DiskCounters>) {
        counters.into_iter().for_each(|counters| drop(self.switched.set(counters)));
    }

    /// The same with what the guest has done with the disk since it has the new image, if these are the counters of its QEMU.
    pub(crate) fn now_with(&self, counters: &[Option<DiskCounters>]) -> DiskMove {
        let mut now = self.now();
        let switched = self.switched.get();
        let since = |then: &DiskCounters| counters.iter().flatten().find_map(|now| now.since(then));
        now.latency.after = switched.and_then(since);
        now
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut DiskMove)) {
        change(&mut self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, DiskMove> {
        // Fields are set one by one, and only told: a panic leaves none that matters.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DiskMoves {
    /// Enters a move, unless a disk of its VM moves already: then this is the disk.
    pub(crate) fn enter(&self, told: Arc<Told>) -> Result<(), String> {
        let mut all = self.lock();
        let vm = told.now().vm;
        if let Some(disk) = held(&all, &vm) {
            return Err(disk);
        }
        all.push_front(told);
        let ended = |told: &Arc<Told>| told.now().state.has_ended();
        while all.len() > REMEMBERED && all.back().is_some_and(ended) {
            all.pop_back();
        }
        Ok(())
    }

    /// Forgets a move that has not begun.
    pub(crate) fn forget(&self, told: &Arc<Told>) {
        self.lock().retain(|known| !Arc::ptr_eq(known, told));
    }

    /// The disk of this VM that moves now.
    pub(crate) fn of(&self, vm: &str) -> Option<String> {
        held(&self.lock(), vm)
    }

    /// Whether a move of a disk of this VM was asked for, and has not begun.
    pub(crate) fn begins(&self, vm: &str) -> bool {
        let all = self.lock();
        let mut moves = all.iter().map(|told| told.now());
        moves.any(|one| one.vm == vm && !one.state.has_ended() && one.id.is_empty())
    }

    /// Another move that is under way to the same file or device.
    pub(crate) fn other_to(&self, told: &Arc<Told>) -> Option<DiskMove> {
        let own = real(&told.now().to);
        let all = self.lock();
        let others = all.iter().filter(|known| !Arc::ptr_eq(known, told)).map(|known| known.now());
        let mut others = others.filter(|other| !other.state.has_ended());
        others.find(|other| real(&other.to) == own)
    }

    /// Moves of disks of this VM, the newest first.
    pub(crate) fn all_of(&self, vm: &str) -> Vec<Arc<Told>> {
        self.lock().iter().filter(|told| told.now().vm == vm).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Told>>> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The path without links, as far as it is there.
fn real(path: &str) -> PathBuf {
    let path = Path::new(path);
    let folder = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(folder).unwrap_or_else(|| path.to_owned())
}

fn held(all: &VecDeque<Arc<Told>>, vm: &str) -> Option<String> {
    let moves = all.iter().map(|told| told.now()).find(|one| one.vm == vm && !one.state.has_ended());
    moves.map(|one| one.disk)
}

#[cfg(test)]
mod tests {
    use vmove_types::disk_move::DiskMoveState;

    use super::*;

    fn told(vm: &str, disk: &str) -> Arc<Told> {
        Told::new(DiskMove { vm: vm.to_owned(), disk: disk.to_owned(), ..DiskMove::default() })
    }

    #[test]
    fn a_vm_has_one_move_at_a_time_and_the_newest_are_remembered() {
        let moves = DiskMoves::default();
        let first = told("a", "vda");
        moves.enter(Arc::clone(&first)).unwrap();
        assert_eq!(moves.enter(told("a", "vdb")), Err("vda".to_owned()));
        moves.enter(told("b", "vda")).unwrap();
        first.update(|it| it.state = DiskMoveState::Closing);
        assert_eq!(moves.of("a").as_deref(), Some("vda"), "not before all is done");
        first.update(|it| it.state = DiskMoveState::Moved);
        assert_eq!(moves.of("a"), None);
        for number in 0..REMEMBERED {
            let next = told("a", &number.to_string());
            moves.enter(Arc::clone(&next)).unwrap();
            next.update(|it| it.state = DiskMoveState::Failed);
        }
        let known = moves.all_of("a");
        assert_eq!(known[0].now().disk, (REMEMBERED - 1).to_string());
        assert!(!known.iter().any(|told| Arc::ptr_eq(told, &first)), "the oldest is forgotten");
        assert_eq!(moves.of("b").as_deref(), Some("vda"), "one at work is not");
        assert!(moves.begins("b") && !moves.begins("a"));
        let (one, other) = (told("c", "vda"), told("d", "vda"));
        for (told, path) in [(&one, "/tmp/x"), (&other, "/tmp/../tmp/x")] {
            told.update(|it| it.to = path.to_owned());
            moves.enter(Arc::clone(told)).unwrap();
        }
        assert_eq!(moves.other_to(&other).map(|other| other.vm).as_deref(), Some("c"));
        one.update(|it| it.state = DiskMoveState::Cancelled);
        assert_eq!(moves.other_to(&other), None);
        moves.forget(&known[0]);
        assert_eq!(moves.all_of("a").len(), known.len() - 1);
    }
}
