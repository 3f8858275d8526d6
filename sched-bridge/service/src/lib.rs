//! `vbridged`: leases resources of nodes to virtual clusters, runs move plans, and works with schedulers.
//!
//! `sched_bridge`, a pure library, decides where VMs are placed. This crate adds what a service needs: a [`store`] that is durable and
//! may be shared, a [`bridge`] that grants [`lease`]s from it, [`account`]ing, plans ([`planner`], [`executor`]), an HTTP interface
//! ([`api`], [`server`]), and Slurm ([`slurm`]).
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use sched_bridge::model::{ClusterName, MemoryMib, Node, NodeName};
//! use sched_bridge::place::{Alternative, ClusterRequest, VmGroup};
//! use vmove_bridge::bridge::{Bridge, GrantRequest, Wanted};
//! use vmove_bridge::clock::SystemClock;
//! use vmove_bridge::lease::LeaseId;
//! use vmove_bridge::store::Embedded;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let store = Embedded::open(&folder.join("state.redb"))?;
//! let bridge = Bridge::new(Arc::new(store), Arc::new(SystemClock::new()));
//! tokio::spawn(Arc::clone(&bridge).follow());
//! bridge.wait_until_current(Duration::from_secs(10)).await?;
//! bridge.put_node(Node::plain(NodeName::new("n1")?, 8, MemoryMib(16_384))).await?;
//!
//! // Two VMs with four hardware threads and 4 GiB each.
//! let vm = Alternative { vcpus: 4, memory: MemoryMib(4096), ..Alternative::default() };
//! let group = VmGroup { name: "web".to_owned(), count: 2, alternatives: vec![vm] };
//! let request = GrantRequest {
//!     id: LeaseId::unique(),
//!     holder: "alice".to_owned(),
//!     wanted: Wanted::Cluster(Box::new(ClusterRequest::new(ClusterName::new("shop")?, vec![group]))),
//!     ttl_ms: 60_000,
//!     together: false,
//!     quota: None,
//!     project: None,
//!     start: None,
//! };
//! let granted = bridge.grant(request).await?;
//! assert_eq!(granted.lease.nodes(), [NodeName::new("n1")?]);
//!
//! let record = bridge.release(&granted.lease.id).await?;
//! assert_eq!(record.holder, "alice");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod access;
pub mod account;
pub mod api;
pub mod bridge;
pub mod checkpoint;
pub mod clock;
pub mod clusters;
pub mod config;
pub mod driver;
pub mod executor;
pub mod instance_types;
pub mod keys;
pub mod lease;
pub mod listing;
mod metrics;
pub mod planner;
pub mod quota;
pub mod request_text;
pub mod server;
pub mod slurm;
pub mod slurm_adapter;
pub mod store;
pub mod template;
#[cfg(test)]
mod testing;
mod together;
pub mod vms;
