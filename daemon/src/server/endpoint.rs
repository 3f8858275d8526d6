//! Making endpoints of greeted connections.

use std::io;

use tokio::task::JoinError;
use vmove_fabric::{Endpoint, FabricError, FabricKind};
use vmove_node::blocking::spawn_blocking;

/// Why fabric verbs cannot be used here.
#[derive(Debug, thiserror::Error)]
pub enum NoVerbs {
    /// Another fabric was asked for.
    #[cfg(feature = "verbs")]
    #[error("fabric verbs is switched off here (--fabric)")]
    SwitchedOff,
    /// There is no RDMA device that can be used.
    #[cfg(feature = "verbs")]
    #[error(transparent)]
    Device(#[from] FabricError),
    /// The feature `verbs` is off.
    #[cfg(not(feature = "verbs"))]
    #[error("this vmoved was built without RDMA")]
    NotBuiltIn,
}

/// Why a greeted connection did not become an endpoint.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// Fabric tcp is not in use.
    #[error("fabric tcp is switched off here (--fabric local)")]
    NoTcp,
    /// Fabric local is not in use.
    #[error("fabric local is switched off here")]
    NoLocal,
    /// Fabric verbs cannot be used.
    #[error(transparent)]
    NoVerbs(#[from] NoVerbs),
    /// This version does not have the fabric.
    #[error("fabric {0} is not built into this vmoved")]
    UnknownFabric(FabricKind),
    /// The connection failed before the fabric had it.
    #[error(transparent)]
    Connection(#[from] io::Error),
    /// The fabric refused the connection.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The task that makes the endpoint failed.
    #[error(transparent)]
    Task(#[from] JoinError),
}

/// Makes an endpoint where no connection waits behind it: both ends may exchange messages.
pub(super) async fn make_blocking<F>(make: F) -> Result<Box<dyn Endpoint>, EndpointError>
where
    F: FnOnce() -> Result<Box<dyn Endpoint>, FabricError> + Send + 'static,
{
    Ok(spawn_blocking(make).await??)
}
