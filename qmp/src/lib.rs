//! Everything vmove does to QEMU through its front doors: the QMP monitor, the command line and the process.
//!
//! | Module | Owns |
//! |---|---|
//! | [`client`] | a QMP connection: commands in flight by id, out-of-band commands, descriptors, events, deadlines |
//! | [`cmdline`] | a QEMU command line, parsed without loss; rewritten so that the guest can be moved; derived for a destination |
//! | [`process`] | starting a QEMU that outlives us, waiting for its monitor, ending it |
//! | [`switchover`] | moving the *device* state between two QEMUs that see the same guest RAM |
//! | [`inspect`] | what a running QEMU is made of, and what of it cannot be moved |
//!
//! Guest pages are none of this crate's business: with QEMU's capability `x-ignore-shared` they never enter its
//! migration stream. All times are `CLOCK_MONOTONIC` ([`MonotonicNanos`]), taken when a line was read from the socket.
#![forbid(unsafe_code)]

pub mod client;
mod clock;
pub mod cmdline;
mod codec;
mod error;
mod event;
pub mod inspect;
pub mod process;
pub mod switchover;

pub use client::Client;
pub use clock::MonotonicNanos;
pub use cmdline::{CommandLine, RamBacking, RamFileSpec, RunLayout};

pub use error::QmpError;
pub use event::{Event, Events, EventsError, Expectation, QemuTime};
pub use process::QemuProcess;
