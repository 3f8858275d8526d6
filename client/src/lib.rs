//! Asks `vmoved`, the daemon of a node, to run, move and fork QEMU guests.
//!
//! A [`Client`] has one method for each request of `docs/openapi.json`, with the types of `vmove-types`. Clones share connections. A daemon
//! answers on its Unix socket, whose mode says who may ask ([`Client::connect`]), and over TLS to clients of whose certificates its
//! configuration says what they may do ([`Client::connect_tls`]). With the feature `bridge` there is also a client of `vbridged` (module `bridge`).
//!
//! ```no_run
//! use vmove_client::{Client, Error};
//! use vmove_types::migration::MigrateRequest;
//! use vmove_types::problem::Code;
//! use vmove_types::spec::MigrationSpec;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Error> {
//! let client = Client::connect("/run/vmove/control.sock");
//! for vm in client.vms().await?.vms {
//!     println!("{}: {}", vm.name, vm.status);
//! }
//!
//! // Moves a guest, and shows how far it is until it has arrived or failed.
//! let wanted = MigrateRequest { vm: "web".to_owned(), to: "node2".to_owned(), options: MigrationSpec::default() };
//! let taken = match client.migrate(&wanted).await {
//!     Err(Error::Refused(problem)) if problem.code == Code::Busy => return Ok(()),
//!     answer => answer?,
//! };
//! let mut progress = client.follow_migration(&taken.id).await?;
//! while let Some(now) = progress.next().await? {
//!     println!("{} of {} bytes", now.bytes_done, now.bytes_total);
//! }
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

#[cfg(feature = "bridge")]
pub mod bridge;
mod connection;
mod disks;
mod error;
mod forks;
mod groups;
mod hooks;
mod libvirt;
mod migrations;
mod passed_on;
mod proxmox;
mod stream;
mod tls;
mod vms;

use std::path::Path;
use std::time::Duration;

pub use self::error::Error;
pub use self::stream::Stream;
pub use self::tls::{ConnectError, TlsError, TlsFiles};
pub use vmove_http::client::{BadEndpoint, Endpoint, encoded};
pub use vmove_http::tls_refusal::TlsRefusal;

use self::connection::Connection;
use vmove_types::device::NodeDeviceList;
use vmove_types::node::{FabricCheck, NodeInfo};
use vmove_types::tuning::{TuningQuery, TuningReport};

/// A fork of a large guest, or the end of a migration, may take any time: the daemon has time limits of its own.
const ANSWER_TIMEOUT: Duration = Duration::MAX;

/// A client of one `vmoved`.
#[derive(Debug, Clone)]
pub struct Client(Connection);

impl Client {
    /// A client of the daemon whose control socket is `socket`. A connection is made with the first request.
    #[must_use]
    pub fn connect(socket: impl AsRef<Path>) -> Self {
        Self(Connection::new(Endpoint::Unix(socket.as_ref().to_owned()), ANSWER_TIMEOUT, None, "vmoved"))
    }

    /// What the node says of itself: fabrics, memory, known nodes.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn node(&self) -> Result<NodeInfo, Error> {
        self.0.get("/v1/node").await
    }

    /// The devices of the node, who has them, and whether they can be given to VMs.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn devices(&self) -> Result<NodeDeviceList, Error> {
        self.0.get("/v1/devices").await
    }

    /// Compares the node and its VMs, or one VM, with what is advised.
    ///
    /// # Errors
    /// There is no such VM, or the daemon does not answer.
    pub async fn tuning(&self, vm: Option<&str>) -> Result<TuningReport, Error> {
        let vm = vm.map_or_else(String::new, |vm| format!("?vm={}", encoded(vm)));
        self.0.get(&format!("/v1/tuning{vm}")).await
    }

    /// Does of that what can be done now.
    ///
    /// # Errors
    /// There is no such VM, a VM cannot be pinned, or the daemon does not answer.
    pub async fn apply_tuning(&self, vm: Option<&str>) -> Result<TuningReport, Error> {
        self.0.post("/v1/tuning", &TuningQuery { vm: vm.map(str::to_owned) }).await
    }

    /// Tries every fabric between this node and another, `host:port` or a name of the configuration.
    ///
    /// # Errors
    /// The node is unknown, or the daemon does not answer.
    pub async fn check_fabric(&self, to: &str) -> Result<FabricCheck, Error> {
        self.0.get(&format!("/v1/fabric/check?to={}", encoded(to))).await
    }
}
