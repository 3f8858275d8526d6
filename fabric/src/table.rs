//! Which memory is registered, under which keys, and a way to end every use of it.
//!
//! A key names a slot of the table (its low bits) and proves knowledge (its random bits), so a look-up is one
//! index and one comparison. Whoever touches registered memory does so inside a [`Section`]; deregistration
//! clears the key and then waits until every section that might have seen it has ended:
//!
//! ```text
//! user:        busy = odd;  fence;  read key, use memory;  busy = even (release)
//! deregister:  key = 0;     fence;  wait until each busy is even or has changed (acquire)
//! ```
//!
//! The two fences make it impossible that the user misses the cleared key *and* the deregistering thread misses
//! the odd number. The table can lie in shared memory: then users in other processes look into it
//! ([`PeerTable`]) while their own table holds their busy numbers.
//!
//! Rules (for the `unsafe` in this file):
//! 1. A slot with a key describes memory whose owner promised validity until deregistration returns.
//! 2. A [`Piece`] borrows the section in which its key was seen, so deregistration cannot return before it is gone.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use crate::error::{FabricError, RemoteStatus};
use crate::region::{Access, LocalSlice, MemoryArea, Region, Registration, RemoteRegion};
use crate::sys::memory::{Piece, to_usize};
use crate::sys::net::random;
use crate::sys::shm::{Mapped, Shareable};

/// Regions that may be registered at once.
pub(crate) const SLOTS: usize = 4096;
/// Connections that may be open at once.
pub(crate) const PARTICIPANTS: usize = 1024;
const INDEX_MASK: u64 = SLOTS as u64 - 1;

/// What others look into. All atomics, so it can be shared.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Layout {
    slots: [Slot; SLOTS],
    seats: [Seat; PARTICIPANTS],
}

// SAFETY: every field is made of atomics (and padding, which is never read).
unsafe impl Shareable for Layout {}

#[repr(C)]
#[derive(Debug)]
struct Slot {
    /// 0: free or being deregistered.
    key: AtomicU64,
    /// First address in the numbering that peers use.
    remote: AtomicU64,
    /// First address in the owner's process.
    base: AtomicU64,
    len: AtomicU64,
    access: AtomicU64,
}

/// What concerns one connection. One cache line each: they change with every transfer.
#[repr(C, align(64))]
#[derive(Debug)]
struct Seat {
    /// Odd while the connection is in a section.
    busy: AtomicU64,
    /// As long as the connection's peer may reach memory through it: a random number that the peer was told; 0 when
    /// the connection is closed.
    door: AtomicU64,
}

const READ: u64 = 1;
const WRITE: u64 = 2;

/// How peers number the bytes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Numbering {
    /// From 0: tells peers nothing about the address space.
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
    watchers: Mutex<Vec<Weak<dyn Watcher>>>,
}

/// Somebody outside this process who reaches this table's memory.
pub(crate) trait Watcher: Send + Sync + std::fmt::Debug {
    /// Returns when every use that began before this call has ended.
    fn wait_quiet(&self);
}

#[derive(Debug)]
struct Free {
    /// Taken from the front and returned to the back, so that a stale key's slot is reused late.
    slots: std::collections::VecDeque<usize>,
    participants: Vec<usize>,
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
        let free = Free { slots: (0..SLOTS).collect(), participants: (0..PARTICIPANTS).rev().collect() };
        Arc::new(Self { shared, fd, numbering, free: Mutex::new(free), watchers: Mutex::default() })
    }

    /// The descriptor to hand to peers.
    pub(crate) fn fd(&self) -> Option<&OwnedFd> {
        self.fd.as_ref()
    }

    /// Deregistration waits for this user too, as long as it exists.
    pub(crate) fn watch(&self, watcher: &Arc<dyn Watcher>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(Arc::downgrade(watcher));
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
        slot.access.store(
            u64::from(access.remote_read) * READ + u64::from(access.remote_write) * WRITE,
            Ordering::Relaxed,
        );
        // Pairs with the Acquire in `find`: who sees the key sees the rest.
        slot.key.store(key, Ordering::Release);
        Ok((entry, RemoteRegion { addr: remote, len: area.len(), rkey: key }))
    }

    /// A new user of the table.
    pub(crate) fn join(self: &Arc<Self>) -> Result<Participant, FabricError> {
        let index = self.lock().participants.pop().ok_or_else(|| FabricError::Register {
            len: 0,
            why: format!("all {PARTICIPANTS} connections of the fabric are in use; close some"),
        })?;
        Ok(Participant { table: Arc::clone(self), index })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deregister(&self, index: usize) {
        self.shared.slots[index].key.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst); // the fence of the module's proof
        for seat in &self.shared.seats {
            wait_quiet(&seat.busy, || false);
        }
        let watchers: Vec<_> = {
            let watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
            watchers.iter().filter_map(Weak::upgrade).collect()
        };
        for watcher in watchers {
            watcher.wait_quiet();
        }
        self.lock().slots.push_back(index);
    }
}

