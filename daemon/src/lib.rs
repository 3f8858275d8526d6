//! `vmoved`, the daemon of a node.
//!
//! The engine that moves guests is in `vmove-migrate`; here are its surroundings: configuration, connections and TLS, the
//! VMs of the node, REST, metrics. What it answers is described in `docs/openapi.json`.
//!
//! Programs that speak with `vmoved` use the crate `vmove-client`. This crate is all of `vmoved`:
//!
//! ```no_run
//! let exit = vmove_daemon::server::main(); // with the arguments of this process
//! ```
#![forbid(unsafe_code)]

mod config;
mod leaf_switches;
pub mod server;
