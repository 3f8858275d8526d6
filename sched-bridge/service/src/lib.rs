//! `vbridged`: keeps the leases of virtual clusters, runs move plans, and speaks with schedulers.
//!
//! What goes where is decided by `sched_bridge`, a pure library. Here is what it needs around it: a [`store`] that survives and is
//! shared, [`lease`]s with heartbeats, [`account`]ing, the execution of plans, an HTTP interface, and the commands of `vmove` that
//! speak it.
#![forbid(unsafe_code)]

pub mod account;
pub mod adapter;
pub mod api;
pub mod bridge;
pub mod cli;
pub mod clock;
pub mod config;
pub mod http;
pub mod keys;
#[cfg(any(test, feature = "lab"))]
pub mod lab;
pub mod lease;
pub mod plan;
pub mod request_text;
pub mod server;
pub mod slurm;
#[cfg(any(test, feature = "lab"))]
pub mod slurm_stream;
pub mod start;
pub mod store;
#[cfg(any(test, feature = "lab"))]
pub mod storm;
pub mod topology_text;