/// Waits until the section that `busy` shows, if any, has ended, or `give_up` says so.
fn wait_quiet(busy: &AtomicU64, mut give_up: impl FnMut() -> bool) {
    let seen = busy.load(Ordering::Acquire);
    if seen % 2 == 0 {
        return;
    }
    // Sections last for one system call. Sleeping, not spinning: the user may have to run on this processor,
    // and this thread may outrank it.
    while busy.load(Ordering::Acquire) == seen && !give_up() {
        std::thread::sleep(Duration::from_micros(20));
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
    /// Which of the [`SLOTS`] it has.
    #[cfg(feature = "verbs")]
    pub(crate) fn index(&self) -> usize {
        self.index
    }
}

/// Which of the [`SLOTS`] the region with this key has.
#[cfg(feature = "verbs")]
pub(crate) fn slot(key: u64) -> usize {
    to_usize(key & INDEX_MASK)
}

impl Registration for Entry {}

impl Drop for Entry {
    fn drop(&mut self) {
        self.table.deregister(self.index);
    }
}

impl Layout {
    /// Finds the memory behind a key. What is returned is valid as long as the caller's section.
    fn find(&self, key: u64) -> Option<&Slot> {
        let slot = &self.slots[to_usize(key & INDEX_MASK)];
        (slot.key.load(Ordering::Acquire) == key && key & !INDEX_MASK != 0).then_some(slot)
    }

    /// Where `len` bytes that a peer calls `addr` are in the owner's process.
    fn resolve(&self, key: u64, addr: u64, len: u64, need: u64) -> Result<u64, RemoteStatus> {
        let slot = self.find(key).ok_or(RemoteStatus::BadKey)?;
        if slot.access.load(Ordering::Relaxed) & need != need {
            return Err(RemoteStatus::AccessDenied);
        }
        let offset = addr.checked_sub(slot.remote.load(Ordering::Relaxed)).ok_or(RemoteStatus::OutOfRange)?;
        let end = offset.checked_add(len).ok_or(RemoteStatus::OutOfRange)?;
        if len == 0 || end > slot.len.load(Ordering::Relaxed) {
            return Err(RemoteStatus::OutOfRange);
        }
        Ok(slot.base.load(Ordering::Relaxed) + offset)
    }
}

/// What a request does with memory of the side that is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    Read,
    Write,
}

impl Need {
    fn bits(self) -> u64 {
        match self {
            Self::Read => READ,
            Self::Write => WRITE,
        }
    }
}

/// One connection's right to use registered memory.
#[derive(Debug)]
pub(crate) struct Participant {
    table: Arc<RegionTable>,
    index: usize,
}

impl Participant {
    /// Index of this user's seat, for peers.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Lets the peer reach memory: the number to tell it, and where in this process that number is.
    pub(crate) fn open_door(&self) -> io::Result<(u64, u64)> {
        let door = &self.table.shared.seats[self.index].door;
        let token = random()? | 1; // never 0
        door.store(token, Ordering::SeqCst);
        Ok((token, std::ptr::from_ref(door).expose_provenance() as u64))
    }

    /// Ends that. The caller then waits until the peer is quiet; sections that it begins later see the closed door.
    pub(crate) fn close_door(&self) {
        self.table.shared.seats[self.index].door.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst); // as in `deregister`
    }

    /// The regions it may use.
    pub(crate) fn table(&self) -> &Arc<RegionTable> {
        &self.table
    }

    /// Begins to use registered memory. Keep it short: deregistration waits for the end.
    pub(crate) fn enter(&mut self) -> Section<'_> {
        let busy = &self.table.shared.seats[self.index].busy;
        busy.store(busy.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        fence(Ordering::SeqCst); // the fence of the module's proof
        Section { layout: &self.table.shared, busy }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        self.table.lock().participants.push(self.index);
    }
}

/// While this exists, nothing that was found to be registered gets deregistered.
#[derive(Debug)]
pub(crate) struct Section<'p> {
    layout: &'p Layout,
    busy: &'p AtomicU64,
}

impl Section<'_> {
    /// Memory of this side, for its own use.
    pub(crate) fn local(&self, slice: &LocalSlice) -> Option<Piece<'_>> {
        let slot = self.layout.find(slice.key)?;
        let offset = (slice.addr as u64).checked_sub(slot.base.load(Ordering::Relaxed))?;
        if offset + u64::from(slice.len) > slot.len.load(Ordering::Relaxed) {
            return None;
        }
        // SAFETY: rules 1 and 2: the key is alive in this section and the range inside the region.
        Some(unsafe { Piece::new(slice.addr, to_usize(u64::from(slice.len))) })
    }

    /// Memory of this side that a peer asks for, as a slice that [`local`](Self::local) takes in later sections.
    pub(crate) fn grant(
        &self,
        key: u64,
        addr: u64,
        len: u32,
        need: Need,
    ) -> Result<LocalSlice, RemoteStatus> {
        let base = self.layout.resolve(key, addr, u64::from(len), need.bits())?;
        Ok(LocalSlice { addr: to_usize(base), len, key })
    }
}

impl Drop for Section<'_> {
    fn drop(&mut self) {
        // Pairs with the Acquire in `wait_quiet`: what was done in the section is over for who sees the even number.
        self.busy.store(self.busy.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

/// The table of a peer on this host, to look into.
#[derive(Debug)]
pub(crate) struct PeerTable(Mapped<Layout>);

impl PeerTable {
    /// Maps the table that a peer handed over.
    pub(crate) fn open(fd: BorrowedFd<'_>) -> io::Result<Self> {
        Mapped::open(fd).map(Self)
    }

    /// Where in the peer's process the memory is that a request names. The caller is in a section of its own.
    pub(crate) fn resolve(&self, key: u64, addr: u64, len: u32, need: Need) -> Result<u64, RemoteStatus> {
        self.0.resolve(key, addr, u64::from(len), need.bits())
    }

    /// The number of the peer's door that this side goes through; 0 when it is closed.
    pub(crate) fn door(&self, index: usize) -> u64 {
        self.0.seats.get(index).map_or(0, |seat| seat.door.load(Ordering::Acquire))
    }

    /// Waits until the section that the peer's user `index` is in, if any, has ended, or `give_up` says so.
    pub(crate) fn wait_quiet(&self, index: usize, give_up: impl FnMut() -> bool) {
        if let Some(seat) = self.0.seats.get(index) {
            wait_quiet(&seat.busy, give_up);
        }
    }
}
