//! Users of registered memory in other processes, for whom deregistration waits too.

use std::fmt::Debug;
use std::sync::{Arc, PoisonError};

use super::sync::{Condvar, Mutex, MutexGuard};

/// Somebody outside this process who reaches this table's memory.
pub(crate) trait PeerUser: Send + Sync + Debug {
    /// Returns when every use that began before this call has ended.
    fn wait_quiet(&self);
}

/// Makes deregistration wait for the user at the other end of a connection, from before that user can know of this table
/// until this is dropped.
#[derive(Debug)]
pub(crate) struct PeerWatch(Arc<Watched>);

/// The user at the other end.
#[derive(Debug)]
pub(super) struct Watched {
    peer: Mutex<Peer>,
    met: Condvar,
}

#[derive(Debug)]
enum Peer {
    /// It may know of this table already, but has not identified itself yet.
    Expected,
    Known(Arc<dyn PeerUser>),
    /// The connection is over, or never came about.
    Gone,
}

impl PeerWatch {
    pub(super) fn new() -> (Self, Arc<Watched>) {
        let watched = Arc::new(Watched { peer: Mutex::new(Peer::Expected), met: Condvar::new() });
        (Self(Arc::clone(&watched)), watched)
    }

    /// The peer has identified itself.
    pub(crate) fn meet(&self, peer: Arc<dyn PeerUser>) {
        *self.0.lock() = Peer::Known(peer);
        self.0.met.notify_all();
    }
}

impl Drop for PeerWatch {
    fn drop(&mut self) {
        *self.0.lock() = Peer::Gone;
        self.0.met.notify_all();
    }
}

impl Watched {
    /// Returns when every use that began before this call has ended. While a connection is being opened, that is not before
    /// the peer has answered or the time for its answer is over.
    pub(super) fn wait_quiet(&self) {
        let mut peer = self.lock();
        let known = loop {
            match &*peer {
                Peer::Expected => peer = self.met.wait(peer).unwrap_or_else(PoisonError::into_inner),
                Peer::Known(user) => break Arc::clone(user),
                Peer::Gone => return,
            }
        };
        drop(peer);
        known.wait_quiet();
    }

    fn lock(&self) -> MutexGuard<'_, Peer> {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::ptr::NonNull;
    use std::sync::mpsc;
    use std::time::Duration;

    use crate::region::{Access, MemoryArea};
    use crate::table::{PeerUser, RegionTable};

    #[derive(Debug)]
    struct Quiet;

    impl PeerUser for Quiet {
        fn wait_quiet(&self) {}
    }

    /// How a connection that is being opened ends: with a peer that has identified itself, or without.
    fn deregistration_waits_until(met: bool) {
        let table = RegionTable::private().unwrap();
        let memory = vec![0_u8; 4096].leak();
        let at = NonNull::new(memory.as_mut_ptr()).unwrap();
        #[allow(unsafe_code)]
        // SAFETY: the memory is leaked, and nobody touches it.
        let area = unsafe { MemoryArea::new(at, 4096) };
        let region = table.register(area, Access::REMOTE_READ).unwrap();
        let watch = table.expect_peer();
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            drop(region);
            done.send(()).unwrap();
        });
        is_done.recv_timeout(Duration::from_millis(100)).unwrap_err();
        if met {
            watch.meet(std::sync::Arc::new(Quiet));
            is_done.recv_timeout(Duration::from_secs(20)).unwrap();
        }
        drop(watch);
        if !met {
            is_done.recv_timeout(Duration::from_secs(20)).unwrap();
        }
    }

    #[test]
    fn memory_stays_registered_until_a_peer_has_said_who_it_is() {
        deregistration_waits_until(true);
    }

    #[test]
    fn memory_stays_registered_until_a_connection_fails() {
        deregistration_waits_until(false);
    }
}
