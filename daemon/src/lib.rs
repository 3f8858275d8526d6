//! `vmoved`, the daemon of a node, and `vmove`, its command.
//!
//! The engine that moves guests is in `vmove-migrate`; here are its surroundings: configuration, connections and TLS, the
//! VMs of the node, REST, metrics. What both programs agree on is described in `docs/openapi.json`.
#![forbid(unsafe_code)]

mod api;
pub mod cli;
mod config;
mod leaves;
pub mod server;
mod units;
