//! Guests that came for a visit: what the session that serves one is told by others of this daemon.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;
use vmove_node::peer::SessionId;

/// How a visit stands, as far as others than its own session say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum VisitStand {
    /// The guest visits.
    #[default]
    Visits,
    /// It is to stay.
    Stays,
    /// It runs at home again: what it had not touched here is not needed any more.
    WentHome,
}

/// By the session of each visit.
#[derive(Debug, Default)]
pub(crate) struct Visits {
    stands: Mutex<HashMap<SessionId, watch::Sender<VisitStand>>>,
    /// Who ends the QEMU of a guest that has left.
    leaving: tokio::sync::Mutex<()>,
}

impl Visits {
    /// Tells the visit's session, now or when it begins to listen. One that went home does not stay.
    pub(crate) fn tell(&self, visit: SessionId, stand: VisitStand) {
        self.with(visit, |told| {
            told.send_if_modified(|known| {
                let changes = *known != VisitStand::WentHome && *known != stand;
                if changes {
                    *known = stand;
                }
                changes
            });
        });
    }

    /// What the session is told.
    pub(crate) fn listen(&self, visit: SessionId) -> watch::Receiver<VisitStand> {
        self.with(visit, |told| told.subscribe())
    }

    /// Whether its guest was told to stay.
    pub(crate) fn stays(&self, visit: SessionId) -> bool {
        self.with(visit, |told| *told.borrow() == VisitStand::Stays)
    }

    /// One at a time ends a QEMU that is left, and removes what it had by its name.
    pub(crate) async fn leaving(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.leaving.lock().await
    }

    /// The visit has ended.
    pub(crate) fn forget(&self, visit: SessionId) {
        self.stands.lock().unwrap_or_else(PoisonError::into_inner).remove(&visit);
    }

    fn with<T>(&self, visit: SessionId, what: impl FnOnce(&watch::Sender<VisitStand>) -> T) -> T {
        let mut all = self.stands.lock().unwrap_or_else(PoisonError::into_inner);
        what(all.entry(visit).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_told_before_is_heard_and_who_went_home_does_not_stay() {
        let (visits, visit) = (Visits::default(), SessionId::random());
        visits.tell(visit, VisitStand::WentHome);
        visits.tell(visit, VisitStand::Stays);
        assert_eq!(*visits.listen(visit).borrow(), VisitStand::WentHome);
        assert_eq!(*visits.listen(SessionId::random()).borrow(), VisitStand::Visits);
    }
}
