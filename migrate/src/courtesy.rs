//! Giving way to guests where nice values of threads do not count.
//!
//! With `sched_autogroup_enabled`, as most distributions have it, the kernel shares the processors out among sessions (setsid(2)) first, and
//! nice values count only among the threads of one session (sched(7), "The autogroup feature"). A QEMU is in a session of its
//! own: two daemons that copy pages on two processors would leave its guest half of one. So while all that a daemon does is to copy the
//! memory of guests that run, its whole session is as nice as its copying threads are; when a guest stands still or waits for its
//! pages it is not. Threads of a real-time class, as those that serve faults, are not concerned.
//!
//! Only a daemon that leads its session does so, as one started by systemd: others would slow down the shell that they were started from.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::progress::Phase;
use crate::throttle::BULK_NICE;

const AUTOGROUP: &str = "/proc/self/autogroup";

static SESSIONS: Mutex<Option<Stances>> = Mutex::new(None);

/// What a migration asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A guest runs beside it and should not notice.
    Yields,
    /// A guest waits for it.
    Hurries,
}

/// One migration's part in it, until it is dropped.
pub(crate) struct Stance(Kind);

impl Stance {
    /// What a session in this phase asks for.
    pub(crate) fn in_phase(phase: Phase) -> Option<Self> {
        let kind = match phase {
            Phase::Prepare | Phase::Rounds => Kind::Yields,
            Phase::Switchover | Phase::HandOver | Phase::Fetch => Kind::Hurries,
            Phase::Check | Phase::Finish => return None,
        };
        Stances::change(&mut lock(), |stances| stances.count(kind, 1));
        Some(Self(kind))
    }
}

impl Drop for Stance {
    fn drop(&mut self) {
        Stances::change(&mut lock(), |stances| stances.count(self.0, -1));
    }
}

impl fmt::Debug for Stance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn lock() -> MutexGuard<'static, Option<Stances>> {
    SESSIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All migrations of this daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stances {
    /// Nice value of the session without us; nothing if it is not ours to change.
    base: Option<i8>,
    now: i8,
    yielding: i32,
    hurrying: i32,
}

impl Stances {
    fn new(base: Option<i8>) -> Self {
        Self { base, now: base.unwrap_or(0), yielding: 0, hurrying: 0 }
    }

    fn change(all: &mut Option<Self>, change: impl FnOnce(&mut Self)) {
        let stances = all.get_or_insert_with(|| Self::new(base()));
        change(stances);
        let (Some(wanted), now) = (stances.wanted(), stances.now) else { return };
        if wanted != now {
            match std::fs::write(AUTOGROUP, wanted.to_string()) {
                Ok(()) => stances.now = wanted,
                // Without CAP_SYS_ADMIN it can be changed ten times in a second only.
                Err(error) => tracing::debug!(%error, wanted, "could not change the session's nice value"),
            }
        }
    }

    fn count(&mut self, kind: Kind, by: i32) {
        match kind {
            Kind::Yields => self.yielding += by,
            Kind::Hurries => self.hurrying += by,
        }
    }

    fn wanted(&self) -> Option<i8> {
        let base = self.base?;
        Some(if self.yielding > 0 && self.hurrying == 0 { base.max(BULK_NICE) } else { base })
    }
}

/// The nice value of our session, if we lead it and the kernel has such values.
fn base() -> Option<i8> {
    // By nix: rustix panics where the session's leader is outside of our pid namespace, for which getsid(2) answers 0.
    let leads = nix::unistd::getsid(None).is_ok_and(|session| session == nix::unistd::getpid());
    if !leads {
        tracing::info!(
            "this daemon shares a session: with sched_autogroup_enabled its migrations take more of the processors from guests"
        );
        return None;
    }
    nice_in(&std::fs::read_to_string(AUTOGROUP).ok()?)
}

/// Of a line such as `/autogroup-812 nice 0`.
fn nice_in(line: &str) -> Option<i8> {
    line.trim().rsplit_once(" nice ")?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_waits_comes_before_one_that_runs() {
        let mut stances = Stances::new(Some(0));
        assert_eq!(stances.wanted(), Some(0));
        stances.count(Kind::Yields, 1);
        assert_eq!(stances.wanted(), Some(BULK_NICE));
        stances.count(Kind::Hurries, 1);
        assert_eq!(stances.wanted(), Some(0));
        stances.count(Kind::Hurries, -1);
        assert_eq!(stances.wanted(), Some(BULK_NICE));
        stances.count(Kind::Yields, -1);
        assert_eq!(stances.wanted(), Some(0));
    }

    #[test]
    fn what_the_operator_has_set_stays() {
        let mut stances = Stances::new(Some(12));
        stances.count(Kind::Yields, 1);
        assert_eq!(stances.wanted(), Some(12));
        assert_eq!(Stances::new(None).wanted(), None);
    }

    #[test]
    fn the_kernels_line_is_read() {
        assert_eq!(nice_in("/autogroup-812 nice 0\n"), Some(0));
        assert_eq!(nice_in("/autogroup-812 nice -7\n"), Some(-7));
        assert_eq!(nice_in("nothing"), None);
    }
}
