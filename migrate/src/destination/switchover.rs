//! Phase Switchover: the guest is stopped at the source, and may still go on there. The last pages come, and the device state.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::device_state::DeviceState;
use super::error::DestinationError;
use super::exports::Exports;
use super::loaded::{Loaded, Reached};
use super::monitor::Monitor;
use super::page_messages::take_hashes;
use super::session::{Control, End, Event, Session, qemu_lives};
use super::verify::SourceHashes;
use crate::ownership::DestinationEvent;
use crate::proto::message::ToDestination;
use crate::vmm::QemuHandle;
use vmove_node::peer::BoxedStream;
use vmove_types::progress::Phase;
use vmove_types::spec::Mode;

/// Pages that a guest may lack when it is resumed, if they come within about this time anyway.
const LAST_PAGES_TIMEOUT: Duration = Duration::from_millis(3);

/// A QEMU that takes the device state in.
#[derive(Debug)]
pub(super) struct Incoming {
    pub process: Arc<dyn QemuHandle>,
    pub monitor: Monitor,
    pub exports: Exports,
    pub state: DeviceState,
}

impl Incoming {
    /// Frames that come to the source for the guest go into its taps here.
    pub(super) fn deliver(&self, session: &mut Session, stream: BoxedStream) {
        session.deliveries.take(stream, self.process.pid(), self.monitor.shared());
    }
}

/// The final set of pages was applied at the end of Filling: from here on faults are answered.
#[derive(Debug)]
pub(super) struct Switchover {
    qemu: Incoming,
    mode: Mode,
    hashes: SourceHashes,
}

impl Switchover {
    /// The final set has been applied to the page tables.
    pub(super) fn begin(session: &Session, qemu: Incoming, mode: Mode) -> Self {
        session.publisher.enter(Phase::Switchover);
        let memory = &session.files.memory;
        memory.begin_serving();
        // The guest stands still until it has what is read now.
        memory.cpu.let_go();
        if let Some(fill) = session.pages.fill() {
            fill.queue.wake();
        }
        let left = memory.left() * session.page_bytes();
        session.publisher.coming(|coming| coming.part(left));
        Self { qemu, mode, hashes: SourceHashes::default() }
    }

    /// Goes on until QEMU has the device state, and with `precopy` every page is here. `None` if the session has ended.
    pub(super) async fn run(
        mut self,
        session: &mut Session,
        control: Option<Control>,
    ) -> Option<(Loaded, Option<Control>)> {
        let Some(mut control) = control else { return self.without_source(session).await };
        let end = match self.until_loaded(session, &mut control).await {
            Ok(bytes) => match self.loaded(session, bytes) {
                Ok(loaded) => return Some((loaded, Some(control))),
                Err(failed) => {
                    let (switchover, end) = *failed;
                    self = switchover;
                    end
                }
            },
            Err(end) => end,
        };
        let end = control.farewell(end).await;
        if session.journal.record().let_go && !matches!(end, End::Aborted(_)) {
            session.reconnecting(&end);
            return self.without_source(session).await;
        }
        session.remove(Some(self.qemu.process), end.stays()).await;
        None
    }

    /// libvirt was let go on: it may give the guest to this side, whatever has become of the source, which is waited for.
    async fn without_source(self, session: &mut Session) -> Option<(Loaded, Option<Control>)> {
        match self.loaded(session, 0) {
            Ok(loaded) => Some((loaded, None)),
            Err(failed) => {
                let (switchover, end) = *failed;
                session.remove(Some(switchover.qemu.process), end.stays()).await;
                None
            }
        }
    }

    /// Returns the length of the device state.
    async fn until_loaded(&mut self, session: &mut Session, control: &mut Control) -> Result<u64, End> {
        // How long the last pages are waited for, once QEMU has the device state.
        let mut patience = Instant::now();
        loop {
            if let Some(bytes) = self.is_loaded(session, patience) {
                return Ok(bytes);
            }
            session.start_readers()?;
            tokio::select! {
                biased;
                loaded = self.qemu.state.loaded() => {
                    loaded.map_err(|source| {
                        DestinationError::DeviceState { log: self.qemu.process.log_tail(), source }
                    })?;
                    patience = Instant::now() + LAST_PAGES_TIMEOUT;
                }
                ended = self.qemu.exports.ended() => ended?,
                // The readers tell when nothing is missing any more.
                event = session.next(control) => self.event(event?, session, control).await?,
                () = sleep_until(patience), if patience > Instant::now() => {}
            }
        }
    }

    fn is_loaded(&self, session: &Session, patience: Instant) -> Option<u64> {
        let DeviceState::Loaded { bytes } = self.qemu.state else { return None };
        // The guest runs on its disks as soon as it is ours.
        if !self.qemu.exports.have_ended() {
            return None;
        }
        let left = session.files.memory.left();
        let wait =
            left > 0 && (self.mode == Mode::Precopy || near(session, left) && Instant::now() < patience);
        (!wait).then_some(bytes)
    }

    async fn event(&mut self, event: Event, session: &mut Session, control: &mut Control) -> Result<(), End> {
        let event = match event {
            Event::DeviceState(stream) => {
                self.qemu.state.give(stream);
                return Ok(());
            }
            Event::Frames(stream) => {
                self.qemu.deliver(session, stream);
                return Ok(());
            }
            event => event,
        };
        match session.common_event(event, control).await? {
            Some(Event::Message(ToDestination::Abort(why))) => return Err(End::Aborted(why)),
            Some(Event::Message(ToDestination::DisksWhole)) => {
                self.qemu.exports.end(session, self.qemu.monitor.shared());
            }
            Some(Event::Message(message)) => {
                if let Some(other) = take_hashes(&mut self.hashes, message) {
                    return Err(session.out_of_order(other.name()));
                }
                control.count_silence_anew();
            }
            Some(Event::Tick) => {
                session.look_at_source(control)?;
                qemu_lives(&*self.qemu.process)?;
                session.tell_progress(control).await?;
            }
            _ => {}
        }
        Ok(())
    }

    /// From here on only the source's word ends the session.
    fn loaded(self, session: &mut Session, state_bytes: u64) -> Result<Loaded, Box<(Self, End)>> {
        let journaled =
            qemu_lives(&*self.qemu.process).and_then(|()| session.advance(DestinationEvent::StateLoaded));
        if let Err(error) = journaled {
            return Err(Box::new((self, error.into())));
        }
        session.publisher.enter(Phase::HandOver);
        let Incoming { process, monitor, .. } = self.qemu;
        Ok(Loaded { process, monitor: Reached::Yes(monitor), state_bytes, hashes: self.hashes })
    }
}

/// So little is missing that it is worth a moment to have it all: then the guest never faults.
fn near(session: &Session, left: u64) -> bool {
    // What bulk readers move in the time at 1 GB/s.
    left * session.page_bytes() <= u64::try_from(LAST_PAGES_TIMEOUT.as_micros()).unwrap_or(0) * 1000
}
