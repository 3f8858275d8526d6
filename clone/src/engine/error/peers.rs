//! Why this node takes no part in forks between nodes, or not by every way.

use std::net::SocketAddr;

/// Why a node cannot take part in forks with others, or not by datagrams.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeersError {
    /// No fabric that reaches other hosts.
    #[error("forks to other nodes need fabric verbs or tcp, and neither can be used here: use --fabric auto")]
    NoFabric,
    /// The configuration allows no multicast.
    #[error("{0} does not allow it: set multicast-group in [fork]")]
    NoGroup(String),
    /// RDMA sends datagrams straight out of memory, so they would be the only thing that is not encrypted.
    #[error(
        "RDMA multicast is not encrypted, and this node protects its connections by TLS: datagrams go by UDP, beside fabric tcp"
    )]
    RdmaInClear,
    /// No RDMA device (any more).
    #[error("RDMA cannot be used (any more)")]
    NoRdma,
    /// Fabric tcp is switched off.
    #[error("fabric tcp is switched off here (--fabric)")]
    NoTcp,
    /// Nothing says which interface datagrams leave by.
    #[error("{node} listens on {listen}: set multicast-interface in [fork]")]
    NoInterface {
        /// This node.
        node: String,
        /// Where its peer port listens.
        listen: SocketAddr,
    },
}
