//! Guests that came for a visit: what the session that serves one is told by others of this daemon.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use crate::turning::Turning;
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

/// What the session of a visit is told.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Told {
    pub(crate) stand: VisitStand,
    /// Why it could not be taken home by itself when that was last tried.
    not_home: Option<String>,
}

/// By the session of each visit.
#[derive(Debug, Default)]
pub(crate) struct Visits {
    told: Mutex<HashMap<SessionId, watch::Sender<Told>>>,
    /// Who ends the QEMU of a guest that has left.
    leaving: tokio::sync::Mutex<()>,
    /// Visits whose guest's QEMU at home is being ended, or has.
    left: Mutex<HashSet<SessionId>>,
    /// Migrations that are to become visits.
    pub(crate) turning: Turning,
}

impl Visits {
    /// Tells the visit's session, now or when it begins to listen. One that went home does not stay.
    pub(crate) fn tell(&self, visit: SessionId, stand: VisitStand) {
        self.with(visit, |told| {
            told.send_if_modified(|known| {
                let changes = known.stand != VisitStand::WentHome && known.stand != stand;
                if changes {
                    known.stand = stand;
                }
                changes
            });
        });
    }

    /// Tells it why its guest could not be taken home.
    pub(crate) fn tell_not_home(&self, visit: SessionId, why: String) {
        self.with(visit, |told| told.send_modify(|known| known.not_home = Some(why)));
    }

    /// What the session is told.
    pub(crate) fn listen(&self, visit: SessionId) -> Listening {
        Listening { told: self.with(visit, watch::Sender::subscribe), shown: None }
    }

    /// Whether its guest was told to stay.
    pub(crate) fn stays(&self, visit: SessionId) -> bool {
        self.with(visit, |told| told.borrow().stand == VisitStand::Stays)
    }

    /// One at a time ends a QEMU that is left, and removes what it had by its name.
    pub(crate) async fn leaving(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.leaving.lock().await
    }

    /// Whether nobody has begun to end the QEMU that this visit's guest has left.
    pub(crate) fn begins_to_leave(&self, visit: SessionId) -> bool {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).insert(visit)
    }

    /// The session has ended.
    pub(crate) fn forget(&self, visit: SessionId) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).remove(&visit);
        self.told.lock().unwrap_or_else(PoisonError::into_inner).remove(&visit);
        self.turning.forget(visit);
    }

    fn with<T>(&self, visit: SessionId, what: impl FnOnce(&watch::Sender<Told>) -> T) -> T {
        let mut all = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        what(all.entry(visit).or_default())
    }
}

/// The session's end of it.
#[derive(Debug)]
pub(crate) struct Listening {
    told: watch::Receiver<Told>,
    shown: Option<String>,
}

/// What is said of a visit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// The guest is to stay.
    Stays,
    /// It runs at home again.
    WentHome,
    /// It could not be taken home, and why.
    NotHome(String),
}

impl Listening {
    pub(crate) fn stand(&self) -> VisitStand {
        self.told.borrow().stand
    }

    /// Waits until something is said. Each reason for not being home is said once, how it stands each time. Cancel-safe.
    pub(crate) async fn said(&mut self) -> Said {
        let shown = &self.shown;
        let told = self.told.wait_for(|t| t.stand != VisitStand::Visits || t.not_home != *shown).await;
        let Ok(told) = told.map(|told| told.clone()) else { return std::future::pending().await };
        match (told.stand, told.not_home) {
            (VisitStand::Stays, _) => Said::Stays,
            (VisitStand::WentHome, _) | (_, None) => Said::WentHome,
            (VisitStand::Visits, Some(why)) => {
                self.shown = Some(why.clone());
                Said::NotHome(why)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_told_before_is_heard_and_who_went_home_does_not_stay() {
        let (visits, visit) = (Visits::default(), SessionId::random());
        visits.tell_not_home(visit, "no".to_owned());
        let mut listening = visits.listen(visit);
        assert_eq!(listening.said().await, Said::NotHome("no".to_owned()));
        visits.tell(visit, VisitStand::WentHome);
        visits.tell(visit, VisitStand::Stays);
        assert_eq!(listening.said().await, Said::WentHome);
        assert_eq!(visits.listen(visit).stand(), VisitStand::WentHome);
        assert_eq!(visits.listen(SessionId::random()).stand(), VisitStand::Visits);
    }
}
