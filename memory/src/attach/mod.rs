//! System calls run inside another process, and what is built on them.

mod code;
mod entries;
mod frame;
mod injector;
mod lend;
mod ptrace;
mod remap;
mod remote_uffd;
mod stopped;
mod threads;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use injector::Injector;
mod touched;

pub use entries::{discard_in_qemu, drops_locked, fill_locked_in_qemu, none_mapped};
pub use remap::{MappingHints, Replacement, Sharing, descriptors_of, replace_in_qemu};
pub(crate) use remap::{advise, map_aside, move_over, unmap};
pub use remote_uffd::{Keep, close_in_qemu, create_uffd, reopen_uffd, uffds_in};
pub use touched::{own_pages_in_qemu, touched_in_qemu};
