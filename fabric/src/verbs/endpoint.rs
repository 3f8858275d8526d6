//! READs and WRITEs by the devices, and messages beside them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::LocalKeys;
use super::events::Health;
use super::queue::{Ending, SendQueue, Stop};
use super::raw::{Ended, Outcome, Post, Qp};
use crate::connection::{BackEnd, Connection, Done, one_sided};
use crate::counters::CountersHandle;
use crate::error::{FabricError, PostError, RemoteStatus};
use crate::region::{LocalSlice, RemoteSlice};
use crate::socket::Socket;
use crate::stream::StreamEndpoint;
use crate::sys;
use crate::table::{Need, Participant};
use crate::wire::CREDITS;
use crate::{Class, Completions, Endpoint, FabricKind, ReadSegment, WrId, WriteSegment};

/// Number of polls between two looks at the stream while the device has completions: a look costs a system call.
const UNHEARD: u32 = 16;
/// Bytes per second of the slowest path that is worth using.
const SLOWEST: u64 = 8 << 20;

/// A connection whose READs and WRITEs are done by the devices.
pub(super) type VerbsEndpoint = Connection<Verbs>;

/// The back end of a [`VerbsEndpoint`].
#[derive(Debug)]
pub(super) struct Verbs {
    /// `None` when the connection is over: the device then touches no memory of either side through it. The first field, so
    /// dropped first: the peer's accesses end before it learns of the end, since memory may go away next.
    qp: Option<Qp>,
    /// Carries messages, and shows when the peer has closed or exited.
    messages: StreamEndpoint,
    received: Completions,
    participant: Participant,
    keys: Arc<LocalKeys>,
    health: Arc<Health>,
    queue: SendQueue,
    posts: Vec<Post>,
    ended: Vec<Ended>,
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
    /// An error that occurred outside of a poll, until the next poll reports it.
    failure: Option<FabricError>,
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
    /// The connection between two queue pairs that have been introduced.
    pub(super) fn introduced(parts: Parts) -> io::Result<Self> {
        let Parts { qp, messages, participant, keys, health, queue, spin, silence } = parts;
        let poller = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&poller, qp.cq.fd(), EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&poller, messages.wait_fd(), EventData::new_u64(1), EventFlags::IN)?;
        epoll::add(&poller, health.bell(), EventData::new_u64(2), EventFlags::IN)?;
        Ok(Self::new(Verbs {
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
            poller,
            armed: false,
            polls_write: false,
            spin,
            under_way: 0,
            quiet_since: Instant::now(),
            silence,
            unheard: 0,
            failure: None,
        }))
    }
}

