//! The side the guest goes to.
//!
//! A session is one task that runs one phase after the other ([`phases`]): [`filling`], [`switchover`], [`loaded`], [`owner`],
//! [`complete`]. Each phase is a struct with what there is in it, and becomes the next one by value; what outlives the phases is in
//! [`session`]. Bulk readers ([`fill`]) and the fault thread ([`faults`]) move pages; [`launch`] starts QEMU; [`guest_memory`] knows
//! where each page stands. What survives a kill of the daemon is in the journal, in the page tables and in QEMU itself.

mod after_wires;
mod arrived;
mod block;
mod comparing;
mod complete;
mod device_state;
mod devices;
mod disk_check;
mod disk_wires;
mod error;
mod exports;
mod faults;
mod fill;
mod filling;
mod guest_memory;
mod homecoming;
mod huge_pages;
pub(crate) mod images;
mod launch;
mod loaded;
mod monitor;
mod on_demand;
mod owner;
mod owner_visits;
mod page_connections;
mod page_messages;
mod page_queue;
mod phases;
mod populate;
mod read_parts;
mod reader;
mod remote_memory;
mod session;
mod setup;
mod size_only;
mod slow_faults;
mod streams;
mod switchover;
mod turning;
mod verify;
mod vm_files;
mod whose;
mod window;

use std::path::{Path, PathBuf};

use vmove_node::peer::SessionId;

pub(crate) use session::Arrival;
pub(crate) use setup::{adopt, discard, end_if_stuck, enter_again, serve_new, tidy};
pub(crate) use vm_files::remove_ended;

/// The page map of a RAM block of the guest that a session brings, or has brought, here.
pub(crate) fn table_path(dir: &Path, id: SessionId, block: usize) -> PathBuf {
    guest_memory::GuestMemory::table_path(dir, id, block)
}
