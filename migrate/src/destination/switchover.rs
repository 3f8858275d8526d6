//! Phase Switchover: the guest is stopped at the source, and may still go on there. The last pages come, and the device state.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::device_state::DeviceState;
use super::error::DestinationError;
use super::loaded::{Loaded, Reached};
use super::monitor::Monitor;
use super::page_messages::take_hashes;
use super::session::{Control, End, Event, Session, qemu_lives};
use super::verify::SourceHashes;
use crate::ownership::DestinationEvent;
use crate::proto::message::ToDestination;
use crate::vmm::QemuHandle;
use vmove_types::progress::Phase;
use vmove_types::spec::Mode;

/// Pages that a guest may lack when it is resumed, if they come within about this time anyway.
const LAST_PAGES_TIMEOUT: Duration = Duration::from_millis(3);

/// A QEMU that takes the device state in.
#[derive(Debug)]
pub(super) struct Incoming {
    pub process: Arc<dyn QemuHandle>,
    pub monitor: Monitor,
    pub state: DeviceState,
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
        if let Some(fill) = session.pages.fill() {
            fill.queue.wake();
        }
        let left = memory.left() * session.page_bytes();
        session.publisher.update(|p| p.bytes_total = p.bytes_total.max(left));
        Self { qemu, mode, hashes: SourceHashes::default() }
    }

    /// Goes on until QEMU has the device state, and with `precopy` every page is here. `None` if the session has ended.
    pub(super) async fn run(
        mut self,
        session: &mut Session,
        mut control: Control,
    ) -> Option<(Loaded, Control)> {
        let (switchover, end) = match self.until_loaded(session, &mut control).await {
            Ok(bytes) => match self.loaded(session, bytes) {
                Ok(loaded) => return Some((loaded, control)),
                Err(failed) => *failed,
            },
            Err(end) => (self, end),
        };
        control.tell_failure(&end).await;
        session.remove(Some(switchover.qemu.process), end.why()).await;
        None
    }

    /// Returns the length of the device state.
    async fn until_loaded(&mut self, session: &mut Session, control: &mut Control) -> Result<u64, End> {
        loop {
            if let Some(bytes) = self.is_loaded(session) {
                return Ok(bytes);
            }
            session.start_readers()?;
            tokio::select! {
                biased;
                loaded = self.qemu.state.loaded() => {
                    loaded.map_err(|source| {
                        DestinationError::DeviceState { log: self.qemu.process.log_tail(), source }
                    })?;
                    await_last_pages(session).await;
                }
                event = session.next(control) => self.event(event?, session, control).await?,
            }
        }
    }

    fn is_loaded(&self, session: &Session) -> Option<u64> {
        match self.qemu.state {
            DeviceState::Loaded { bytes }
                if self.mode != Mode::Precopy || session.files.memory.recount() == 0 =>
            {
                Some(bytes)
            }
            _ => None,
        }
    }

    async fn event(&mut self, event: Event, session: &mut Session, control: &mut Control) -> Result<(), End> {
        if let Event::DeviceState(stream) = event {
            self.qemu.state.give(stream);
            return Ok(());
        }
        match session.common_event(event, control).await? {
            Some(Event::Message(ToDestination::Abort(why))) => return Err(End::Aborted(why)),
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

/// When almost nothing is missing it is worth a moment to have it all: then the guest never faults.
async fn await_last_pages(session: &Session) {
    let until = Instant::now() + LAST_PAGES_TIMEOUT;
    let memory = &session.files.memory;
    // What bulk readers move in the time at 1 GB/s.
    let near = u64::try_from(LAST_PAGES_TIMEOUT.as_micros()).unwrap_or(0) * 1000 / session.page_bytes();
    while memory.left() > 0 && memory.left() <= near && Instant::now() < until {
        sleep(Duration::from_micros(200)).await;
    }
}
