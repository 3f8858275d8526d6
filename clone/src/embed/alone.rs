//! A node without peers: it opens no connection, and none comes.

use std::sync::Arc;

use async_trait::async_trait;
use vmove_fabric::tcp::TcpFabric;
use vmove_fabric::{Class, Endpoint, Fabric, FabricKind, Multicast};
use vmove_node::peer::{BoxedStream, Dialer, FabricOffer, Hello, LinkError, PeerTarget, Token};

use crate::engine::ForkDialer;

/// Refuses to connect to anybody.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alone;

fn refused(to: &PeerTarget) -> LinkError {
    LinkError::Unreachable { peer: to.to_string(), why: "a node inside a program has no peers".to_owned() }
}

#[async_trait]
impl Dialer for Alone {
    async fn stream(&self, to: &PeerTarget, _: &Hello) -> Result<BoxedStream, LinkError> {
        Err(refused(to))
    }

    async fn endpoint(
        &self,
        to: &PeerTarget,
        _: FabricKind,
        _: &Hello,
    ) -> Result<Box<dyn Endpoint>, LinkError> {
        Err(refused(to))
    }

    fn fabrics(&self) -> Vec<FabricOffer> {
        Vec::new()
    }

    fn fabric(&self, _: FabricKind, _: Token) -> Option<Arc<dyn Fabric>> {
        None
    }
}

#[async_trait]
impl ForkDialer for Alone {
    async fn fork_memory(
        &self,
        to: &PeerTarget,
        _: &Hello,
        _: Class,
        _: &[u8],
    ) -> Result<Box<dyn Endpoint>, LinkError> {
        Err(refused(to))
    }

    fn multicast(&self, _: FabricKind, _: Token) -> Option<Box<dyn Multicast>> {
        None
    }

    fn tcp(&self) -> Option<Arc<TcpFabric>> {
        None
    }
}
