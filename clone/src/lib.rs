//! Forks a running QEMU guest on one host: the guest goes on, and any number of copies of it run beside it.
//!
//! | Module | Owns |
//! |---|---|
//! | [`parent`] | freezing a guest: device state saved, RAM file frozen, guest running again within milliseconds |
//! | `protect` | the other way to freeze, where memory cannot be mapped again: it is copied while the guest runs |
//! | [`template`] | what was frozen, on one host: RAM files, device state, manifest; on disk, checksummed |
//! | [`service`] | children that run before all of their template has arrived: their page faults |
//! | [`child`] | one copy: a QEMU prepared, its memory laid over the template, state loaded, set running |
//! | [`identity`], [`network`] | what must differ between copies |
//! | [`rehome`] | memory of its own for a parent or a child, so that it can be moved or forked again |
//! | [`record`] | what outlives the daemon: the journal of a fork, and which VM came from which |
//! | [`disk`] | disks that are written: frozen with the guest, an overlay for each VM |
//! | [`check`], [`room`] | what stands in the way: devices, memory |
//! | [`verify`] | a child's memory compared with the template |
//!
//! A [`template::Template`] on a host is the seam to everything that brings templates to other hosts: whoever fills such a
//! folder there can have children started from it.
#![forbid(unsafe_code)]

pub mod check;
pub mod child;
pub mod disk;
mod error;
pub mod identity;
pub mod network;
pub mod parent;
mod protect;
pub mod record;
pub mod rehome;
pub mod report;
pub mod room;
pub mod service;
pub mod template;
pub mod verify;

pub use error::CloneError;
