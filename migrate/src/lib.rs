//! Moves a running QEMU guest between two daemons: sessions, modes, page service, journal, recovery.
//!
//! [`engine::Engine`] is what a daemon holds. A session has a source and a destination; both are state machines whose steps are
//! journaled before they are taken (see `docs/protocol.md`). Who owns the guest is decided by [`ownership`], which does no I/O:
//!
//! ```
//! use vmove_migrate::ownership::{DestinationEvent, DestinationState, SourceEvent, SourceState};
//!
//! let source = SourceState::Warm.step(SourceEvent::Stop)?.step(SourceEvent::PeerLoaded)?;
//! let destination = DestinationState::Filling.step(DestinationEvent::StateLoaded)?.step(DestinationEvent::Commit)?;
//! assert_eq!((source, destination), (SourceState::Committed, DestinationState::Owner));
//! assert!(destination.may_run() && !source.may_run());
//! // A source that has given the guest up does not take it back because the connection broke.
//! assert_eq!(source.step(SourceEvent::GiveUp)?, SourceState::Committed);
//! # Ok::<(), vmove_migrate::ownership::IllegalStep>(())
//! ```

// Loom looks at what threads share without a lock, and no other crate above `memory` knows of it.
#[cfg(not(loom))]
mod abandon;
#[cfg(not(loom))]
mod autogroup;
#[cfg(not(loom))]
pub mod check;
#[cfg(not(loom))]
mod choosing;
mod coming;
#[cfg(not(loom))]
mod command;
#[cfg(not(loom))]
mod copy_rate;
#[cfg(not(loom))]
mod destination;
#[cfg(not(loom))]
mod devices;
#[cfg(not(loom))]
mod disk_hash;
#[cfg(not(loom))]
mod disk_holds;
#[cfg(not(loom))]
mod disk_io;
#[cfg(not(loom))]
pub mod disk_moves;
#[cfg(not(loom))]
pub mod domains;
#[cfg(not(loom))]
pub mod embed;
#[cfg(not(loom))]
pub mod engine;
#[cfg(not(loom))]
mod engine_error;
#[cfg(not(loom))]
mod formats;
#[cfg(not(loom))]
mod frames;
#[cfg(not(loom))]
mod giving_way;
#[cfg(not(loom))]
mod group;
#[cfg(not(loom))]
pub mod groups;
#[cfg(not(loom))]
pub mod history;
#[cfg(not(loom))]
mod homes;
#[cfg(not(loom))]
mod host_cpu;
#[cfg(not(loom))]
mod kept_memory;
#[cfg(not(loom))]
mod may_visit;
#[cfg(not(loom))]
pub mod mend;
#[cfg(not(loom))]
pub mod node;
#[cfg(not(loom))]
mod over_time;
#[cfg(not(loom))]
mod owed;
#[cfg(not(loom))]
pub mod ownership;
#[cfg(not(loom))]
mod page_hash;
#[cfg(not(loom))]
pub mod past;
#[cfg(not(loom))]
pub mod pending;
#[cfg(not(loom))]
pub mod plan;
#[cfg(not(loom))]
pub mod promise;
#[cfg(not(loom))]
pub mod proto;
#[cfg(not(loom))]
pub mod publish;
#[cfg(not(loom))]
pub mod qemu_binaries;
#[cfg(not(loom))]
mod records;
#[cfg(not(loom))]
mod recovery;
#[cfg(not(loom))]
mod retention;
#[cfg(not(loom))]
mod source;
#[cfg(not(loom))]
mod taps;
#[cfg(not(loom))]
pub mod throttle;
#[cfg(not(loom))]
mod turning;
#[cfg(not(loom))]
pub mod visiting;
#[cfg(not(loom))]
mod visits;
#[cfg(not(loom))]
pub mod vmm;
#[cfg_attr(loom, allow(dead_code))]
mod waiting_faults;
