//! Registering and deregistering.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, Weak};

use super::layout::{INDEX_MASK, Layout, PARTICIPANTS, SLOTS, access_bits};
use super::sync::{Mapped, Mutex, MutexGuard, Ordering, fence, random};
use super::watch::{PeerWatch, Watched};
use crate::error::FabricError;
use crate::region::{Access, MemoryArea, Region, Registration, RemoteRegion};

/// How peers number the bytes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Numbering {
    /// Starts at 0, so that it reveals nothing about the address space to peers.
    Offset,
    /// By address in this process: for peers that use it themselves.
    Address,
}

/// The regions of one fabric.
#[derive(Debug)]
pub(crate) struct RegionTable {
    shared: Mapped<Layout>,
    /// With which others can look in, if the table is shared.
    fd: Option<OwnedFd>,
    numbering: Numbering,
    free: Mutex<Free>,
    watched: Mutex<Vec<Weak<Watched>>>,
}

#[derive(Debug)]
struct Free {
    /// Taken from the front and returned to the back, so that a stale key's slot is reused late.
    slots: VecDeque<usize>,
    seats: Vec<usize>,
}

impl RegionTable {
    /// A table that only this process sees.
    pub(crate) fn private() -> Result<Arc<Self>, FabricError> {
        let shared = Mapped::private().map_err(FabricError::io("map the table of regions"))?;
        Ok(Self::new(shared, None, Numbering::Offset))
    }

    /// A table that peers on this host can look into.
    pub(crate) fn shared() -> Result<Arc<Self>, FabricError> {
        let (shared, fd) =
            Mapped::shared(c"vmove-regions").map_err(FabricError::io("map the table of regions"))?;
        Ok(Self::new(shared, Some(fd), Numbering::Address))
    }

    fn new(shared: Mapped<Layout>, fd: Option<OwnedFd>, numbering: Numbering) -> Arc<Self> {
        let free = Free { slots: (0..SLOTS).collect(), seats: (0..PARTICIPANTS).rev().collect() };
        Arc::new(Self { shared, fd, numbering, free: Mutex::new(free), watched: Mutex::default() })
    }

    /// The descriptor to hand to peers.
    pub(crate) fn fd(&self) -> Option<&OwnedFd> {
        self.fd.as_ref()
    }

    /// The table as another process sees it.
    #[cfg(loom)]
    pub(super) fn seen_by_a_peer(&self) -> super::PeerTable {
        super::PeerTable::of(&self.shared)
    }

    /// Before a peer is told of this table: deregistration waits for it from now on, as long as what this gives exists.
    pub(crate) fn expect_peer(&self) -> PeerWatch {
        let (watch, peer) = PeerWatch::new();
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|peer| peer.strong_count() > 0);
        watched.push(Arc::downgrade(&peer));
        watch
    }

    /// Registers memory.
    pub(crate) fn register(
        self: &Arc<Self>,
        area: MemoryArea,
        access: Access,
    ) -> Result<Region, FabricError> {
        let (entry, remote) = self.insert(area, access)?;
        Ok(Region::new(area, access, remote, remote.rkey, false, Box::new(entry)))
    }

    /// Registers memory for a region that the caller makes. The key is that of local slices too.
    pub(crate) fn insert(
        self: &Arc<Self>,
        area: MemoryArea,
        access: Access,
    ) -> Result<(Entry, RemoteRegion), FabricError> {
        let refuse = |why: String| FabricError::Register { len: area.len(), why };
        let base = area.ptr().as_ptr().expose_provenance() as u64;
        if area.is_empty() || base.checked_add(area.len()).is_none() {
            return Err(refuse("the range is empty or wraps around; give a mapped range".to_owned()));
        }
        let index = self.lock().slots.pop_front().ok_or_else(|| {
            refuse(format!(
                "all {SLOTS} regions of the fabric are in use; drop regions or register larger ones"
            ))
        })?;
        let entry = Entry { table: Arc::clone(self), index };
        let key = new_key(index).map_err(FabricError::io("draw a random key"))?;
        let remote = match self.numbering {
            Numbering::Offset => 0,
            Numbering::Address => base,
        };
        let slot = &self.shared.slots[index];
        slot.remote.store(remote, Ordering::Relaxed);
        slot.base.store(base, Ordering::Relaxed);
        slot.len.store(area.len(), Ordering::Relaxed);
        slot.access.store(access_bits(access), Ordering::Relaxed);
        // Release: who sees the key sees the rest (Acquire in `find`).
        slot.key.store(key, Ordering::Release);
        Ok((entry, RemoteRegion { addr: remote, len: area.len(), rkey: key }))
    }

    /// A seat for a new user of the table.
    pub(super) fn take_seat(&self) -> Result<usize, FabricError> {
        self.lock().seats.pop().ok_or_else(|| FabricError::Register {
            len: 0,
            why: format!("all {PARTICIPANTS} connections of the fabric are in use; close some"),
        })
    }

    /// Takes back the seat of a user that has ended.
    pub(super) fn give_back_seat(&self, seat: usize) {
        self.lock().seats.push(seat);
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.shared
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deregister(&self, index: usize) {
        self.shared.slots[index].key.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst); // the fence of the module's proof
        for seat in &self.shared.seats {
            seat.wait_quiet(|| false);
        }
        let peers: Vec<_> = {
            let watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
            watched.iter().filter_map(Weak::upgrade).collect()
        };
        for peer in peers {
            peer.wait_quiet();
        }
        self.lock().slots.push_back(index);
    }
}

fn new_key(index: usize) -> io::Result<u64> {
    loop {
        let key = (random()? & !INDEX_MASK) | index as u64;
        if key & !INDEX_MASK != 0 {
            return Ok(key);
        }
    }
}

/// One registered region. Its drop waits until no section uses it.
#[derive(Debug)]
pub(crate) struct Entry {
    table: Arc<RegionTable>,
    index: usize,
}

impl Entry {
    /// Which of the slots it has.
    #[cfg(feature = "verbs")]
    pub(crate) fn index(&self) -> usize {
        self.index
    }
}

/// Which of the slots the region with this key has.
#[cfg(feature = "verbs")]
pub(crate) fn slot(key: u64) -> usize {
    crate::sys::memory::to_usize(key & INDEX_MASK)
}

impl Registration for Entry {}

impl Drop for Entry {
    fn drop(&mut self) {
        self.table.deregister(self.index);
    }
}