impl Verbs {
    /// Hands to the device and to the stream what they have room for, in the order of posting.
    fn push(&mut self, done: &mut Done) -> Result<(), FabricError> {
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
                Stop::BadKey => self.fail_first(RemoteStatus::Refused, done),
                Stop::LocalGone { started } => {
                    self.fail_first(RemoteStatus::LocalGone, done);
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

    fn fail_first(&mut self, status: RemoteStatus, done: &mut Done) {
        if let Some(ending) = self.queue.pop_failed() {
            self.complete(ending, Err(status), done);
        }
    }

    /// Takes what the device has completed.
    fn take(&mut self, done: &mut Done) -> Result<usize, FabricError> {
        let Some(qp) = &mut self.qp else { return Ok(0) };
        self.ended.clear();
        let found = qp.cq.poll(&mut self.ended).map_err(FabricError::io("read the completion queue"))?;
        for index in 0..found {
            let Ended { id, outcome } = self.ended[index];
            if outcome != Outcome::Done {
                return Err(self.failed(id, outcome, done));
            }
            if let Some(ending) = self.queue.end(id, false) {
                self.complete(ending, Ok(()), done);
            }
        }
        Ok(found)
    }

    /// The first request that did not succeed: a queue pair does not outlive it.
    fn failed(&mut self, id: u64, outcome: Outcome, done: &mut Done) -> FabricError {
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
            self.complete(ending, Err(status), done);
        }
        broken(&error)
    }

    fn complete(&mut self, ending: Ending, status: Result<(), RemoteStatus>, done: &mut Done) {
        self.under_way = self.under_way.saturating_sub(ending.bytes);
        done.push_back(one_sided(&self.counters, (ending.wr, ending.need, ending.bytes), status));
    }

    /// Before the caller sleeps: makes sure that it is woken.
    fn rest(&mut self, done: &mut Done) -> Result<(), FabricError> {
        let just_armed = self.try_rest().map_err(FabricError::io("wait for the RDMA device"))?;
        // What came before the queue was armed gives no event. It may have made room.
        if just_armed && self.take(done)? > 0 { self.push(done) } else { Ok(()) }
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

    fn post(
        &mut self,
        wr: WrId,
        need: Need,
        bytes: u64,
        segments: impl Iterator<Item = (LocalSlice, RemoteSlice)>,
    ) {
        if self.queue.open() == 0 {
            self.quiet_since = Instant::now();
        }
        self.under_way += bytes;
        self.queue.push(wr, need, bytes, segments);
    }

    /// Looks for completions for a moment: being woken takes longer than a page takes to come.
    fn spin(&mut self, done: &mut Done, time: Duration) {
        let begin = Instant::now();
        while self.failure.is_none() && done.is_empty() && begin.elapsed() < time {
            self.failure = self.take(done).err();
            std::hint::spin_loop();
        }
    }
}

/// The connection is of no use any more, and the stream does not know.
fn broken(why: &str) -> FabricError {
    FabricError::PeerGone { outstanding: 0, source: io::Error::other(why.to_owned()) }
}

impl BackEnd for Verbs {
    fn kind(&self) -> FabricKind {
        FabricKind::Verbs
    }

    fn class(&self) -> Class {
        self.messages.class()
    }

    fn participant(&mut self) -> &mut Participant {
        &mut self.participant
    }

    fn socket(&self) -> &Socket {
        self.messages.back.socket()
    }

    fn counters(&self) -> &CountersHandle {
        &self.counters
    }

    fn outstanding(&self) -> usize {
        self.queue.open() + self.messages.outstanding()
    }

    /// All of it is transferred: a device does not compare.
    fn read(&mut self, wr: WrId, segments: &[ReadSegment], bytes: u64, _: bool) -> Result<(), PostError> {
        self.post(wr, Need::Read, bytes, segments.iter().map(|segment| (segment.local, segment.remote)));
        Ok(())
    }

    fn write(&mut self, wr: WrId, segments: &[WriteSegment], bytes: u64) -> Result<(), PostError> {
        self.post(wr, Need::Write, bytes, segments.iter().map(|segment| (segment.local, segment.remote)));
        Ok(())
    }

    fn send(&mut self, wr: WrId, message: &[u8]) -> Result<(), PostError> {
        self.queue.push_message(wr, message.to_vec());
        Ok(())
    }

    fn flush(&mut self, done: &mut Done) -> Result<(), FabricError> {
        if self.failure.is_none() {
            self.failure = self.push(done).and_then(|()| self.messages.flush()).err();
        }
        Ok(()) // the next poll tells what went wrong
    }

    /// Works in both directions. Completions of the device come before the news that the connection is over.
    fn progress(&mut self, done: &mut Done) -> Result<(), FabricError> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        if self.health.is_lost() {
            let why = "the device was removed or has failed".to_owned();
            return Err(FabricError::NoDevice { why });
        }
        let mut taken = 0;
        let failure = self.push(done).and_then(|()| self.take(done)).and_then(|found| {
            taken = found;
            self.look_at_the_clock(found)?;
            // There is room again.
            if found > 0 { self.push(done) } else { Ok(()) }
        });
        self.unheard = if taken > 0 { self.unheard + 1 } else { UNHEARD };
        if failure.is_ok() && self.unheard < UNHEARD && !done.is_empty() {
            return Ok(());
        }
        self.unheard = 0;
        let ended = loop {
            let found = self.messages.poll(&mut self.received);
            done.extend(self.received.drain());
            match found {
                // What the peer said before the devices failed is still to be heard.
                Ok(1..) if failure.is_err() => {}
                other => break other.map(drop),
            }
        };
        if ended.is_err() && failure.is_ok() {
            // What the device has done until now still counts.
            while let Ok(1..) = self.take(done) {}
        }
        ended.and(failure)?;
        if done.is_empty() { self.rest(done) } else { Ok(()) }
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }

    fn wants_write(&self) -> bool {
        self.queue.is_waiting() || self.messages.wants_write()
    }

    fn wait(&mut self, done: &mut Done, timeout: Option<Duration>) -> Result<(), FabricError> {
        if !self.spin.is_zero() && self.queue.is_busy() {
            self.spin(done, timeout.map_or(self.spin, |timeout| timeout.min(self.spin)));
        }
        // Posted and flushed, but not polled: nothing would wake us.
        let deaf = self.queue.is_busy() && !self.armed;
        if self.failure.is_some() || !done.is_empty() || deaf {
            return Ok(());
        }
        sys::net::wait(self.poller.as_fd(), false, timeout)
            .map_err(FabricError::io("wait for the RDMA device or the connection"))
    }

    fn cut(&mut self) {
        self.qp = None;
        let _ = self.socket().shutdown(std::net::Shutdown::Both);
    }
}
