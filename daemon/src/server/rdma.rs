//! The RDMA device of this node: opened when it is there, looked at again before each migration.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::TcpStream;
use vmove_fabric::verbs::{OnDemand, VerbsFabric, VerbsMulticast, VerbsMulticastOptions, VerbsOptions};
use vmove_fabric::{Class, Endpoint, Multicast};
use vmove_node::peer::Token;

use super::endpoint::{EndpointError, NoVerbs, make_blocking};
use crate::config::{self, RdmaConfig};
use vmove_types::problem::chain;

/// The device, if there is one that can be used.
#[derive(Debug)]
pub struct Rdma {
    options: VerbsOptions,
    open: Mutex<Option<Arc<VerbsFabric>>>,
}

impl Rdma {
    pub fn new(config: &RdmaConfig) -> Self {
        let mut options = VerbsOptions::default();
        options.device.clone_from(&config.device);
        options.port = config.port;
        options.gid_index = config.gid_index;
        options.pkey_index = config.pkey_index;
        (options.urgent_service_level, options.bulk_service_level) = config.service_level.into();
        (options.urgent_traffic_class, options.bulk_traffic_class) = config.traffic_class.into();
        options.max_registered = config.max_registered;
        options.on_demand = match config.on_demand {
            config::OnDemand::Never => OnDemand::Never,
            config::OnDemand::IfNeeded => OnDemand::IfNeeded,
            config::OnDemand::Always => OnDemand::Always,
        };
        Self { options, open: Mutex::default() }
    }

    /// The fabric, opened if it is not yet; or why there is none.
    pub fn fabric(&self) -> Result<Arc<VerbsFabric>, NoVerbs> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fabric) = &*open {
            let Err(error) = fabric.usable() else { return Ok(Arc::clone(fabric)) };
            tracing::warn!(error = chain(&error), "the RDMA device cannot be used (any more)");
            // Sessions that use it still hold it.
            *open = None;
        }
        let fabric = Arc::new(VerbsFabric::new(self.options.clone())?);
        Ok(Arc::clone(open.insert(fabric)))
    }

    /// The fabric as the session with this secret uses it: no other session reaches what is registered in it.
    pub fn of_session(&self, secret: Token) -> Result<Arc<VerbsFabric>, NoVerbs> {
        Ok(self.fabric()?.for_session(u128::from_ne_bytes(secret.0))?)
    }

    /// Datagrams of a session beside the fabric, if that can be used.
    pub fn multicast(&self, secret: Token) -> Option<Box<dyn Multicast>> {
        let fabric = self.of_session(secret).ok()?;
        Some(Box::new(VerbsMulticast::new(&fabric, VerbsMulticastOptions::default())))
    }

    /// Introduces a queue pair over a greeted connection. Off the worker threads: both ends exchange messages.
    pub async fn adopt(
        &self,
        secret: Token,
        stream: TcpStream,
        tls: Option<rustls::Connection>,
        class: Class,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let fabric = self.of_session(secret)?;
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        make_blocking(move || match tls {
            None => fabric.adopt(stream, class),
            Some(tls) => fabric.adopt_tls(stream, tls, class),
        })
        .await
    }
}
