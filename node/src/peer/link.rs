//! Connections between two daemons, as a session sees them. The daemon makes them; sessions use them.

use std::any::Any;
use std::fmt;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use vmove_fabric::{Endpoint, FabricKind};

use super::hello::{Hello, HelloError, Token};

/// A byte stream to the peer: TCP, TLS over TCP.
pub trait Stream: AsyncRead + AsyncWrite + Send + Sync + Unpin {
    /// To find out which.
    fn as_any(&self) -> &dyn Any;
}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static> Stream for T {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for dyn Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}

/// A stream whose type does not matter.
pub type BoxedStream = Box<dyn Stream>;

/// The node to go to, as the operator named it and as it is dialled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerTarget {
    /// The operator's word: a name from the configuration, or `host:port`.
    pub name: String,
    /// `host:port` of the peer daemon's listener.
    pub address: String,
}

impl fmt::Display for PeerTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name == self.address {
            f.write_str(&self.name)
        } else {
            write!(f, "{} ({})", self.name, self.address)
        }
    }
}

/// Why a peer could not be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// Nobody answers.
    #[error("Could not reach {peer}: {why}")]
    Unreachable {
        /// Who.
        peer: String,
        /// What the kernel or the resolver said.
        why: String,
    },
    /// TLS was refused by one side.
    #[error(
        "TLS with {peer} failed: {why}; both nodes need a certificate of the same authority, or both --insecure"
    )]
    Tls {
        /// Who.
        peer: String,
        /// What the TLS library said.
        why: String,
    },
    /// The other end is not a daemon of this version, or does not want us.
    #[error("{peer}: {source}")]
    Hello {
        /// Who.
        peer: String,
        /// The reason.
        #[source]
        source: HelloError,
    },
    /// A page connection could not be set up.
    #[error("Page connection to {peer} failed: {why}")]
    Fabric {
        /// Who.
        peer: String,
        /// The reason.
        why: String,
    },
}

/// What a listener hands to a session after a greeting was read and answered.
pub enum Link {
    /// For [`super::hello::LinkKind::Control`] and `State`.
    Stream(BoxedStream),
    /// For `Urgent` and `Bulk`.
    Endpoint(Box<dyn Endpoint>),
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stream(_) => "Link::Stream",
            Self::Endpoint(_) => "Link::Endpoint",
        })
    }
}

/// Opens connections to a peer. The daemon implements it, with its TLS material and its fabrics.
#[async_trait]
pub trait Dialer: Send + Sync {
    /// Opens a stream, sends `hello`, waits for a welcome.
    async fn stream(&self, to: &PeerTarget, hello: &Hello) -> Result<BoxedStream, LinkError>;

    /// The same for pages, over `fabric`.
    async fn endpoint(
        &self,
        to: &PeerTarget,
        fabric: FabricKind,
        hello: &Hello,
    ) -> Result<Box<dyn Endpoint>, LinkError>;

    /// The fabrics this node can use, best first, as words a peer understands (`tcp`; `local:BOOT_ID` ...), for negotiation.
    fn fabrics(&self) -> Vec<FabricOffer>;

    /// The back end itself, for the session with this secret to register memory with: connections of other sessions do not reach that memory.
    fn fabric(&self, kind: FabricKind, secret: Token) -> Option<std::sync::Arc<dyn vmove_fabric::Fabric>>;
}

/// A fabric that a node can use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricOffer {
    /// Which.
    pub kind: FabricKind,
    /// Where it reaches, the same word on both sides: for `local` an id of this running kernel, for `verbs` the kind of network
    /// (`RoCE v2`; `InfiniBand` and the subnet's number); empty for `tcp`.
    pub reach: String,
    /// Its address for [`Dialer::endpoint`], where that is not the daemon's own port.
    pub address: String,
    /// It is wanted and cannot be used, for this reason: listed so that the other side can say why.
    pub why_not: Option<String>,
}

impl FabricOffer {
    /// Fabric `tcp`, which reaches everybody by the daemon's own port.
    #[must_use]
    pub const fn tcp() -> Self {
        Self { kind: FabricKind::Tcp, reach: String::new(), address: String::new(), why_not: None }
    }
}
