//! The words that the table consists of, as processes share them, and how one looks into another's.
//!
//! Rule (for the `unsafe` in this file): [`Layout`] has fields of atomics only.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;

use super::sync::{AtomicU64, Mapped, Ordering, pause};
use crate::error::RemoteStatus;
use crate::region::Access;
use crate::sys::memory::to_usize;
use crate::sys::shm::Shareable;

/// Regions that may be registered at once. For loom as few as possible, so that a slot is reused at once.
pub(crate) const SLOTS: usize = if cfg!(loom) { 1 } else { 1 << 15 };
/// Connections that may be open at once.
pub(crate) const PARTICIPANTS: usize = if cfg!(loom) { 2 } else { 1024 };
/// The bits of a key that name its slot.
pub(super) const INDEX_MASK: u64 = SLOTS as u64 - 1;

/// What others look into. All atomics, so it can be shared.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) slots: [Slot; SLOTS],
    pub(super) seats: [Seat; PARTICIPANTS],
}

// SAFETY: every field is made of atomics (and padding, which is never read).
unsafe impl Shareable for Layout {}

/// What is known of one region.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// 0: free or being deregistered.
    pub(super) key: AtomicU64,
    /// First address in the numbering that peers use.
    pub(super) remote: AtomicU64,
    /// First address in the owner's process.
    pub(super) base: AtomicU64,
    pub(super) len: AtomicU64,
    /// [`READ`] and [`WRITE`].
    pub(super) access: AtomicU64,
}

/// What concerns one connection. One cache line each: they change with every transfer.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct Seat {
    /// Odd while the connection is in a section.
    pub(super) busy: AtomicU64,
    /// As long as the connection's peer may reach memory through it: a random number that the peer was told; 0 when
    /// the connection is closed.
    pub(super) token: AtomicU64,
}

const READ: u64 = 1;
const WRITE: u64 = 2;

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

/// What peers may do, as a slot says it.
pub(super) fn access_bits(access: Access) -> u64 {
    u64::from(access.remote_read) * READ + u64::from(access.remote_write) * WRITE
}

impl Layout {
    /// Finds the memory behind a key. What is returned is valid as long as the caller's section.
    pub(super) fn find(&self, key: u64) -> Option<&Slot> {
        let slot = &self.slots[to_usize(key & INDEX_MASK)];
        // Acquire: who sees the key sees the rest (Release in `insert`).
        (slot.key.load(Ordering::Acquire) == key && key & !INDEX_MASK != 0).then_some(slot)
    }

    /// Where `len` bytes that a peer calls `addr` are in the owner's process.
    pub(super) fn resolve(&self, key: u64, addr: u64, len: u32, need: Need) -> Result<u64, RemoteStatus> {
        let slot = self.find(key).ok_or(RemoteStatus::BadKey)?;
        if slot.access.load(Ordering::Relaxed) & need.bits() == 0 {
            return Err(RemoteStatus::AccessDenied);
        }
        let offset = addr.checked_sub(slot.remote.load(Ordering::Relaxed)).ok_or(RemoteStatus::OutOfRange)?;
        let end = offset.checked_add(u64::from(len)).ok_or(RemoteStatus::OutOfRange)?;
        if len == 0 || end > slot.len.load(Ordering::Relaxed) {
            return Err(RemoteStatus::OutOfRange);
        }
        Ok(slot.base.load(Ordering::Relaxed) + offset)
    }
}

#[cfg(loom)]
impl Default for Layout {
    fn default() -> Self {
        Self {
            slots: std::array::from_fn(|_| Slot::default()),
            seats: std::array::from_fn(|_| Seat::default()),
        }
    }
}

impl Seat {
    /// Waits until the section that the seat is in, if any, has ended, or `give_up` says so.
    pub(super) fn wait_quiet(&self, mut give_up: impl FnMut() -> bool) {
        // Acquire: what was done in the section is over for who sees that it has ended.
        let seen = self.busy.load(Ordering::Acquire);
        if seen.is_multiple_of(2) {
            return;
        }
        // Sections last for one system call.
        while self.busy.load(Ordering::Acquire) == seen && !give_up() {
            pause();
        }
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

    /// The same for a table that loom runs.
    #[cfg(loom)]
    pub(super) fn of(layout: &Mapped<Layout>) -> Self {
        Self(layout.again())
    }

    /// Where in the peer's process the memory is that a request names. The caller is in a section of its own.
    pub(crate) fn resolve(&self, key: u64, addr: u64, len: u32, need: Need) -> Result<u64, RemoteStatus> {
        self.0.resolve(key, addr, len, need)
    }

    /// The token of the peer's seat for this connection; 0 when the peer has closed it. To be asked inside a section.
    pub(crate) fn token(&self, seat: usize) -> u64 {
        self.0.seats.get(seat).map_or(0, |seat| seat.token.load(Ordering::Relaxed))
    }

    /// Waits until the section that the peer's user `seat` is in, if any, has ended, or `give_up` says so.
    pub(crate) fn wait_quiet(&self, seat: usize, give_up: impl FnMut() -> bool) {
        if let Some(seat) = self.0.seats.get(seat) {
            seat.wait_quiet(give_up);
        }
    }
}
