//! Phase Aborted: the guest goes on at the source as if nothing had been asked.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tracing::Instrument as _;

use super::control::Control;
use super::devices::{bring_back, bring_back_of};
use super::error::{SourceError, Stop};
use super::hold;
use super::session::{Session, hello};
use crate::devices::told;
use crate::group::resuming::ResumePlace;
use crate::kept_memory::let_memory_go;
use crate::node::Node;
use crate::owed;
use crate::ownership::SourceEvent;
use crate::proto::message::{SourceStand, Stays, ToDestination, ToSource};
use crate::publish::Publisher;
use crate::records::{CalledOff, SourceRecord};
use crate::vmm::Leaving;
use vmove_node::journal::Journal;
use vmove_node::peer::{Channel, HelloError, LinkError, LinkKind};
use vmove_types::problem::chain;
use vmove_types::progress::{GuestPlace, Outcome};

/// What the operator is told who has called it off.
const CANCELLED: &str = "Cancelled: the guest goes on at the source";
/// QEMU answers within milliseconds unless its main loop hangs.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);
/// For the destination's reason, which a connection that broke may have left unread.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);
/// For the word that the guest stays here.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);
/// For the answer to that word over a connection of its own.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest pause between attempts to tell a destination that holds the device state that it will not get the guest.
const TELL_INTERVAL: Duration = Duration::from_secs(10);

/// A phase before the hand-over, which can be undone at any moment. What it holds is dropped afterwards.
pub(super) trait Undo {
    /// Lets the guest run again, and puts back what was set in QEMU.
    async fn bring_guest_back(&mut self, session: &Session) -> Result<(), SourceError>;

    /// The connection to the destination, if there is one.
    fn control(&mut self) -> Option<&mut Control>;
}

/// Nothing was done yet.
#[derive(Debug)]
pub(super) struct Untouched;

impl Undo for Untouched {
    async fn bring_guest_back(&mut self, _: &Session) -> Result<(), SourceError> {
        Ok(())
    }

    fn control(&mut self) -> Option<&mut Control> {
        None
    }
}

/// Ends the session before the hand-over.
pub(super) async fn abort(mut session: Session, stop: Stop, mut phase: impl Undo) {
    // Safe without its line: a daemon started anew that finds Warm or Stopped comes to the same end.
    if let Err(error) = session.advance_owing(SourceEvent::GiveUp) {
        return session.end_badly(chain(&error), GuestPlace::PausedAtSource);
    }
    session.remember_what_was_measured();
    // The guest first: it may be waiting. Its writes, too, if they wait for a destination that does not answer.
    if let Some(copies) = &mut session.copies {
        copies.close().await;
    }
    let back = phase.bring_guest_back(&session).await;
    if let Some(copies) = &mut session.copies {
        copies.give_up().await;
    }
    let mut lacks = Vec::new();
    if back.is_ok() {
        note_resumed(&mut session);
        lacks = bring_back(&mut session).await;
    }
    let stop = match phase.control() {
        Some(control) => last_words(&session, control, stop).await,
        None => stop,
    };
    let why = stop.why();
    let cancelled = matches!(stop, Stop::Cancelled);
    if let Some(control) = phase.control() {
        let stays = Stays { why: why.clone(), cancelled };
        let _ = timeout(ABORT_TIMEOUT, control.send(&ToDestination::Abort(stays))).await;
    }
    let blockers = if let Stop::Refused(blockers) = &stop { blockers.clone() } else { Vec::new() };
    let elapsed_ms = session.publisher.elapsed_ms();
    let reason = if cancelled { CANCELLED.to_owned() } else { why.clone() };
    let reached = Some(session.publisher.reached());
    let called_off = CalledOff { why: reason, cancelled, blockers, elapsed_ms, reached };
    session.write_owing(|r| r.called_off = Some(called_off));
    let_memory_go(session.node.disk(), session.vm());
    // Ends the conversation; a destination that had not loaded the state drops everything then.
    drop(phase);
    let (written, is_written) = oneshot::channel();
    if session.journal.record().untold {
        tell_later(&session.node, session.journal.record().clone(), Some(is_written));
    }
    session.write_owed().await;
    let _ = written.send(());
    match (back, stop) {
        (Err(error), _) => not_back(&session, &why, &error),
        (Ok(()), _) if !lacks.is_empty() => {
            session.end_badly(format!("{why}; {}", told(&lacks)), GuestPlace::Source);
        }
        (Ok(()), Stop::Refused(blockers)) => session.publisher.finish(Outcome::Refused { blockers }),
        (Ok(()), Stop::Cancelled) => {
            session.publisher.fail(CANCELLED, GuestPlace::Source, true);
        }
        (Ok(()), Stop::Failed(_)) => session.end_badly(why, GuestPlace::Source),
    }
}

/// A daemon started anew leaves the guest alone from now on: what stops it later is somebody else's wish.
pub(super) fn note_resumed(session: &mut Session) {
    session.write_owing(|r| r.to_resume = false);
}

/// The guest should run here again and does not.
pub(super) fn not_back(session: &Session, why: &str, error: &SourceError) {
    let error = format!("{why}; and the guest did not resume: {}", chain(error));
    session.end_badly(error, GuestPlace::PausedAtSource);
}

/// A connection that broke may have left the destination's reason unread.
pub(super) async fn last_words(session: &Session, control: &mut Control, stop: Stop) -> Stop {
    match &stop {
        Stop::Failed(error) if !error.is_ours() => {}
        _ => return stop,
    }
    let unread = async {
        loop {
            match control.receive().await {
                Ok(message @ (ToSource::Failed(_) | ToSource::Refused(_))) => return Some(message),
                Ok(_) => {}
                Err(_) => return None,
            }
        }
    };
    match timeout(REASON_TIMEOUT, unread).await {
        Ok(Some(message)) => session.unexpected(&message),
        _ => stop,
    }
}

