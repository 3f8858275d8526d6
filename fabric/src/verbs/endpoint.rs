//! A connection whose READs and WRITEs are done by the devices.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::LocalKeys;
use super::events::Health;
use super::queue::{Ending, SendQueue, Stop};
use super::raw::{Ended, Outcome, Post, Qp};
use crate::counters::CountersHandle;
use crate::error::{FabricError, PostError, RemoteStatus};
use crate::region::{LocalSlice, RemoteSlice};
use crate::serve::ServeHandle;
use crate::stream::{self, StreamEndpoint};
use crate::sys;
use crate::table::{Need, Participant};
use crate::thread::ThreadOptions;
use crate::wire::CREDITS;
use crate::{
    Class, Completion, CompletionKind, Completions, Endpoint, FabricKind, MAX_MESSAGE, MAX_SEGMENTS,
    MAX_TRANSFER, ReadSegment, WrId, WriteSegment,
};

/// As long as the device has news, the stream is looked at by every so many polls only: it costs a system call.
const UNHEARD: u32 = 16;
/// Bytes per second of the slowest path that is worth using.
const SLOWEST: u64 = 8 << 20;

/// See [`Endpoint`].
#[derive(Debug)]
pub(super) struct VerbsEndpoint {
    /// `None` when the connection is over: the device then touches no memory of either side through it.
    qp: Option<Qp>,
    /// Messages, and the news that the peer is gone.
    messages: StreamEndpoint,
    received: Completions,
    participant: Participant,
    keys: Arc<LocalKeys>,
    health: Arc<Health>,
    queue: SendQueue,
    posts: Vec<Post>,
    ended: Vec<Ended>,
    done: VecDeque<Completion>,
    /// Readable when the queue pair or the stream has news.
    poller: OwnedFd,
    /// The completion queue will give an event.
    armed: bool,
    /// The poller waits for room in the stream too.
    polls_write: bool,
    spin: Duration,
    /// Bytes that the device was asked for and has not moved, and since when nothing has come of it.
    under_way: u64,
    quiet_since: Instant,
    silence: Duration,
    /// Polls since the stream was last looked at.
    unheard: u32,
    counters: CountersHandle,
    failure: Option<FabricError>,
    dead: bool,
}

/// What a [`VerbsEndpoint`] is made of.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) qp: Qp,
    pub(super) messages: StreamEndpoint,
    pub(super) participant: Participant,
    pub(super) keys: Arc<LocalKeys>,
    pub(super) health: Arc<Health>,
    pub(super) queue: SendQueue,
    pub(super) spin: Duration,
    /// How long small requests may take before the path counts as lost.
    pub(super) silence: Duration,
}

