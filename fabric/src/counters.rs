//! What went over a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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

macro_rules! cells {
    ($($field:ident)*) => {
        #[derive(Debug, Default)]
        pub(crate) struct Cells { $(pub(crate) $field: Cell,)* }
        impl Cells {
            fn read(&self) -> Counters { Counters { $($field: self.$field.0.load(Ordering::Relaxed),)* } }
        }
    };
}
cells!(bytes_sent bytes_received reads writes sends messages read_bytes written_bytes reads_served
       writes_served zero_segments same_segments refused);

/// One total. Written by the thread that owns the connection only, so a plain load and store is enough and
/// costs no locked instruction.
#[derive(Debug, Default)]
pub(crate) struct Cell(AtomicU64);

impl Cell {
    pub(crate) fn add(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
    }
}

/// Reads the totals of a connection from any thread; outlives the connection.
#[derive(Debug, Clone, Default)]
pub struct CountersHandle(Arc<Cells>);

impl CountersHandle {
    /// The totals now. Each is exact, but they are not read at one instant.
    #[must_use]
    pub fn read(&self) -> Counters {
        self.0.read()
    }

    pub(crate) fn cells(&self) -> &Cells {
        &self.0
    }
}