/// QEMU drops its migration, and the guest runs if it did before.
pub(super) async fn cancel_qemu(qemu: &dyn Leaving) -> Result<(), SourceError> {
    qemu.cancel(CANCEL_TIMEOUT).await.map_err(SourceError::qemu("run the guest again"))
}

/// Tells the destination, in the background and until it has heard, that the guest stays here: until then it keeps a paused QEMU, and
/// the memory for it. With `written` it is noted only after that: until then somebody else writes the journal.
pub(crate) fn tell_later(node: &Arc<Node>, record: SourceRecord, written: Option<oneshot::Receiver<()>>) {
    let node = Arc::clone(node);
    let telling = async move {
        let mut pause = Duration::from_millis(100);
        while let Err(error) = tell(&node, &record).await {
            let error = chain(&error);
            tracing::debug!(error, "destination not told yet");
            if pause < TELL_INTERVAL && pause * 2 >= TELL_INTERVAL {
                tracing::warn!(to = %record.to, error, "the destination cannot be told that the guest stays here: it may hold a paused QEMU meanwhile");
            }
            sleep(pause).await;
            pause = (pause * 2).min(TELL_INTERVAL);
        }
        if let Some(written) = written {
            let _ = written.await;
        }
        let path = node.session_dir(record.id).join("source.jsonl");
        let told = Journal::<SourceRecord>::open_on(node.disk(), &path)
            .and_then(|mut j| j.update(|r| r.untold = false));
        if let Err(error) = told {
            tracing::debug!(%error, "the destination will be told once more after the next start");
        }
    };
    vmove_node::task::spawn(telling.in_current_span());
}

async fn tell(node: &Node, record: &SourceRecord) -> Result<(), SourceError> {
    let hello = hello(node, record, LinkKind::Control, 0, record.token);
    let stream = match node.config.dialer.stream(&record.to, &hello).await {
        Ok(stream) => stream,
        // It knows nothing of the session, and has looked: there is nothing to drop.
        Err(LinkError::Hello { source: HelloError::Refused(_), .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let mut channel: Channel<ToSource> = Channel::new(stream);
    channel.send(&ToDestination::Resume(SourceStand::Aborted)).await?;
    let answer = async {
        loop {
            match channel.receive().await? {
                ToSource::Resume(_) => return Ok(()),
                ToSource::Failed(why) => {
                    return Err(SourceError::AtDestination { to: record.to.clone(), why });
                }
                // It tells how far it is as soon as there is a connection.
                _ => {}
            }
        }
    };
    let no_answer = |_| SourceError::NoAnswer { to: record.to.clone(), seconds: ANSWER_TIMEOUT.as_secs() };
    timeout(ANSWER_TIMEOUT, answer).await.map_err(no_answer)?
}

/// Puts back, in a new life of the daemon, what a session had done before the hand-over. Write tracking ended with the old one.
/// The guest does not wait for the journal; the caller does, and holds the VM meanwhile. `stopped`: QEMU is as we had left it. Otherwise the guest was
/// let run, and only its devices are to be seen to.
pub(crate) async fn put_back(
    node: Arc<Node>,
    mut journal: Journal<SourceRecord>,
    publisher: &Publisher,
    stopped: bool,
    resume: Option<&ResumePlace>,
) -> Result<(), SourceError> {
    let next = journal.record().state.step(SourceEvent::GiveUp)?;
    if let Err(error) = journal.update_owing(|r| r.enter(next)) {
        publisher.cannot_write(journal.path(), &error);
    }
    let record = journal.record().clone();
    hold::let_on(&node, &record.vm).await;
    if !record.after.is_empty() {
        // Servers of an earlier life, or of a session that ended badly, keep QEMU from its images.
        vmove_node::image_server::end_in(&record.vm.vm_dir).await;
    }
    let back = if stopped { bring_back_later(&node, &record).await } else { Ok(()) };
    if !record.disks.is_empty() {
        give_up_copies_later(&node, &record).await;
    }
    let_memory_go(node.disk(), &record.vm);
    if back.is_ok() {
        let lacks = bring_back_of(&node, &record, resume).await;
        let noted = journal.update_owing(|r| {
            r.to_resume = false;
            r.are_back(&lacks);
        });
        publisher.update(|p| p.missing_devices = lacks);
        if let Err(error) = noted {
            publisher.cannot_write(journal.path(), &error);
        }
    }
    // Whatever became of the guest here: a destination that holds its state would wait for ever.
    let (written, is_written) = oneshot::channel();
    if record.untold {
        tell_later(&node, record, Some(is_written));
    }
    owed::write_owed(&mut journal, publisher).await;
    let _ = written.send(());
    back
}

/// What an earlier process of this daemon has left in QEMU of copies of disks. Their connections ended with it.
async fn give_up_copies_later(node: &Node, record: &SourceRecord) {
    let gone = match node.config.vmm.monitor(&record.vm).await {
        Ok(monitor) => monitor.give_up_copies(CANCEL_TIMEOUT).await,
        Err(error) => Err(error),
    };
    if let Err(error) = gone {
        let error = chain(&error);
        tracing::warn!(vm = record.vm.name, error, "something of the copies of disks may be left in QEMU");
    }
}

async fn bring_back_later(node: &Node, record: &SourceRecord) -> Result<(), SourceError> {
    let monitor = node.config.vmm.monitor(&record.vm).await.map_err(SourceError::Monitor)?;
    let taken_up = monitor.take_up(record.was_running).await;
    cancel_qemu(&*taken_up.map_err(SourceError::qemu("be asked about its migration"))?).await
}
