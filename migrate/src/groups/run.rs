//! A group from its first gate to its end. Once it is decided all go forward: a member whose destination lost it before it ran there is back at the
//! source, and follows the others by a migration of its own.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::engine::{Engine, New};
use crate::group::barrier::{Barrier, Verdict, decide};
use crate::group::record::{CalledOff, GroupRecord, GroupState};
use crate::owed::TRY_AGAIN;
use vmove_node::journal::Journal;
use vmove_node::peer::SessionId;
use vmove_types::problem::chain;
use vmove_types::progress::{GuestPlace, Outcome};
use vmove_types::time::Mono;

/// Between two looks at members that have no task in this process.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// Longest pause between attempts of a member to follow the others.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A group's journal, and who is shown what it says.
struct Group {
    engine: Arc<Engine>,
    journal: Journal<GroupRecord>,
    show: watch::Sender<GroupRecord>,
}

/// Runs a group to its end. `barrier`: nothing if an earlier process of the daemon had begun it.
pub(super) async fn run(
    engine: Arc<Engine>,
    barrier: Option<Arc<Barrier>>,
    journal: Journal<GroupRecord>,
    show: watch::Sender<GroupRecord>,
) {
    let began = Mono::now();
    let mut group = Group { engine, journal, show };
    match &barrier {
        Some(barrier) => {
            let verdict = decide(barrier, &mut group.journal, |journal, error| {
                tracing::warn!(path = %journal.path().display(), %error, "cannot write a group's journal; trying again");
            })
            .await;
            tracing::info!(?verdict, "the group is settled");
            debug_assert!(!matches!(verdict, Verdict::Open | Verdict::Deciding), "it was decided");
        }
        None => group.call_off_if_undecided(),
    }
    group.shown();
    group.wait_for_members().await;
    let incomplete = match group.journal.record().state {
        GroupState::Decided => group.bring_together().await,
        GroupState::Gathering | GroupState::CalledOff => None,
    };
    let fresh = barrier.map(|barrier| (barrier, Mono::now().ms_since(began)));
    group.end(incomplete, fresh).await;
}

impl Group {
    fn shown(&self) {
        self.show.send_replace(self.journal.record().clone());
    }

    /// A daemon started anew finds no decision: its members are being brought back.
    fn call_off_if_undecided(&mut self) {
        if self.journal.record().state == GroupState::Gathering {
            let why = "the daemon was started anew before the group was decided".to_owned();
            let off = CalledOff { vm: None, why, cancelled: false, refused: false };
            let written =
                self.journal.update_owing(|r| (r.state, r.off) = (GroupState::CalledOff, Some(off)));
            if let Err(error) = written {
                tracing::warn!(%error, "cannot write a group's journal; trying again at its end");
            }
        }
    }

    async fn wait_for_members(&self) {
        for member in &self.journal.record().members {
            self.wait_for(member.last_session()).await;
        }
    }

    async fn wait_for(&self, id: SessionId) {
        // One that has not begun will not.
        while self.engine.session_now(id).is_some_and(|progress| !progress.outcome.is_end()) {
            match self.engine.progress(&id.to_string()) {
                Ok(mut progress) => drop(progress.wait_for(|p| p.outcome.is_end()).await),
                Err(_) => sleep(LOOK_AGAIN).await,
            }
        }
    }

