//! Phase Loaded: QEMU has the device state and runs nothing. Only the source's word ends this, however long that takes.

use std::sync::Arc;

use super::disk_check::DiskCheck;
use super::error::DestinationError;
use super::monitor::{Connecting, Monitor};
use super::owner::{Guest, Owner};
use super::page_messages::take_hashes;
use super::session::{Control, End, Event, Session, Waited, qemu_lives};
use super::verify::SourceHashes;
use crate::ownership::DestinationEvent;
use crate::proto::message::{DestinationStand, SourceStand, ToDestination, ToSource};
use crate::vmm::QemuHandle;
use vmove_types::problem::chain;
use vmove_types::progress::Outcome;

/// A guest that waits for the commit.
#[derive(Debug)]
pub(super) struct Loaded {
    pub process: Arc<dyn QemuHandle>,
    pub monitor: Reached,
    /// Length of the device state.
    pub state_bytes: u64,
    pub hashes: SourceHashes,
}

/// Whether the monitor answers.
#[derive(Debug)]
pub(super) enum Reached {
    Yes(Monitor),
    /// QEMU was found again by a process that did not start it.
    NotYet(Connecting),
}

/// What ends the phase.
enum Decision {
    /// The guest is ours.
    Commit,
    /// QEMU has ended, so that the source may take the guest back although it has committed.
    Gone(DestinationError),
}

impl Loaded {
    /// Goes on until the source has decided, over as many connections as it takes. Over `control`, the first one, the source is told that
    /// the device state is here; without it the source is waited for. `None` if the session has ended.
    pub(super) async fn run(
        mut self,
        session: &mut Session,
        mut control: Option<Control>,
    ) -> Option<(Owner, Control)> {
        let mut news = control.is_some();
        loop {
            let mut open = match control.take() {
                Some(open) => open,
                None => match session.wait_for_source(Some(&*self.process)).await {
                    Waited::Source(control) => control,
                    Waited::QemuEnded(error) => {
                        self.end_unowned(session, chain(&error)).await;
                        return None;
                    }
                    Waited::Abandoned => {
                        self.end_unowned(session, chain(&DestinationError::Abandoned)).await;
                        return None;
                    }
                    Waited::DaemonEnds => return None,
                },
            };
            let told = if std::mem::take(&mut news) { open.send(&ToSource::Loaded).await } else { Ok(()) };
            let decided = match told {
                Ok(()) => self.until_decided(session, &mut open).await,
                Err(error) => Err(error.into()),
            };
            let end = match decided {
                Ok(Decision::Commit) => match session.advance(DestinationEvent::Commit) {
                    Ok(()) => return Some((self.commit(session), open)),
                    // libvirt has the guest run here all the same: the line is owed.
                    Err(DestinationError::Journal { .. }) if session.files.of_libvirt => {
                        match session.advance_owing(DestinationEvent::Commit) {
                            Ok(()) => return Some((self.commit(session), open)),
                            Err(error) => error.into(),
                        }
                    }
                    Err(error @ DestinationError::Journal { .. }) => {
                        // The line may be there as a whole. Until it is not, a daemon started anew would find the guest to be its own: with its
                        // QEMU that is right.
                        session.cut_back().await;
                        match self.process.kill().await {
                            Ok(()) => {
                                self.give_back(session, open, error).await;
                                return None;
                            }
                            Err(alive) => alive.into(),
                        }
                    }
                    Err(error) => error.into(),
                },
                Ok(Decision::Gone(error)) => {
                    let end = End::Failed(error);
                    open.tell_failure(&end).await;
                    session.remove(Some(self.process), end.stays()).await;
                    return None;
                }
                Err(End::Aborted(stays)) => {
                    session.remove(Some(self.process), stays).await;
                    return None;
                }
                Err(end) => end,
            };
            // As in Owner: libvirt may have it run here already.
            if !(session.files.of_libvirt && self.process.alive()) {
                open.tell_failure(&end).await;
            }
            session.reconnecting(&end);
        }
    }

    /// QEMU is ended, if it has not ended by itself: it never ran the guest, so that a source that has given the guest up may take it
    /// back. It hears so from the journal, when it asks.
    async fn end_unowned(self, session: &mut Session, why: String) {
        if let Err(error) = self.process.kill().await {
            return session.give_up_owned(format!("{why}; {}", chain(&error)));
        }
        self.process.end_if_stuck();
        match session.advance_owing(DestinationEvent::QemuEnded) {
            Ok(()) => session.remove(None, why.into()).await,
            Err(error) => session.give_up_owned(format!("{why}; {}", chain(&error))),
        }
    }

