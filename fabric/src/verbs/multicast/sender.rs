//! The sending side.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{Membership, Shared};
use crate::FabricError;
use crate::counters::MulticastCountersHandle;
use crate::multicast::{MulticastSender, Outgoing};
use crate::sys::net::wait;
use crate::table::Participant;
use crate::verbs::raw::{Ended, Outbox, Outcome, Payload, Route, Shape};

/// Datagrams under way.
const DEPTH: u32 = 512;
/// Number of datagrams whose completion is reported together.
const GROUP: usize = 32;
/// How long the drop waits for what is under way: a queue pair that ends takes it along.
const LAST_SENDS_TIMEOUT: Duration = Duration::from_secs(1);

/// Sends the datagrams of one session.
#[derive(Debug)]
pub(super) struct Sender {
    // Before the membership: the group's address is valid as long as that lasts.
    outbox: Outbox,
    _membership: Membership,
    shared: Shared,
    participant: Participant,
    max_payload: usize,
    /// Datagrams of each group that the device has, oldest first.
    groups: VecDeque<usize>,
    /// Room for datagrams.
    free: usize,
    payloads: Vec<Payload>,
    ended: Vec<Ended>,
    counters: MulticastCountersHandle,
}

impl Sender {
    pub(super) fn open(
        shared: Shared,
        membership: Membership,
        route: Route,
        queue_key: u32,
        max_payload: usize,
    ) -> Result<Self, FabricError> {
        let depth = shared.limits.queue.clamp(1, DEPTH);
        let shape = Shape { port: route.port, pkey_index: shared.choice.pkey_index, depth, queue_key };
        let outbox = Outbox::new(&shared.domain, shape, &route)
            .map_err(FabricError::io("make a queue pair to send to a multicast group"))?;
        Ok(Self {
            outbox,
            _membership: membership,
            participant: shared.table.join()?,
            shared,
            max_payload,
            groups: VecDeque::new(),
            free: usize::try_from(depth).unwrap_or(1),
            payloads: Vec::with_capacity(GROUP),
            ended: Vec::new(),
            counters: MulticastCountersHandle::default(),
        })
    }

    /// Takes note of what the device has sent.
    fn reap(&mut self) -> Result<(), FabricError> {
        self.shared.check()?;
        self.ended.clear();
        let found =
            self.outbox.cq().poll(&mut self.ended).map_err(FabricError::io("read the completion queue"))?;
        for ended in &self.ended[..found] {
            if ended.outcome != Outcome::Done {
                let why = format!(
                    "the device gave up a datagram: {:?}; was its memory deregistered?",
                    ended.outcome
                );
                return Err(FabricError::protocol(why));
            }
            self.free += self.groups.pop_front().unwrap_or(0);
        }
        Ok(())
    }

    /// Posts the first of `batch`, as many as make a group. How many, and their bytes.
    fn post(&mut self, batch: &[Outgoing]) -> Result<(usize, u64), FabricError> {
        self.payloads.clear();
        // Until the device has the datagrams, their memory stays registered: see `VerbsEndpoint`.
        let section = self.participant.enter();
        let mut bytes = 0;
        for outgoing in batch.iter().take(self.free.min(GROUP)) {
            let slice = outgoing.payload;
            let fits = slice.len > 0 && slice.len as usize <= self.max_payload;
            if !fits || section.local(&slice).is_none() {
                if self.payloads.is_empty() {
                    let (len, most) = (slice.len, self.max_payload);
                    return Err(FabricError::protocol(format!(
                        "{len} bytes cannot be sent by multicast: not registered with this fabric, or not 1 to {most}"
                    )));
                }
                break; // told next time, when it is the first
            }
            let (local, lkey) = (slice.addr as u64, self.shared.keys.of(&slice));
            self.payloads.push(Payload { immediate: outgoing.immediate, local, lkey, len: slice.len });
            bytes += u64::from(slice.len);
        }
        self.outbox.post(0, &self.payloads).map_err(FabricError::io("hand datagrams to the RDMA device"))?;
        Ok((self.payloads.len(), bytes))
    }
}

impl MulticastSender for Sender {
    fn max_payload(&self) -> usize {
        self.max_payload
    }

    fn send(&mut self, batch: &[Outgoing]) -> Result<usize, FabricError> {
        self.reap()?;
        let mut taken = 0;
        while taken < batch.len() && self.free > 0 {
            let (count, bytes) = match self.post(&batch[taken..]) {
                Ok(posted) => posted,
                Err(_) if taken > 0 => break, // told next time
                Err(error) => return Err(error),
            };
            self.free -= count;
            self.groups.push_back(count);
            taken += count;
            let totals = self.counters.totals();
            totals.sent.add(count as u64);
            totals.bytes_sent.add(bytes);
        }
        Ok(taken)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), FabricError> {
        let failed = FabricError::io("wait for the RDMA device");
        self.reap()?;
        if self.free > 0 {
            return Ok(());
        }
        let armed = self.outbox.cq().take_event().and_then(|_| self.outbox.cq().arm());
        armed.map_err(FabricError::io("wait for the RDMA device"))?;
        // What came before it was armed gives no event.
        self.reap()?;
        if self.free > 0 {
            return Ok(());
        }
        wait(self.outbox.cq().fd(), false, Some(timeout)).map_err(failed)
    }

    fn counters(&self) -> MulticastCountersHandle {
        self.counters.clone()
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let begin = Instant::now();
        while !self.groups.is_empty() && begin.elapsed() < LAST_SENDS_TIMEOUT && self.reap().is_ok() {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}
