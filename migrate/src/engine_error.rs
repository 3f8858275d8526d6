//! Why the engine does not take a request.

use std::path::PathBuf;

use vmove_node::migrations::AbandonError;
use vmove_node::peer::SessionId;
use vmove_node::store::VmStoreError;
use vmove_types::choice::Choice;
use vmove_types::disk::DiskProgress;
use vmove_types::progress::{Phase, Progress, Role};
use vmove_types::units::format_ms;

/// Why a request was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Unknown VM, or its record cannot be used.
    #[error(transparent)]
    Vm(#[from] VmStoreError),
    /// The VM is in a migration already.
    #[error("{vm:?} is in migration {session} already: see `vmove status`, or `vmove cancel {session}`")]
    Busy {
        /// The VM.
        vm: String,
        /// The session.
        session: SessionId,
    },
    /// It has moved, and its disks follow it.
    #[error(
        "{vm:?} has come by migration {session}, and its disks follow it ({left}): see `vmove status {session}`, and ask again then"
    )]
    DisksFollow {
        /// The VM.
        vm: String,
        /// The session.
        session: SessionId,
        /// How far they are.
        left: String,
    },
    /// One of its disks gets another image.
    #[error(
        "Disk {disk} of {vm:?} is on its way to another image: wait for its end, or `vmove move-disk {vm} {disk} --cancel`"
    )]
    DiskMoves {
        /// The VM.
        vm: String,
        /// The disk.
        disk: String,
    },
    /// No such session.
    #[error("No migration {0} on this node: `vmove history` shows those there were")]
    UnknownSession(String),
    /// It cannot be ended.
    #[error(transparent)]
    Abandon(#[from] AbandonError),
    /// The guest must not run here.
    #[error("Migration {0} cannot be reclaimed: {1}")]
    NotReclaimable(SessionId, &'static str),
    /// The guest was to run here again.
    #[error("The guest of migration {0} did not resume at the source: {1}")]
    NotResumed(SessionId, String),
    /// The guest is to read there, and does so faster from here.
    #[error("{vm:?} is to {choice}. To send it all the same, leave out how much it reads ({basis})", basis = choice.basis)]
    Stays {
        /// The VM.
        vm: String,
        /// What each way costs.
        choice: Box<Choice>,
    },
    /// It could not be told what the guest touches.
    #[error("Could not watch {vm:?}")]
    NotWatched {
        /// The VM.
        vm: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Too late.
    #[error(
        "Migration {0} has handed the guest over and can no longer be cancelled: it runs at the destination"
    )]
    TooLate(SessionId),
    /// No such group.
    #[error("No group {0} on this node: `vmove history` shows those there were")]
    UnknownGroup(String),
    /// All of its guests go forward.
    #[error("Group {0} is decided and can no longer be cancelled: every guest goes to its destination")]
    GroupTooLate(SessionId),
    /// The options are out of range.
    #[error("{0}")]
    BadSpec(String),
    /// The guest is on no visit here.
    #[error("{vm:?} is not here for a visit: {why}")]
    NotVisiting {
        /// The VM, or a migration.
        vm: String,
        /// What it is instead.
        why: String,
    },
    /// A migration cannot become a visit.
    #[error("The migration of {vm:?} cannot become a visit: {why}")]
    NotTurned {
        /// The VM, or the migration.
        vm: String,
        /// What is in the way.
        why: String,
    },
    /// Nothing to recover.
    #[error("Migration {0} needs no recovery: it is {1}")]
    NothingToRecover(SessionId, String),
    /// The state directory cannot be used.
    #[error("Could not use {path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
}

impl EngineError {
    /// A VM that this session holds, which stands so.
    pub(crate) fn held(vm: &str, session: SessionId, now: &Progress) -> Self {
        let vm = vm.to_owned();
        if now.phase != Phase::DisksAfter || now.role != Role::Destination {
            return Self::Busy { vm, session };
        }
        let sum = |of: fn(&DiskProgress) -> u64| now.disks.iter().map(of).sum::<u64>();
        let (done, total) = (sum(|disk| disk.bytes_done), sum(|disk| disk.bytes_total));
        let rate: f64 = now.disks.iter().map(|disk| disk.rate_bytes_per_s).sum();
        let percent = u128::from(done) * 100 / u128::from(total.max(1));
        let left = if rate > 0.0 {
            format!("about {} left", format_ms(total.saturating_sub(done) as f64 / rate * 1e3))
        } else {
            "nothing comes at present".to_owned()
        };
        Self::DisksFollow { vm, session, left: format!("{percent} % are across, {left}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_for_a_guest_whose_disks_follow_hears_how_long() {
        let id = SessionId::random();
        let mut now = Progress::begun("1", "web", Role::Destination, "a");
        assert!(EngineError::held("web", id, &now).to_string().contains("already"));
        now.phase = Phase::DisksAfter;
        now.disks = vec![DiskProgress {
            bytes_total: 100,
            bytes_done: 25,
            rate_bytes_per_s: 25.0,
            ..DiskProgress::default()
        }];
        let said = EngineError::held("web", id, &now).to_string();
        assert!(said.contains("25 % are across, about 3.00 s left"), "{said}");
        now.disks[0].rate_bytes_per_s = 0.0;
        let said = EngineError::held("web", id, &now).to_string();
        assert!(said.contains("nothing comes at present"), "{said}");
    }
}