    /// The guest may not run here, since that cannot be written down, and must not wait for room on a disk. Our QEMU, which never ran it,
    /// has ended: so the source may take it back, as in [`Loaded::gone`].
    async fn give_back(self, session: &mut Session, mut control: Control, error: DestinationError) {
        if let Err(error) = session.advance_owing(DestinationEvent::QemuEnded) {
            return session.give_up_owned(chain(&error));
        }
        let _ = control.send(&ToSource::Resume(DestinationStand::Gone)).await;
        let end = End::Failed(error);
        control.tell_failure(&end).await;
        session.remove(None, end.stays()).await;
    }

    async fn until_decided(&mut self, session: &mut Session, control: &mut Control) -> Result<Decision, End> {
        loop {
            session.start_readers()?;
            tokio::select! {
                biased;
                monitor = self.monitor.connected() => match monitor {
                    Ok(monitor) => self.monitor = Reached::Yes(monitor),
                    Err(error) => {
                        self.monitor = Reached::NotYet(Connecting::to_monitor_of(session));
                        return Err(error.into());
                    }
                },
                event = session.next(control) => {
                    if let Some(decision) = self.event(event?, session, control).await? {
                        return Ok(decision);
                    }
                }
            }
        }
    }

    async fn event(
        &mut self,
        event: Event,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<Option<Decision>, End> {
        match session.common_event(event, control).await? {
            Some(Event::Message(message)) => {
                let decision = self.message(message, session, control).await?;
                control.count_silence_anew();
                return Ok(decision);
            }
            Some(Event::Tick) => {
                session.look_at_source(control)?;
                if let Some(gone) = self.gone(session, control).await? {
                    return Ok(Some(gone));
                }
                session.tell_progress(control).await?;
            }
            _ => {}
        }
        Ok(None)
    }

    async fn message(
        &mut self,
        message: ToDestination,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<Option<Decision>, End> {
        match message {
            ToDestination::Commit => {}
            ToDestination::Resume(stand) => {
                if let Some(gone) = self.gone(session, control).await? {
                    return Ok(Some(gone));
                }
                if stand == SourceStand::Aborted {
                    // Written down first: a source that was answered does not say it again. Its word counts also where it does not wait.
                    if session.advance(DestinationEvent::PeerAborted).is_ok() {
                        let _ = control.send(&ToSource::Resume(DestinationStand::Gone)).await;
                    }
                    return Err(End::Aborted("the source keeps the guest".to_owned().into()));
                }
                control.send(&ToSource::Resume(DestinationStand::Loaded)).await?;
                self.hashes = SourceHashes::default();
                session.publisher.update(|p| p.outcome = Outcome::Running);
            }
            ToDestination::Abort(why) => return Err(End::Aborted(why)),
            other => {
                return match take_hashes(&mut self.hashes, other) {
                    Some(other) => Err(session.out_of_order(other.name())),
                    None => Ok(None),
                };
            }
        }
        Ok(Some(self.gone(session, control).await?.unwrap_or(Decision::Commit)))
    }

    /// If QEMU has ended, it was never told to run the guest, and the source may take that back although it has committed. That is safe
    /// without a line: a daemon started anew that finds Loaded finds that QEMU has ended, too.
    async fn gone(&self, session: &mut Session, control: &mut Control) -> Result<Option<Decision>, End> {
        let Err(error) = qemu_lives(&*self.process) else { return Ok(None) };
        session.advance_owing(DestinationEvent::QemuEnded)?;
        // If that is lost, the source asks, and is answered from the journal.
        let _ = control.send(&ToSource::Resume(DestinationStand::Gone)).await;
        Ok(Some(Decision::Gone(error)))
    }

    /// The source has given the guest up, and the journal says so.
    fn commit(self, session: &Session) -> Owner {
        let Self { process, monitor, state_bytes, hashes } = self;
        let guest = match monitor {
            Reached::Yes(monitor) => Guest::Paused(monitor),
            Reached::NotYet(connecting) => Guest::PausedUnreached(connecting),
        };
        let disk_check = DiskCheck::new(&session.journal.record().prepare);
        Owner::new(process, guest, state_bytes, hashes, disk_check)
    }
}

impl Reached {
    /// Waits until it answers. Never ends if it does already. Cancel-safe.
    async fn connected(&mut self) -> Result<Monitor, DestinationError> {
        match self {
            Self::Yes(_) => std::future::pending().await,
            Self::NotYet(connecting) => connecting.connected().await,
        }
    }
}
