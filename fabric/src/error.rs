//! What can go wrong, and what a caller may do next.

use std::io;
use std::time::Duration;

use crate::address::PeerAddress;

/// Why a connection or a fabric operation failed.
///
/// After an error from [`Endpoint::poll`](crate::Endpoint::poll), [`flush`](crate::Endpoint::flush) or
/// [`wait`](crate::Endpoint::wait) the connection is dead: nothing that was outstanding will complete, and the
/// target memory of outstanding reads holds anything.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The peer closed the connection.
    #[error("Peer closed the connection with {outstanding} operations outstanding")]
    PeerClosed {
        /// Work requests of this side that had not completed; 0 after an orderly end.
        outstanding: usize,
    },
    /// The connection broke: it was reset, or the peer sent nothing for the user timeout.
    #[error("Connection lost with {outstanding} operations outstanding; connect again or use another fabric")]
    PeerGone {
        /// Work requests of this side that had not completed.
        outstanding: usize,
        /// What the socket reported.
        #[source]
        source: io::Error,
    },
    /// The two devices no longer reach each other: there are no answers, or a device was removed.
    #[error(
        "RDMA path lost with {outstanding} operations outstanding: {why}; connect again or use another fabric"
    )]
    PathLost {
        /// Work requests of this side that had not completed.
        outstanding: usize,
        /// The device's error.
        why: String,
    },
    /// The peer sent something that the protocol does not allow. It is of another version, or hostile.
    #[error("Peer broke the protocol: {what}; check that both sides run the same version")]
    Protocol {
        /// What was expected and what was found.
        what: String,
    },
    /// The TLS layer refused a record.
    #[error("TLS failed on an established connection")]
    Tls(#[source] rustls::Error),
    /// Nobody answered at the address, or not in time.
    #[error("Could not connect to {peer}; check that it listens there")]
    Connect {
        /// Where the connection was tried.
        peer: PeerAddress,
        /// What the socket reported.
        #[source]
        source: io::Error,
    },
    /// This back end cannot dial that kind of address.
    #[error("A {kind} fabric cannot reach {peer}; give it an address of its own kind")]
    WrongAddress {
        /// The back end.
        kind: crate::FabricKind,
        /// The address it was given.
        peer: PeerAddress,
    },
    /// Nothing arrived before the deadline.
    #[error("Waited {waited_ms} ms for {what}")]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// How long, in milliseconds.
        waited_ms: u64,
    },
    /// This host has no RDMA device that can be used.
    #[error("No RDMA device can be used: {why}")]
    NoDevice {
        /// What was looked at, and what stands in the way.
        why: String,
    },
    /// The devices of the two sides do not reach each other.
    #[error("No RDMA path to the peer: {why}")]
    NoPath {
        /// What stands in the way.
        why: String,
    },
    /// The region cannot be registered.
    #[error("Could not register {len} bytes of memory: {why}")]
    Register {
        /// Length asked for, in bytes.
        len: u64,
        /// What stands in the way, and what to do.
        why: String,
    },
    /// The kernel does not let this process touch the peer's memory.
    #[error(
        "Not allowed to access the memory of process {pid}; run both as the same user, or give this one CAP_SYS_PTRACE"
    )]
    Permission {
        /// The peer.
        pid: i32,
        /// What the kernel reported.
        #[source]
        source: io::Error,
    },
    /// A system call failed that should not.
    #[error("Could not {operation}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// What the kernel reported.
        #[source]
        source: io::Error,
    },
    /// The operation does not exist for this back end.
    #[error("{what} is not supported by this fabric")]
    Unsupported {
        /// The operation.
        what: &'static str,
    },
}

/// What may be done after a [`FabricError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// A new connection to the same peer may work.
    Reconnect,
    /// This fabric will not work with this peer; another one may.
    OtherFabric,
    /// Trying again will give the same result.
    GiveUp,
}

impl FabricError {
    pub(crate) fn io(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { operation, source }
    }

