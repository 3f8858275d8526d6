//! Connections to the daemons of other nodes: the greeting, messages, and which fabric two nodes use with each other.
//!
//! The daemon opens and accepts connections, with its TLS material and its fabrics ([`Dialer`]); migrations and forks use them.

pub mod channel;
pub mod codec;
pub mod hello;
mod join;
mod known;
mod link;
mod negotiate;
mod policy;
mod room;
mod splice;

pub use channel::Channel;
pub use hello::{Hello, HelloError, LinkKind, MAX_NODE_NAME, PROTOCOL_VERSION, SessionId, Status, Token};
pub use join::{join, join_counted};
pub use known::{KnownPeer, KnownPeers, UnknownPeer, split_address};
pub use link::{BoxedStream, Dialer, FabricOffer, Link, LinkError, PeerTarget, Stream};
pub use negotiate::{Agreed, NoCommonFabric, negotiate};
pub use policy::{Caller, Objection, PeerPolicy};
pub use room::enlarge_far_end;
