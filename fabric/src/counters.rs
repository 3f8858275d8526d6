//! What went over a connection, or to and from a multicast group.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Totals since the connection was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Bytes given to the transport: payload, headers and TLS; not those of TCP and below. For `local`, bytes
    /// written to the peer.
    pub bytes_sent: u64,
    /// Bytes taken from the transport, counted likewise.
    pub bytes_received: u64,
    /// READs of this side that completed, well or not.
    pub reads: u64,
    /// WRITEs of this side that completed, well or not.
    pub writes: u64,
    /// Messages of this side that were sent.
    pub sends: u64,
    /// Messages of the peer.
    pub messages: u64,
    /// Bytes of READ payload that landed in local memory.
    pub read_bytes: u64,
    /// Bytes of WRITE payload of this side that the peer confirmed.
    pub written_bytes: u64,
    /// READs of the peer that this side answered (0 where the back end does not take part).
    pub reads_served: u64,
    /// WRITEs of the peer that this side took in.
    pub writes_served: u64,
    /// Segments that this side did not send because they were all zero.
    pub zero_segments: u64,
    /// Segments that this side did not send because the peer had the same bytes already.
    pub same_segments: u64,
    /// Requests of the peer that this side refused.
    pub refused: u64,
}

/// Totals since the group was opened or joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MulticastCounters {
    /// Datagrams given to the transport.
    pub sent: u64,
    /// Their bytes with the back end's header, without those of IP and below.
    pub bytes_sent: u64,
    /// Good datagrams that arrived the first time, wanted or not.
    pub received: u64,
    /// Their bytes, counted likewise.
    pub bytes_received: u64,
    /// Datagrams between the first and the last received that did not arrive. 0 where the transport does not number them (verbs).
    pub lost: u64,
    /// Datagrams that arrived again. 0 where the transport does not number them.
    pub duplicate: u64,
    /// Datagrams for which [`Sink::place`](crate::Sink::place) had none.
    pub unwanted: u64,
    /// Datagrams of other sessions, damaged or malformed.
    pub refused: u64,
    /// Datagrams for which the receive ring had no room.
    pub ring_full: u64,
}

/// One total. Written by the thread that owns the connection only, so a plain load and store is enough and
/// costs no locked instruction.
#[derive(Debug, Default)]
pub(crate) struct Total(AtomicU64);

impl Total {
    pub(crate) fn add(&self, amount: u64) {
        self.set(self.0.load(Ordering::Relaxed) + amount);
    }

    pub(crate) fn set(&self, amount: u64) {
        self.0.store(amount, Ordering::Relaxed);
    }
}

macro_rules! totals {
    ($totals:ident of $counters:ident: $($field:ident)*) => {
        #[derive(Debug, Default)]
        pub(crate) struct $totals { $(pub(crate) $field: Total,)* }
        impl $totals {
            fn read(&self) -> $counters { $counters { $($field: self.$field.0.load(Ordering::Relaxed),)* } }
        }
    };
}
totals!(Totals of Counters: bytes_sent bytes_received reads writes sends messages read_bytes written_bytes reads_served
        writes_served zero_segments same_segments refused);
totals!(MulticastTotals of MulticastCounters: sent bytes_sent received bytes_received lost duplicate unwanted refused
        ring_full);

/// Reads the totals of a connection from any thread; outlives the connection.
#[derive(Debug, Clone, Default)]
pub struct CountersHandle(Arc<Totals>);

impl CountersHandle {
    /// The totals now. Each is exact, but they are not read at one instant.
    #[must_use]
    pub fn read(&self) -> Counters {
        self.0.read()
    }

    pub(crate) fn totals(&self) -> &Totals {
        &self.0
    }
}

/// Reads the totals of a sender or receiver from any thread; outlives it.
#[derive(Debug, Clone, Default)]
pub struct MulticastCountersHandle(Arc<MulticastTotals>);

impl MulticastCountersHandle {
    /// The totals now. Each is exact, but they are not read at one instant.
    #[must_use]
    pub fn read(&self) -> MulticastCounters {
        self.0.read()
    }

    pub(crate) fn totals(&self) -> &MulticastTotals {
        &self.0
    }
}
