//! Everything vmove does to QEMU through its front doors: the QMP monitor, the command line and the process.
//!
//! | Module | Owns |
//! |---|---|
//! | [`client`] | a QMP connection: commands in flight by id, out-of-band commands, descriptors, events, deadlines |
//! | [`cmdline`] | a QEMU command line, parsed without loss; rewritten so that the guest can be moved; derived for a destination |
//! | [`confine`] | the rights of QEMUs: user, groups, capabilities, filter of system calls |
//! | [`access`] | what QEMU opens by its path and its user may not |
//! | [`process`] | starting a QEMU that outlives us, waiting for its monitor, ending it |
//! | [`switchover`] | moving the *device* state between two QEMUs that see the same guest RAM |
//! | [`inspect`] | what a running QEMU is made of, and what of it cannot be moved |
//! | [`log`] | the output of a QEMU: its end, and a bound on its length |
//! | [`io_threads`] | QEMU's I/O threads run before its others while a guest stops |
//! | [`nbd`] | reading an export of an NBD server, QEMU's or another |
//! | [`oom`] | programs that we start are as exposed to the kernel's out-of-memory killer as others |
//! | [`hotplug`] | devices that leave a running guest and come back |
//! | [`agent`] | commands that run inside the guest, by the QEMU guest agent |
//!
//! Guest pages are none of this crate's business: with QEMU's capability `x-ignore-shared` they never enter its
//! migration stream. All times are `CLOCK_MONOTONIC` ([`Mono`](vmove_types::time::Mono)), taken when a line was read from the socket.
//!
//! ```
//! use vmove_qmp::CommandLine;
//!
//! let line = "qemu-system-x86_64 -name vm1,debug-threads=on -m 4G -machine q35";
//! let mut line = CommandLine::parse(line.split(' ').map(Into::into).collect())?;
//! assert_eq!(line.guest_name().as_deref(), Some("vm1"));
//! line.pin_machine("pc-q35-7.2")?; // an alias is another machine in another QEMU
//! assert_eq!(line.to_argv().last().unwrap(), "pc-q35-7.2");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A running QEMU, over its monitor:
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::{path::Path, time::Duration};
//!
//! use vmove_qmp::{Client, inspect};
//!
//! let client = Client::connect(Path::new("/run/vmove/vm1/qmp"), Duration::from_secs(5)).await?;
//! let facts = inspect::facts(&client, 4711, None).await?;
//! println!("QEMU {} with {} disks", client.version(), facts.block.len());
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod access;
pub mod agent;
pub mod client;
pub mod cmdline;
mod codec;
pub mod confine;
pub mod disks;
mod error;
mod event;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod hotplug;
pub mod inspect;
pub mod io_threads;
pub mod log;
pub mod nbd;
pub mod oom;
pub mod process;
pub mod switchover;

pub use client::{Client, Expectation};
pub use cmdline::{CommandLine, CommandLineError, RamFileSpec, RunLayout};

pub use error::QmpError;
pub use event::{Event, Events, EventsError, QemuTime, known_events};
pub use process::QemuProcess;
