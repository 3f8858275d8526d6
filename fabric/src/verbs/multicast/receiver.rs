//! The receiving side.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::{Membership, Shared};
use crate::FabricError;
use crate::counters::{MulticastCountersHandle, MulticastTotals};
use crate::multicast::{MulticastReceiver, Sink, lost_memory};
use crate::table::{Participant, Section};
use crate::verbs::raw::{Arrived, Ring, Route, Shape};

/// Receives the datagrams of one session.
#[derive(Debug)]
pub(super) struct Receiver {
    // Before the membership: nothing of the group is taken any more when it is left.
    ring: Ring,
    _membership: Membership,
    shared: Shared,
    participant: Participant,
    ring_bytes: usize,
    /// Readable when something has arrived, or the device is lost.
    poller: OwnedFd,
    /// The next arrival gives an event.
    armed: bool,
    counters: MulticastCountersHandle,
}

impl Receiver {
    pub(super) fn join(
        shared: Shared,
        membership: Membership,
        route: Route,
        queue_key: u32,
        payload: usize,
        ring_bytes: usize,
    ) -> Result<Self, FabricError> {
        let wanted = u32::try_from(ring_bytes / payload).unwrap_or(u32::MAX);
        let depth =
            wanted.clamp(64, shared.limits.queue.max(64)).min(shared.limits.completions.saturating_sub(1));
        let shape = Shape { port: route.port, pkey_index: shared.choice.pkey_index, depth, queue_key };
        let ring = Ring::new(&shared.domain, shape, payload, &route)
            .map_err(FabricError::io("make a receive ring for a multicast group"))?;
        let poller =
            poller(&ring, &shared).map_err(FabricError::io("prepare to wait for the RDMA device"))?;
        Ok(Self {
            ring,
            _membership: membership,
            participant: shared.table.join()?,
            shared,
            ring_bytes: usize::try_from(depth).unwrap_or(0) * payload,
            poller,
            armed: false,
            counters: MulticastCountersHandle::default(),
        })
    }

    fn take(&mut self, sink: &mut dyn Sink) -> Result<usize, FabricError> {
        let section = self.participant.enter();
        let totals = self.counters.totals();
        let mut result = Ok(());
        let found = self.ring.poll(|arrived| {
            if result.is_ok() {
                result = land(&section, totals, sink, arrived);
            }
        });
        result.and(found.map_err(FabricError::io("receive from a multicast group")))
    }
}

fn poller(ring: &Ring, shared: &Shared) -> io::Result<OwnedFd> {
    let poller = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&poller, ring.fd(), EventData::new_u64(0), EventFlags::IN)?;
    epoll::add(&poller, shared.health.bell(), EventData::new_u64(1), EventFlags::IN)?;
    Ok(poller)
}

/// Brings one datagram to its place.
fn land(
    section: &Section<'_>,
    totals: &MulticastTotals,
    sink: &mut dyn Sink,
    arrived: Arrived<'_>,
) -> Result<(), FabricError> {
    let Some(immediate) = arrived.immediate.filter(|_| !arrived.payload.is_empty()) else {
        totals.refused.add(1);
        return Ok(());
    };
    totals.received.add(1);
    totals.bytes_received.add(arrived.payload.len() as u64);
    let Some(place) = sink.place(immediate, arrived.payload.len()) else {
        totals.unwanted.add(1);
        return Ok(());
    };
    let piece = section.local(&place).filter(|piece| piece.len() == arrived.payload.len());
    let Some(piece) = piece else {
        return Err(FabricError::protocol(format!(
            "a place of {} bytes for a datagram of {}, or one that is not registered with this fabric",
            place.len(),
            arrived.payload.len()
        )));
    };
    piece.copy_from(arrived.payload);
    if piece.is_broken() {
        return Err(lost_memory());
    }
    sink.landed(immediate);
    Ok(())
}

impl MulticastReceiver for Receiver {
    fn poll(&mut self, sink: &mut dyn Sink) -> Result<usize, FabricError> {
        self.shared.check()?;
        let found = self.take(sink)?;
        if found > 0 {
            return Ok(found);
        }
        // Before the caller sleeps: makes sure that it is woken.
        let waiting = FabricError::io("wait for the RDMA device");
        let cq = self.ring.cq();
        let arm = |cq: &mut crate::verbs::raw::Cq, armed: bool| -> io::Result<bool> {
            if armed && !cq.take_event()? {
                return Ok(false);
            }
            cq.arm().map(|()| true)
        };
        if !arm(cq, self.armed).map_err(waiting)? {
            return Ok(0);
        }
        self.armed = true;
        // What came before it was armed gives no event.
        self.take(sink)
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }

    fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    fn counters(&self) -> MulticastCountersHandle {
        self.counters.clone()
    }
}
