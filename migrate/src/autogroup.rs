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

use crate::throttle::BULK_NICE;
use vmove_types::progress::Phase;

const AUTOGROUP: &str = "/proc/self/autogroup";

static SESSIONS: Mutex<Option<AutogroupNice>> = Mutex::new(None);

/// What a migration asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A guest runs beside it and should not notice.
    Yields,
    /// A guest waits for it.
    Hurries,
}

/// One migration's part in it, until it is dropped.
pub(crate) struct NiceRequest(Kind);

impl NiceRequest {
    /// What a session in this phase asks for.
    pub(crate) fn in_phase(phase: Phase) -> Option<Self> {
        let kind = match phase {
            Phase::Prepare | Phase::Disks | Phase::HeadStart | Phase::Detach | Phase::Rounds => Kind::Yields,
            Phase::Switchover | Phase::HandOver | Phase::Fetch => Kind::Hurries,
            Phase::DisksAfter | Phase::Check | Phase::Finish => return None,
        };
        AutogroupNice::change(&mut lock(), |nice| nice.count(kind, 1));
        Some(Self(kind))
    }
}

impl Drop for NiceRequest {
    fn drop(&mut self) {
        AutogroupNice::change(&mut lock(), |nice| nice.count(self.0, -1));
    }
}

impl fmt::Debug for NiceRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn lock() -> MutexGuard<'static, Option<AutogroupNice>> {
    SESSIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All migrations of this daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AutogroupNice {
    /// Nice value of the session without us; nothing if it is not ours to change.
    base: Option<i8>,
    now: i8,
    yielding: i32,
    hurrying: i32,
}

impl AutogroupNice {
    fn new(base: Option<i8>) -> Self {
        Self { base, now: base.unwrap_or(0), yielding: 0, hurrying: 0 }
    }

    fn change(all: &mut Option<Self>, change: impl FnOnce(&mut Self)) {
        let nice = all.get_or_insert_with(|| Self::new(base()));
        change(nice);
        let (Some(wanted), now) = (nice.wanted(), nice.now) else { return };
        if wanted != now {
            match std::fs::write(AUTOGROUP, wanted.to_string()) {
                Ok(()) => nice.now = wanted,
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
    // Not by getsid(2) of rustix: it panics where the session's leader is outside of our pid namespace, for which the kernel answers 0.
    let leads = std::fs::read_to_string("/proc/self/stat").is_ok_and(|stat| leads_session(&stat));
    if !leads {
        tracing::info!(
            "this daemon shares a session: with sched_autogroup_enabled its migrations take more of the processors from guests"
        );
        return None;
    }
    nice_in(&std::fs::read_to_string(AUTOGROUP).ok()?)
}

/// Whether a process leads its session, by its `/proc/PID/stat`: pid, name in parentheses, state, parent, process group, session, ...
fn leads_session(stat: &str) -> bool {
    // The name may contain whatever it likes.
    let Some((pid, rest)) = stat.split_once(' ').zip(stat.rsplit_once(')')).map(|(a, b)| (a.0, b.1)) else {
        return false;
    };
    rest.split_whitespace().nth(3) == Some(pid)
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
        let mut nice = AutogroupNice::new(Some(0));
        assert_eq!(nice.wanted(), Some(0));
        nice.count(Kind::Yields, 1);
        assert_eq!(nice.wanted(), Some(BULK_NICE));
        nice.count(Kind::Hurries, 1);
        assert_eq!(nice.wanted(), Some(0));
        nice.count(Kind::Hurries, -1);
        assert_eq!(nice.wanted(), Some(BULK_NICE));
        nice.count(Kind::Yields, -1);
        assert_eq!(nice.wanted(), Some(0));
    }

    #[test]
    fn what_the_operator_has_set_stays() {
        let mut nice = AutogroupNice::new(Some(12));
        nice.count(Kind::Yields, 1);
        assert_eq!(nice.wanted(), Some(12));
        assert_eq!(AutogroupNice::new(None).wanted(), None);
    }

    #[test]
    fn a_leader_has_the_number_of_its_session() {
        assert!(leads_session("812 (vmoved) S 1 812 812 0 -1 4194560"));
        assert!(!leads_session("813 (vmoved) S 812 812 812 0 -1 4194560"));
        assert!(leads_session("7 (a) 9 b) S 1 7 7 0"), "whatever its name is");
        assert!(!leads_session("7 (vmoved) S 0 7 0 0"), "its leader is in another pid namespace");
        assert!(!leads_session("nothing"));
    }

    #[test]
    fn the_kernels_line_is_read() {
        assert_eq!(nice_in("/autogroup-812 nice 0\n"), Some(0));
        assert_eq!(nice_in("/autogroup-812 nice -7\n"), Some(-7));
        assert_eq!(nice_in("nothing"), None);
    }
}