impl VerbsEndpoint {
    pub(super) fn new(parts: Parts) -> io::Result<Self> {
        let Parts { qp, messages, participant, keys, health, queue, spin, silence } = parts;
        let poller = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&poller, qp.cq.fd(), EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&poller, messages.wait_fd(), EventData::new_u64(1), EventFlags::IN)?;
        epoll::add(&poller, health.bell(), EventData::new_u64(2), EventFlags::IN)?;
        Ok(Self {
            counters: messages.counters_handle(),
            qp: Some(qp),
            messages,
            received: Completions::default(),
            participant,
            keys,
            health,
            queue,
            posts: Vec::with_capacity(CREDITS),
            ended: Vec::with_capacity(CREDITS),
            done: VecDeque::with_capacity(CREDITS),
            poller,
            armed: false,
            polls_write: false,
            spin,
            under_way: 0,
            quiet_since: Instant::now(),
            silence,
            unheard: 0,
            failure: None,
            dead: false,
        })
    }

    /// Hands to the device and to the stream what they have room for, in the order of posting.
    fn push(&mut self) -> Result<(), FabricError> {
        loop {
            let stop = self.push_transfers()?;
            match stop {
                Stop::Nothing => return Ok(()),
                Stop::Message => {
                    let Some((wr, message)) = self.queue.pop_message() else { return Ok(()) };
                    match self.messages.post_send(wr, &message) {
                        Ok(()) => {}
                        Err(PostError::Full { .. }) => {
                            self.queue.unpop_message(wr, message);
                            return Ok(());
                        }
                        Err(_) => return Err(FabricError::PeerClosed { outstanding: 0 }),
                    }
                }
                Stop::BadKey => self.fail_first(RemoteStatus::Refused),
                Stop::LocalGone { started } => {
                    self.fail_first(RemoteStatus::LocalGone);
                    if started {
                        return Err(broken("local memory was deregistered in the middle of a transfer"));
                    }
                }
            }
        }
    }

    fn push_transfers(&mut self) -> Result<Stop, FabricError> {
        let Some(qp) = &mut self.qp else { return Ok(Stop::Nothing) };
        self.posts.clear();
        // Until the device has the requests, the memory that they name stays registered: deregistration waits for the
        // end of the section. After that the device itself refuses what is not registered any more.
        let section = self.participant.enter();
        let keys = &self.keys;
        let stop = self.queue.fill(&mut self.posts, |slice| section.local(slice).map(|_| keys.of(slice)));
        qp.post(&self.posts).map_err(FabricError::io("hand a request to the RDMA device"))?;
        Ok(stop)
    }

    /// A device that gets no answer should give up by itself; not every one does (soft RoCE), and some take long.
    fn look_at_the_clock(&mut self, found: usize) -> Result<(), FabricError> {
        if found > 0 || self.queue.open() == 0 {
            if found > 0 {
                self.quiet_since = Instant::now();
            }
            return Ok(());
        }
        // Large requests take their time.
        let limit = self.silence + Duration::from_secs(self.under_way / SLOWEST);
        if self.quiet_since.elapsed() < limit {
            return Ok(());
        }
        let why = format!("nothing has come for {} ms", limit.as_millis());
        Err(FabricError::PathLost { outstanding: 0, why })
    }

    fn fail_first(&mut self, status: RemoteStatus) {
        if let Some(ending) = self.queue.pop_failed() {
            self.complete(ending, Err(status));
        }
    }

    /// Takes what the device has completed.
    fn take(&mut self) -> Result<usize, FabricError> {
        let Some(qp) = &mut self.qp else { return Ok(0) };
        self.ended.clear();
        let found = qp.cq.poll(&mut self.ended).map_err(FabricError::io("read the completion queue"))?;
        for index in 0..found {
            let Ended { id, outcome } = self.ended[index];
            if outcome != Outcome::Done {
                return Err(self.failed(id, outcome));
            }
            if let Some(ending) = self.queue.end(id, false) {
                self.complete(ending, Ok(()));
            }
        }
        Ok(found)
    }

    /// The first request that did not succeed: a queue pair does not outlive it.
    fn failed(&mut self, id: u64, outcome: Outcome) -> FabricError {
        let (id, status, error) = match outcome {
            Outcome::Done | Outcome::Flushed | Outcome::Broken(_) => {
                // Some devices (rxe) do not tell that our own memory was the reason.
                let section = self.participant.enter();
                let lost = self.queue.first_lost(|slice| section.local(slice).map(|_| 0));
                let error = match outcome {
                    Outcome::Broken(code) => format!("the device gave up with status {code} (12: no answer)"),
                    _ => "the queue pair stopped".to_owned(),
                };
                let Some(lost) = lost else {
                    return match outcome {
                        Outcome::Broken(_) => FabricError::PathLost { outstanding: 0, why: error },
                        _ => broken(&error),
                    };
                };
                (lost, RemoteStatus::LocalGone, error)
            }
            Outcome::Refused => (id, RemoteStatus::Refused, "the peer's device refused a request".to_owned()),
            Outcome::PeerFault => {
                (id, RemoteStatus::Fault, "the peer's device failed at a request".to_owned())
            }
            Outcome::LocalGone => {
                (id, RemoteStatus::LocalGone, "local memory was deregistered under a transfer".to_owned())
            }
        };
        if let Some(ending) = self.queue.end(id, true) {
            self.complete(ending, Err(status));
        }
        broken(&error)
    }

    fn complete(&mut self, ending: Ending, status: Result<(), RemoteStatus>) {
        let cells = self.counters.cells();
        self.under_way = self.under_way.saturating_sub(ending.bytes);
        let moved = if status.is_ok() { ending.bytes } else { 0 };
        let kind = match ending.need {
            Need::Read => {
                cells.reads.add(1);
                cells.read_bytes.add(moved);
                cells.bytes_received.add(moved);
                CompletionKind::Read { zero_mask: 0 }
            }
            Need::Write => {
                cells.writes.add(1);
                cells.written_bytes.add(moved);
                cells.bytes_sent.add(moved);
                CompletionKind::Write
            }
        };
        self.done.push_back(Completion { wr: ending.wr, kind, status });
    }

    /// Works in both directions. Completions of the device come before the news that the connection is over.
    fn progress(&mut self) {
        if self.health.is_lost() {
            let why = "the device was removed or has failed".to_owned();
            return self.die(FabricError::NoDevice { why });
        }
        let mut taken = 0;
        let failure = self.push().and_then(|()| self.take()).and_then(|found| {
            taken = found;
            self.look_at_the_clock(found)?;
            // There is room again.
            if found > 0 { self.push() } else { Ok(()) }
        });
        self.unheard = if taken > 0 { self.unheard + 1 } else { UNHEARD };
        if failure.is_ok() && self.unheard < UNHEARD && !self.done.is_empty() {
            return;
        }
        self.unheard = 0;
        let ended = loop {
            let found = self.messages.poll(&mut self.received);
            self.done.extend(self.received.drain());
            match found {
                // What the peer said before the devices failed is still to be heard.
                Ok(1..) if failure.is_err() => {}
                other => break other.err(),
            }
        };
        if ended.is_some() && failure.is_ok() {
            // What the device has done until now still counts.
            while let Ok(1..) = self.take() {}
        }
        if let Some(error) = ended.or(failure.err()) {
            self.die(error);
        } else if self.done.is_empty() {
            self.rest();
        }
    }

    /// Before the caller sleeps: makes sure that it is woken.
    fn rest(&mut self) {
        let armed = self.try_rest().map_err(FabricError::io("wait for the RDMA device"));
        // What came before the queue was armed gives no event. It may have made room.
        let result = armed.and_then(|just| if just && self.take()? > 0 { self.push() } else { Ok(()) });
        if let Err(error) = result {
            self.die(error);
        }
    }

    /// Whether the completion queue was armed by this.
    fn try_rest(&mut self) -> io::Result<bool> {
        let wants_write = self.messages.wants_write();
        if wants_write != self.polls_write {
            let events = if wants_write { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
            epoll::modify(&self.poller, self.messages.wait_fd(), EventData::new_u64(1), events)?;
            self.polls_write = wants_write;
        }
        let Some(qp) = &mut self.qp else { return Ok(false) };
        if self.armed && qp.cq.take_event()? {
            self.armed = false;
        }
        if self.armed || !self.queue.is_busy() {
            return Ok(false);
        }
        qp.cq.arm()?;
        self.armed = true;
        Ok(true)
    }

    fn die(&mut self, mut error: FabricError) {
        let all = self.outstanding();
        if let FabricError::PeerClosed { outstanding }
        | FabricError::PeerGone { outstanding, .. }
        | FabricError::PathLost { outstanding, .. } = &mut error
        {
            *outstanding = all.max(*outstanding);
        }
        self.dead = true;
        self.qp = None;
        self.failure.get_or_insert(error);
        let _ = self.messages.socket().shutdown(std::net::Shutdown::Both);
    }

    fn post(
        &mut self,
        wr: WrId,
        need: Need,
        segments: impl ExactSizeIterator<Item = (LocalSlice, RemoteSlice)>,
    ) -> Result<(), PostError> {
        if self.dead {
            return Err(PostError::Dead);
        }
        let found = segments.len();
        if !(1..=MAX_SEGMENTS).contains(&found) {
            return Err(PostError::Segments { found, max: MAX_SEGMENTS });
        }
        if self.outstanding() >= CREDITS {
            return Err(PostError::Full { capacity: CREDITS });
        }
        let transfer = self.queue.transfer(wr, need, segments);
        let section = self.participant.enter();
        let unknown = transfer.segments.iter().position(|(local, _)| section.local(local).is_none());
        drop(section);
        let refusal = match unknown {
            Some(segment) => Some(PostError::NotRegistered { segment }),
            None if transfer.bytes > MAX_TRANSFER => {
                Some(PostError::Length { found: transfer.bytes, max: MAX_TRANSFER })
            }
            None => None,
        };
        if let Some(refusal) = refusal {
            self.queue.recycle(transfer);
            return Err(refusal);
        }
        if self.queue.open() == 0 {
            self.quiet_since = Instant::now();
        }
        self.under_way += transfer.bytes;
        self.queue.push(transfer);
        Ok(())
    }

    /// Looks for completions for a moment: being woken takes longer than a page takes to come.
    fn spin(&mut self, time: Duration) -> Result<(), FabricError> {
        let begin = Instant::now();
        while !self.dead && self.done.is_empty() && begin.elapsed() < time {
            if let Err(error) = self.take() {
                self.die(error);
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

/// The connection is of no use any more, and the stream does not know.
fn broken(why: &str) -> FabricError {
    FabricError::PeerGone { outstanding: 0, source: io::Error::other(why.to_owned()) }
}

impl Endpoint for VerbsEndpoint {
    fn kind(&self) -> FabricKind {
        FabricKind::Verbs
    }

    fn class(&self) -> Class {
        self.messages.class()
    }

    fn post_read(&mut self, wr: WrId, segments: &[ReadSegment]) -> Result<(), PostError> {
        self.post(wr, Need::Read, segments.iter().map(|segment| (segment.local, segment.remote)))
    }

    fn post_write(&mut self, wr: WrId, segments: &[WriteSegment]) -> Result<(), PostError> {
        self.post(wr, Need::Write, segments.iter().map(|segment| (segment.local, segment.remote)))
    }

    fn post_send(&mut self, wr: WrId, message: &[u8]) -> Result<(), PostError> {
        if self.dead {
            return Err(PostError::Dead);
        }
        if message.len() > MAX_MESSAGE {
            return Err(PostError::Length { found: message.len() as u64, max: MAX_MESSAGE as u64 });
        }
        if self.outstanding() >= CREDITS {
            return Err(PostError::Full { capacity: CREDITS });
        }
        self.queue.push_message(wr, message.to_vec());
        Ok(())
    }

    fn flush(&mut self) -> Result<(), FabricError> {
        if self.dead {
            return Ok(()); // poll says why
        }
        match self.push().and_then(|()| self.messages.flush()) {
            Ok(()) => Ok(()),
            Err(error) => {
                self.die(error);
                Ok(())
            }
        }
    }

    fn poll(&mut self, out: &mut Completions) -> Result<usize, FabricError> {
        out.clear();
        if !self.dead && self.done.is_empty() {
            self.progress();
        }
        while !out.is_full() {
            let Some(completion) = self.done.pop_front() else { break };
            out.push(completion);
        }
        if out.is_empty() && self.dead {
            let outstanding = self.outstanding();
            return Err(self.failure.take().unwrap_or(FabricError::PeerClosed { outstanding }));
        }
        Ok(out.len())
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }

    fn wants_write(&self) -> bool {
        !self.dead && (self.queue.is_waiting() || self.messages.wants_write())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), FabricError> {
        if !self.spin.is_zero() && self.queue.is_busy() {
            self.spin(timeout.map_or(self.spin, |timeout| timeout.min(self.spin)))?;
        }
        // Posted and flushed, but not polled: nothing would wake us.
        let deaf = self.queue.is_busy() && !self.armed;
        if self.dead || !self.done.is_empty() || deaf {
            return Ok(());
        }
        sys::net::wait(self.poller.as_fd(), false, timeout)
            .map_err(FabricError::io("wait for the RDMA device or the connection"))
    }

    fn outstanding(&self) -> usize {
        self.queue.open() + self.messages.outstanding()
    }

    fn capacity(&self) -> usize {
        CREDITS
    }

    fn counters_handle(&self) -> CountersHandle {
        self.counters.clone()
    }

    /// The thread sleeps as long as the connection lasts: the device answers by itself.
    fn serve(self: Box<Self>, options: ThreadOptions) -> Result<ServeHandle, FabricError> {
        let socket = self.messages.socket().try_clone();
        stream::serve(*self, socket, options)
    }
}

impl Drop for VerbsEndpoint {
    fn drop(&mut self) {
        let _ = self.flush();
        // The peer's accesses end here, not when it hears of it: memory may go away next.
        self.qp = None;
    }
}
