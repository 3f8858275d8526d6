//! Forks a running QEMU guest: the guest goes on, and any number of copies of it run beside it and on other hosts.
//!
//! The [`engine`] does what `vfork` asks a node for; [`embed`] has it inside a program, without a daemon. It is made of what the other modules do on one host:
//!
//! | Module | Owns |
//! |---|---|
//! | [`engine`] | requests for forks: the parent's side, a child's host, prepared children, disks, guests that fork themselves, recovery |
//! | [`embed`] | a node inside a program: VMs, forks and templates without a daemon |
//! | [`freeze`] | freezing a guest: device state saved, RAM file frozen (or memory copied), guest running again within milliseconds |
//! | [`template`] | what was frozen, on one host: RAM files, device state, manifest; on disk, checksummed |
//! | [`chunks`], [`service`] | which parts of a template have arrived; children that run before all of it has: their page faults |
//! | [`child`] | one copy: a QEMU prepared, the template mapped, state loaded, set running |
//! | [`identity`], [`network`] | what must differ between copies |
//! | [`rehome`] | memory of its own for a parent or a child, so that it can be moved or forked again |
//! | [`record`] | what outlives the daemon: the journal of a fork, and which VM came from which |
//! | [`disk`] | disks that are written: frozen with the guest, an overlay for each VM |
//! | [`check`], [`room`] | what stands in the way: devices, memory |
//! | [`verify`] | a child's memory compared with the template |
//!
//! A [`template::Template`] on a host is the seam to everything that brings templates to other hosts: whoever fills such a
//! folder there can have children started from it.
//!
//! ```
//! use std::sync::Arc;
//! use vmove_clone::engine::{ForkEngine, ForkError};
//! use vmove_types::fork::ForkRequest;
//!
//! /// Eight children of a guest, four of them on another node.
//! async fn eight(engine: Arc<ForkEngine>) -> Result<(), ForkError> {
//!     let nodes = vec!["n1".to_owned(), "n2.example:7420".to_owned()];
//!     let request = ForkRequest { vm: Some("web".to_owned()), count: 8, nodes, ..ForkRequest::default() };
//!     let report = engine.create(request).await?;
//!     println!("the guest stood still for {} ms", report.parent_pause_ms);
//!     Ok(())
//! }
//! ```
#![forbid(unsafe_code)]

// Loom looks at what threads share without a lock, and knows nothing of the rest.
#[cfg(not(loom))]
pub mod check;
#[cfg(not(loom))]
pub mod child;
#[cfg_attr(loom, allow(dead_code))]
pub mod chunks;
#[cfg(not(loom))]
pub mod disk;
#[cfg(not(loom))]
pub mod embed;
#[cfg(not(loom))]
pub mod engine;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod files;
#[cfg(not(loom))]
pub mod freeze;
#[cfg(all(feature = "fuzzing", not(loom)))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(not(loom))]
pub mod identity;
#[cfg(not(loom))]
pub mod network;
#[cfg(not(loom))]
pub mod record;
#[cfg(not(loom))]
pub mod rehome;
#[cfg(not(loom))]
pub mod room;
#[cfg(not(loom))]
pub mod service;
#[cfg(not(loom))]
pub mod template;
#[cfg(not(loom))]
pub mod verify;

#[cfg(not(loom))]
pub use error::CloneError;