    pub(crate) fn timeout(what: &'static str, waited: Duration) -> Self {
        Self::Timeout { what, waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX) }
    }

    pub(crate) fn protocol(what: impl Into<String>) -> Self {
        Self::Protocol { what: what.into() }
    }

    /// What may be done next.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::PeerClosed { .. } | Self::PeerGone { .. } | Self::Connect { .. } | Self::Timeout { .. } => {
                Remedy::Reconnect
            }
            Self::WrongAddress { .. }
            | Self::Permission { .. }
            | Self::Unsupported { .. }
            | Self::NoDevice { .. }
            | Self::PathLost { .. }
            | Self::Register { .. }
            | Self::NoPath { .. } => Remedy::OtherFabric,
            Self::Protocol { .. } | Self::Tls(_) | Self::Io { .. } => Remedy::GiveUp,
        }
    }
}

/// Why a work request was not queued. The connection is unharmed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// No credit left: poll for completions first.
    #[error("All {capacity} work requests of the connection are in use; poll first")]
    Full {
        /// Work requests that may be outstanding.
        capacity: usize,
    },
    /// A request needs 1 to 64 segments.
    #[error("{found} segments in one request; expected 1 to {max}")]
    Segments {
        /// Segments given.
        found: usize,
        /// Most that are allowed, [`MAX_SEGMENTS`](crate::MAX_SEGMENTS).
        max: usize,
    },
    /// An empty segment, or a request beyond [`MAX_TRANSFER`](crate::MAX_TRANSFER), or a message beyond
    /// [`MAX_MESSAGE`](crate::MAX_MESSAGE).
    #[error("{found} bytes; expected 1 to {max}")]
    Length {
        /// Bytes given.
        found: u64,
        /// Most that are allowed.
        max: u64,
    },
    /// The local memory belongs to another fabric, or its region was dropped.
    #[error("Local memory of segment {segment} is not registered with this fabric")]
    NotRegistered {
        /// Index of the segment in the request.
        segment: usize,
    },
    /// The connection has failed: `poll` says why.
    #[error("The connection has failed; poll says why")]
    Dead,
}

/// Why the peer did not do what a work request asked. The connection lives on where the back end allows it
/// (tcp and local do; an RDMA queue pair does not).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
#[repr(u8)]
pub enum RemoteStatus {
    /// No region has this key; it may have been deregistered, even while the transfer ran.
    #[error("the peer has no memory region with this key")]
    BadKey = 1,
    /// The range is not within the region.
    #[error("the range lies outside the peer's memory region")]
    OutOfRange = 2,
    /// The region does not grant this access.
    #[error("the peer's memory region does not allow this access")]
    AccessDenied = 3,
    /// The memory behind the region is not there (unmapped, or its file was truncated).
    #[error("the peer's memory could not be accessed")]
    Fault = 4,
    /// The local region was dropped before the transfer was complete, or its file system has no room for the page (`EFAULT`).
    #[error("the local memory region was dropped during the transfer, or its file system has no room")]
    LocalGone = 5,
    /// The peer's device refused and does not say why: no such key, outside the region, or not allowed (verbs).
    #[error("the peer's device refused: wrong key, range or permission")]
    Refused = 6,
}

impl RemoteStatus {
    /// The number on the wire of an answer; 0 is success.
    pub(crate) fn to_wire(status: Result<(), Self>) -> u8 {
        match status {
            Ok(()) => 0,
            Err(status) => status as u8,
        }
    }

    /// The inverse of [`Self::to_wire`]. `LocalGone` and `Refused` never travel.
    pub(crate) fn from_wire(number: u8) -> Option<Result<(), Self>> {
        match number {
            0 => Some(Ok(())),
            1 => Some(Err(Self::BadKey)),
            2 => Some(Err(Self::OutOfRange)),
            3 => Some(Err(Self::AccessDenied)),
            4 => Some(Err(Self::Fault)),
            _ => None,
        }
    }
}
