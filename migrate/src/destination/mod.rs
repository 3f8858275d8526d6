//! The side the guest goes to.
//!
//! One task per session ([`session`]) reads the source's messages and owns everything; bulk readers ([`fill`]) and the fault thread
//! ([`faults`]) move pages; [`launch`] starts QEMU; [`guest`] knows where each page stands. What survives a kill of the daemon is in
//! the journal, in the page tables and in QEMU itself.

mod attempt;
mod faults;
mod fill;
mod guest;
mod handover;
mod launch;
mod messages;
mod parts;
mod populate;
mod reach;
mod room;
mod session;
mod setup;
pub(crate) mod verify;
mod waiting;
mod work;

pub(crate) use launch::chain;
pub(crate) use populate::PART;
pub(crate) use room::plan;
pub(crate) use session::Arrival;
pub(crate) use setup::{adopt, discard, serve_new, tidy};
