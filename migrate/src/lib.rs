//! Moves a running QEMU guest between two daemons: sessions, modes, page service, journal, recovery.
//!
//! [`engine::Engine`] is what a daemon holds. A session has a source and a destination; both are state machines whose steps are
//! journaled before they are taken (see `docs/protocol.md`).

pub mod check;
pub mod engine;
pub mod link;
pub mod progress;
pub mod proto;
pub mod report;
pub mod spec;
pub mod vm;