    /// Has members that are still at the source follow, as long as that may help. Says what is not as it should be in the end.
    async fn bring_together(&mut self) -> Option<String> {
        let until = Instant::now() + self.engine.node.config.reconnect_for;
        let mut pause = TRY_AGAIN;
        loop {
            let (behind, others) = self.not_there();
            if !others.is_empty() || behind.is_empty() {
                let all: Vec<String> = behind.iter().map(|(_, why)| why.clone()).chain(others).collect();
                return (!all.is_empty()).then(|| all.join("; "));
            }
            if Instant::now() >= until {
                let all: Vec<String> = behind.into_iter().map(|(_, why)| why).collect();
                return Some(all.join("; "));
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            for (index, why) in behind {
                tracing::warn!(why, "a member of a decided group is at the source: it follows the others");
                self.follow(index).await;
            }
        }
    }

    /// Members that are at the source and can follow, by index; and what is wrong with others.
    fn not_there(&self) -> (Vec<(usize, String)>, Vec<String>) {
        let (mut behind, mut others) = (Vec::new(), Vec::new());
        for (index, member) in self.journal.record().members.iter().enumerate() {
            let (vm, to) = (&member.vm, &member.to.name);
            let mend = format!("next: vmove migrate {vm} --to {to}");
            match self.engine.session_now(member.last_session()).map(|progress| progress.outcome) {
                Some(Outcome::Done { .. }) => {}
                Some(Outcome::Failed { error, guest: GuestPlace::Source, cancelled: true }) => {
                    others.push(format!("{vm} is at the source: {error}; {mend}"));
                }
                Some(Outcome::Failed { error, guest: GuestPlace::Source, .. }) => {
                    behind.push((index, format!("{vm} is at the source: {error}; {mend}")));
                }
                Some(Outcome::Refused { blockers }) => {
                    let all: Vec<&str> = blockers.iter().map(|blocker| blocker.message.as_str()).collect();
                    behind
                        .push((index, format!("{vm} is at the source: refused: {}; {mend}", all.join("; "))));
                }
                Some(Outcome::Failed { error, guest, .. }) => {
                    let id = member.last_session();
                    let place = guest.as_str();
                    others.push(format!("{vm} is not whole ({place}): {error}; see: vmove status {id}"));
                }
                // It was killed between the line of the group and its first own.
                None => behind.push((index, format!("{vm} is at the source; {mend}"))),
                Some(Outcome::Running | Outcome::Reconnecting { .. }) => {}
            }
        }
        (behind, others)
    }

    async fn follow(&mut self, index: usize) {
        let member = self.journal.record().members[index].clone();
        let session = SessionId::random();
        let known = self.engine.node.vms.get(&member.vm);
        let Ok(vm) = known else { return };
        let noted = self.journal.update(|r| r.members[index].followers.push(session));
        if let Err(error) = noted {
            tracing::warn!(%error, "cannot write a group's journal; trying again");
            return;
        }
        self.shown();
        let (group, to, spec) = (Some(self.journal.record().id), member.to, member.spec);
        let new = New { id: session, vm, to, spec, group, member: None, home: None, choice: None };
        match self.engine.begin_all(vec![new], &CancellationToken::new()) {
            Ok(()) => self.wait_for(session).await,
            Err(error) => {
                tracing::warn!(error = chain(&error), "a member cannot follow the others yet");
                // The last that has begun says where the guest is.
                // Without its line there is no such session: it is as one that has not begun.
                let _ = self.journal.update_owing(|r| {
                    r.members[index].followers.pop();
                });
            }
        }
    }

    /// Figures and end. `fresh`: its barrier, and how long it took, if this process has begun it.
    async fn end(mut self, incomplete: Option<String>, fresh: Option<(Arc<Barrier>, f64)>) {
        let mut report = self.journal.record().report.clone();
        if let Some((barrier, total_ms)) = fresh {
            barrier.fill(&mut report);
            report.total_ms = Some(total_ms);
        }
        let followers = self.journal.record().members.iter().flat_map(|member| &member.followers);
        report.followed = followers.map(ToString::to_string).collect();
        let written = self.journal.update_owing(|r| {
            (r.report, r.incomplete, r.over) = (report, incomplete, true);
        });
        self.shown();
        if written.is_err() {
            while let Err(error) = self.journal.write_owed() {
                tracing::warn!(%error, "cannot write a group's journal; trying again");
                sleep(TRY_AGAIN).await;
            }
        }
    }
}
