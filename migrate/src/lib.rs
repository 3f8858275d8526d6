//! Moves a running QEMU guest between two daemons: sessions, modes, page service, journal, recovery.
//!
//! [`engine::Engine`] is what a daemon holds. A session has a source and a destination; both are state machines whose steps are
//! journaled before they are taken (see `docs/protocol.md`).

pub mod check;
pub mod clock;
mod courtesy;
mod destination;
pub mod engine;
pub mod history;
pub mod journal;
pub mod latency;
pub mod link;
pub mod monitors;
pub mod node;
pub mod ownership;
pub mod pending;
pub mod plan;
pub mod progress;
pub mod proto;
pub mod publish;
pub mod region;
pub mod report;
mod retention;
mod source;
pub mod spec;
pub mod throttle;
pub mod vm;
