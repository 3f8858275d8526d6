//! Datagrams to many hosts at once.
//!
//! The shape is that of InfiniBand's unreliable datagrams (UD) with multicast; `tcp`'s companion is
//! [`UdpMulticast`](crate::udp::UdpMulticast), that of `verbs` is `VerbsMulticast`. A datagram carries at most one MTU of payload and 32 bits of immediate data, by
//! which the receiver knows where the payload belongs. It arrives once, several times, out of order or not at all; nobody is
//! told. What is missing is read over an [`Endpoint`](crate::Endpoint).
//!
//! A receiver owns a ring of buffers which it keeps posted; what sits in front of the payload (the 40-byte GRH of UD, the header
//! of the UDP back end) stays in the ring. Payload goes to the place that the caller names for the immediate, which must be
//! registered memory: with that, nothing is ever written outside what was granted. A datagram of another session, or one whose
//! bytes are not those that were sent, is dropped before a place is asked for: by UDP as the session's key or check sum says, by RDMA
//! as the session's Q_Key (31 bits, which the device compares) and the packet's own check sum say.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::address::FabricKind;
use crate::counters::MulticastCountersHandle;
use crate::error::FabricError;
use crate::region::LocalSlice;
use crate::sys::net::random;

/// Zeros have taken the place of registered memory, since somebody has shortened the file behind it.
pub(crate) fn lost_memory() -> FabricError {
    FabricError::protocol("the file behind registered memory was shortened, or its memory could not be had")
}

/// Where the datagrams of a group go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum GroupAddress {
    /// An IPv4 multicast address and a port, for UDP.
    Udp(SocketAddrV4),
    /// An IPv4 multicast address, for RDMA: RoCE uses it as it is, on InfiniBand it stands for the address that IPoIB makes of it.
    Rdma(Ipv4Addr),
}

impl std::fmt::Display for GroupAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Udp(address) => write!(f, "udp:{address}"),
            Self::Rdma(address) => write!(f, "rdma:{address}"),
        }
    }
}

/// Distinguishes the datagrams of one session from stale or forged ones. Drawn afresh for each session and told to the
/// receivers over connections that deserve it.
///
/// Without a key it keeps out accidents, leftovers of earlier sessions and strangers who guess. That is no cryptographic signature: who can
/// read the group's traffic can forge it, so what matters is checked again by a checksum that came over a connection.
///
/// With a key, each datagram is encrypted and authenticated (AES-256-GCM), and one that comes again is dropped. Only UDP can do that.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// In every datagram, in clear.
    pub(crate) tag: u64,
    /// Seed of the datagrams' check sums; never sent in a datagram.
    pub(crate) seed: u64,
    /// Encrypts and authenticates datagrams; never sent in one.
    pub(crate) key: Option<Key>,
}

/// A secret of 256 bits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key(pub(crate) [u8; 32]);

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Seed and key are secrets of the session's members.
        let (tag, sealed) = (format_args!("{:#x}", self.tag), self.key.is_some());
        f.debug_struct("Session").field("tag", &tag).field("sealed", &sealed).finish_non_exhaustive()
    }
}

impl Session {
    /// A session that nobody can guess, whose datagrams are checked.
    ///
    /// # Errors
    /// The kernel gave no random numbers.
    pub fn draw() -> Result<Self, FabricError> {
        Ok(Self { tag: draw()?, seed: draw()?, key: None })
    }

    /// A session whose datagrams are encrypted and authenticated by a key of its own. Tell it over an encrypted connection.
    ///
    /// # Errors
    /// As [`draw`](Self::draw).
    pub fn draw_sealed() -> Result<Self, FabricError> {
        let mut key = [0; 32];
        for word in key.chunks_exact_mut(8) {
            word.copy_from_slice(&draw()?.to_ne_bytes());
        }
        Ok(Self { key: Some(Key(key)), ..Self::draw()? })
    }

    /// Whether datagrams are encrypted and authenticated.
    #[must_use]
    pub const fn is_sealed(&self) -> bool {
        self.key.is_some()
    }
}

fn draw() -> Result<u64, FabricError> {
    random().map_err(FabricError::io("draw a random number"))
}

/// A group of receivers and the session that its datagrams belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Where datagrams go.
    pub address: GroupAddress,
    /// Which of them count.
    pub session: Session,
}

/// A back end for multicast.
pub trait Multicast: Send + Sync + std::fmt::Debug {
    /// The fabric whose regions it sends from and receives into.
    fn kind(&self) -> FabricKind;

    /// Opens the sending side. A session has one sender.
    ///
    /// # Errors
    /// [`FabricError::Io`]; [`FabricError::Unsupported`] for an address of another back end.
    fn sender(&self, group: &Group) -> Result<Box<dyn MulticastSender>, FabricError>;

    /// Joins the group; dropping the receiver leaves it.
    ///
    /// # Errors
    /// As [`sender`](Self::sender).
    fn join(&self, group: &Group) -> Result<Box<dyn MulticastReceiver>, FabricError>;
}

/// One datagram to send.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing {
    /// What the receivers know the payload by.
    pub immediate: u32,
    /// The payload: 1 to [`MulticastSender::max_payload`] bytes of a region of the same fabric.
    pub payload: LocalSlice,
}

/// The sending side of a group. It does not pace: the caller does.
pub trait MulticastSender: Send + std::fmt::Debug {
    /// Most bytes of payload in one datagram.
    fn max_payload(&self) -> usize;

    /// Sends datagrams in order, as many as the transport takes now, and says how many; 0 when it has no room. Never blocks.
    ///
    /// # Errors
    /// A payload that is too long or not registered (nothing from it on was sent); the transport failed.
    fn send(&mut self, batch: &[Outgoing]) -> Result<usize, FabricError>;

    /// Sleeps until there is room, or for `timeout`.
    ///
    /// # Errors
    /// The wait itself failed.
    fn wait(&mut self, timeout: Duration) -> Result<(), FabricError>;

    /// What was sent so far, to be read from any thread.
    fn counters(&self) -> MulticastCountersHandle;
}

/// Decides where payload is written, and is called when it has been written.
pub trait Sink {
    /// Where the payload of `len` bytes that was sent with `immediate` belongs: a slice of exactly that length. `None`: it is not
    /// wanted, and dropped.
    fn place(&mut self, immediate: u32, len: usize) -> Option<LocalSlice>;

    /// The payload is there. Follows directly after its [`place`](Self::place).
    fn landed(&mut self, immediate: u32);
}

/// The receiving side of a group, owned by one thread.
pub trait MulticastReceiver: Send + std::fmt::Debug {
    /// Takes in what has arrived, a bounded amount of it, and posts the ring's buffers again. How many datagrams there were, good
    /// or bad. Never blocks. Poll until this gives 0 before waiting.
    ///
    /// # Errors
    /// The transport failed; a place that is not registered or of another length.
    fn poll(&mut self, sink: &mut dyn Sink) -> Result<usize, FabricError>;

    /// Readable when [`poll`](Self::poll) has something to do.
    fn wait_fd(&self) -> BorrowedFd<'_>;

    /// Bytes that the ring holds when nobody polls, before it overflows.
    fn ring_bytes(&self) -> usize;

    /// What was received so far, to be read from any thread.
    fn counters(&self) -> MulticastCountersHandle;
}
