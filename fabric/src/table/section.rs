//! Using registered memory.
//!
//! Rules (for the `unsafe` in this file):
//! 1. A slot with a key describes memory whose owner promised validity until deregistration returns.
//! 2. A [`Piece`] borrows the section in which its key was seen, so deregistration cannot return before it is gone.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use super::layout::{Layout, Need, Seat};
use super::regions::RegionTable;
use super::sync::{Ordering, fence, random};
use crate::error::{FabricError, RemoteStatus};
use crate::region::LocalSlice;
use crate::sys::memory::{Piece, to_usize};

/// One connection's right to use registered memory.
#[derive(Debug)]
pub(crate) struct Participant {
    table: Arc<RegionTable>,
    seat: usize,
}

impl RegionTable {
    /// A new user of the table.
    pub(crate) fn join(self: &Arc<Self>) -> Result<Participant, FabricError> {
        Ok(Participant { table: Arc::clone(self), seat: self.take_seat()? })
    }
}

impl Participant {
    /// Index of this user's seat, for peers.
    pub(crate) fn seat(&self) -> usize {
        self.seat
    }

    /// Lets the peer reach memory: the token to tell it, and the address in this process where the token is.
    pub(crate) fn open(&self) -> io::Result<(u64, u64)> {
        let token = &self.its_seat().token;
        let drawn = random()? | 1; // never 0
        // Relaxed: the peer hears of it by a message that is sent later.
        token.store(drawn, Ordering::Relaxed);
        Ok((drawn, std::ptr::from_ref(token).expose_provenance() as u64))
    }

    /// Ends that. The caller then waits until the peer is quiet; sections that it begins later see that it is closed.
    pub(crate) fn close(&self) {
        self.its_seat().token.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst); // as in `deregister`
    }

    /// The regions it may use.
    pub(crate) fn table(&self) -> &Arc<RegionTable> {
        &self.table
    }

    /// Begins to use registered memory. Keep it short: deregistration waits for the end.
    pub(crate) fn enter(&mut self) -> Section<'_> {
        let seat = self.its_seat();
        // Release: a wait that reads this number knows the sections before it to be over.
        seat.busy.store(seat.busy.load(Ordering::Relaxed) + 1, Ordering::Release);
        fence(Ordering::SeqCst); // the fence of the module's proof
        Section { layout: self.table.layout(), seat }
    }

    fn its_seat(&self) -> &Seat {
        &self.table.layout().seats[self.seat]
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        self.close();
        self.table.give_back_seat(self.seat);
    }
}

/// While this exists, nothing that was found to be registered gets deregistered.
#[derive(Debug)]
pub(crate) struct Section<'p> {
    layout: &'p Layout,
    seat: &'p Seat,
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
        let base = self.layout.resolve(key, addr, len, need)?;
        Ok(LocalSlice { addr: to_usize(base), len, key })
    }
}

impl Drop for Section<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `wait_quiet`.
        self.seat.busy.store(self.seat.busy.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}
