//! Whom to connect to, over what, and for which kind of traffic.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Which back end a [`Fabric`](crate::Fabric) or [`Endpoint`](crate::Endpoint) is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum FabricKind {
    /// Sockets, with a responder thread at the peer.
    Tcp,
    /// Two processes of one host.
    Local,
    /// RDMA verbs, reliable connections.
    Verbs,
}

impl fmt::Display for FabricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Local => "local",
            Self::Verbs => "verbs",
        })
    }
}

/// What a connection is for. Traffic of different classes never shares a connection, so that a page somebody
/// waits for never queues behind a megabyte that nobody waits for yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Class {
    /// Few and small transfers that a thread waits for: short queues, low delay.
    Urgent = 1,
    /// Throughput: deep queues, large buffers.
    Bulk = 2,
    /// Control messages.
    Message = 3,
}

impl Class {
    /// The class with this number on the wire.
    #[must_use]
    pub fn from_wire(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Urgent),
            2 => Some(Self::Bulk),
            3 => Some(Self::Message),
            _ => None,
        }
    }
}

/// Where a peer listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PeerAddress {
    /// Address and port, for [`FabricKind::Tcp`].
    Tcp(SocketAddr),
    /// A Unix socket of this host, for [`FabricKind::Local`].
    Unix(PathBuf),
    /// A name with a meaning only for the code that makes connections for a fabric that adopts them.
    Named(String),
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Named(name) => f.write_str(name),
        }
    }
}
