//! A session that moves with others waits for them: before its guest is changed, before it is stopped, and before it is given up. Without others nothing
//! here waits. The conversation with the destination goes on meanwhile.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use vmove_types::group::Gate;
use vmove_types::spec::Mode;

use super::control::Control;
use super::conversation::{Heard, Serving, Until};
use super::error::{SourceError, Stop};
use super::session::Session;
use super::stopped::Stopped;
use super::stopping::Stopping;
use super::warm::Warm;
use crate::group::barrier::Fate;
use crate::group::record::CalledOff;
use crate::proto::message::ToSource;

/// A guest that waits for others writes on: it is caught up with so often.
const KEEP_WARM: Duration = Duration::from_secs(1);
/// What was written in less time than this crosses in the pause.
const STILL_WARM: Duration = Duration::from_millis(50);

impl Warm {
    /// Waits for the others at a gate.
    pub(super) async fn gather(&mut self, session: &mut Session, gate: Gate) -> Result<(), Stop> {
        reach(session, gate);
        wait(session, &mut self.control, Serving::Rounds(&mut self.pages), gate).await
    }

    /// Ready to be stopped: the others may not be yet, and what the guest writes meanwhile crosses in further rounds.
    pub(super) async fn be_ready(&mut self, session: &mut Session) -> Result<(), Stop> {
        if session.member.is_none() {
            return Ok(());
        }
        let mut caught_up = Instant::now();
        reach(session, Gate::Ready);
        loop {
            let waited = {
                let serving = Serving::Rounds(&mut self.pages);
                let waiting = wait_for(session, &mut self.control, serving, Gate::Ready, Some(KEEP_WARM));
                waiting.await?
            };
            let pays = !session.report.rounds.is_empty()
                && session.mode != Mode::Postcopy
                && self.rounds_would_pay(session);
            if pays && caught_up.elapsed() > STILL_WARM {
                self.rounds(session).await?;
                self.pages.all_registered(session, &mut self.control).await?;
            }
            caught_up = Instant::now();
            if waited == Waited::Opened {
                return Ok(());
            }
        }
    }
}

impl Stopping {
    /// The others are as near to their stop.
    pub(super) async fn gather(&mut self, session: &mut Session) -> Result<(), Stop> {
        reach(session, Gate::Stop);
        wait(session, &mut self.control, Serving::Rounds(&mut self.pages), Gate::Stop).await
    }
}

impl Stopped {
    /// Waits until the group is decided. The guest stands still meanwhile, and that is told as a part of its pause.
    pub(super) async fn gather(&mut self, session: &mut Session) -> Result<(), Stop> {
        if session.member.is_none() {
            return Ok(());
        }
        reach(session, Gate::Loaded);
        let serving = Serving::Final(&mut self.pages, &mut self.guest.last);
        wait(session, &mut self.control, serving, Gate::Loaded).await?;
        self.guest.pause.step("group");
        Ok(())
    }
}

/// Whether a session that cannot or shall not go on was committed with its group before that: it goes forward then.
pub(super) async fn is_committed(session: &Session, stop: &Stop) -> bool {
    let Some(member) = &session.member else { return false };
    let why = stop.why_told();
    let fate = member.give_up(why.clone(), matches!(stop, Stop::Cancelled), false).await;
    if fate == Fate::Committed {
        tracing::info!(why, "not called off: it was committed with its group before that");
    }
    fate == Fate::Committed
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waited {
    Opened,
    NotYet,
}

fn reach(session: &Session, gate: Gate) {
    if let Some(member) = &session.member {
        member.reach(gate);
    }
}

async fn wait(
    session: &mut Session,
    control: &mut Control,
    serving: Serving<'_>,
    gate: Gate,
) -> Result<(), Stop> {
    wait_for(session, control, serving, gate, None).await.map(drop)
}

/// Waits for the others, and for no longer than `limit`.
async fn wait_for(
    session: &mut Session,
    control: &mut Control,
    mut serving: Serving<'_>,
    gate: Gate,
    limit: Option<Duration>,
) -> Result<Waited, Stop> {
    let Some(member) = session.member.clone() else { return Ok(Waited::Opened) };
    let until = async {
        tokio::select! {
            biased;
            opened = member.opened(gate) => opened.map(|()| Waited::Opened),
            () = over(limit) => Ok(Waited::NotYet),
        }
    };
    tokio::pin!(until);
    loop {
        match session.next_until(control, serving.again(), &mut until).await? {
            Until::Over(waited) => return waited.map_err(|why| stop_of_group(&why)),
            Until::Heard(heard) => look_at(session, &heard)?,
        }
    }
}

async fn over(limit: Option<Duration>) {
    match limit {
        Some(limit) => sleep(limit).await,
        None => std::future::pending().await,
    }
}

/// How a member ends that is called off with its group.
pub(super) fn stop_of_group(why: &CalledOff) -> Stop {
    if why.cancelled { Stop::Cancelled } else { SourceError::Group(why.told()).into() }
}

/// A destination that fails while others are waited for brings all back.
fn look_at(session: &Session, heard: &Heard) -> Result<(), Stop> {
    match heard {
        Heard::PagesRenewed | Heard::Message(ToSource::Prepared | ToSource::Loaded) => Ok(()),
        Heard::Message(ToSource::Resume(_)) => Err(SourceError::GivenBack(session.to().clone()).into()),
        Heard::Message(other) => Err(session.unexpected(other)),
    }
}
