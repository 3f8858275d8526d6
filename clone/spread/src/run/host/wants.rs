//! Chunks that something on this host waits for, reported by threads that must neither wait nor allocate.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;

use crate::error::SpreadError;

/// Chunks that were asked for and not looked at yet.
const ROOM: usize = 4096;

/// Asks for chunks that something waits for. Clones ask the same host; after its end they do nothing.
#[derive(Debug, Clone)]
pub struct Wants(Arc<Ring>);

#[derive(Debug)]
struct Ring {
    chunks: ArrayQueue<(u16, u64)>,
    /// That of the host's inbox.
    event: OwnedFd,
}

impl Wants {
    pub(super) fn new(event: BorrowedFd<'_>) -> Result<Self, SpreadError> {
        let event = event.try_clone_to_owned().map_err(SpreadError::io("copy an event descriptor"))?;
        Ok(Self(Arc::new(Ring { chunks: ArrayQueue::new(ROOM), event })))
    }

    /// The chunk at `offset` (bytes) of a region is read at once, before everything else, and the root sends what lies around it to
    /// the other hosts early. [`Target::landed`](crate::Target::landed) reports its arrival; a chunk that does not travel is zero.
    ///
    /// False if too many are waited for: ask again a little later. Takes no lock, allocates nothing, does not wait.
    #[must_use]
    pub fn ask(&self, region: u16, offset: u64) -> bool {
        let taken = self.0.chunks.push((region, offset)).is_ok();
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.0.event, &1_u64.to_ne_bytes());
        taken
    }

    /// The oldest that was not looked at.
    pub(super) fn next(&self) -> Option<(u16, u64)> {
        self.0.chunks.pop()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_full_ring_says_so_and_takes_again_later() {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let wants = Wants::new(event.as_fd()).unwrap();
        assert!((0..ROOM as u64).all(|offset| wants.ask(1, offset)));
        assert!(!wants.clone().ask(1, 7));
        assert_eq!(wants.next(), Some((1, 0)));
        assert!(wants.ask(2, 7));
        let mut count = [0; 8];
        rustix::io::read(&event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), ROOM as u64 + 2, "the host is woken");
    }
}
