//! A guest's RAM seen from outside its QEMU: neither QEMU nor the kernel is changed.
//!
//! - [`RamFile`], [`Mapping`], [`find_mappings`]: the file behind a RAM block, our own view of it, QEMU's view of it.
//! - [`attach`]: system calls run inside QEMU by ptrace; how a userfaultfd for QEMU's memory comes into our hands.
//! - [`uffd`]: faults of the guest, and mapping pages in answer to them.
//! - [`dirty`]: which pages the guest wrote since the last look.
//! - [`keep`]: memory copied as it was at one moment, while its process writes on.
//! - [`table`]: where each page of a destination stands.
//! - [`mod@collapse`], [`memdir`]: huge pages, and the directories that hold RAM files.
//!
//! Nothing here knows of sockets, QMP or migration.

pub mod attach;
pub mod collapse;
pub mod dirty;
mod error;
pub mod keep;
mod maps;
pub mod memdir;
mod pagemap;
mod process;
#[cfg(test)]
#[cfg(not(loom))]
mod qemu_tests;
mod ram;
mod sys;
pub mod table;
#[cfg(test)]
#[cfg(not(loom))]
mod testing;
pub mod uffd;
mod units;

pub use attach::{
    Injector, Keep, MappingHints, RemoteUffd, Replacement, Sharing, close_in_qemu, create_uffd,
    create_uffd_from_device, descriptors_of, discard_in_qemu, drops_locked, fill_locked_in_qemu, none_mapped,
    own_pages_in_qemu, reopen_uffd, replace_in_qemu, touched_in_qemu,
};
pub use collapse::{Collapsed, collapse, huge_mapped, map_folio};
pub use dirty::{DirtyTracker, Dropped, HoleWatch, OrphanWatch, Precision, ScanStats, Unsupported};
pub use error::{MemoryError, Result};
pub use keep::{KeepFailure, Keeper, Kept};
pub use maps::MapEntry;
pub use memdir::MemoryDir;
pub use process::Process;
pub use ram::{Mapping, QemuMapping, RamFile, find_mappings, is_shared_whole};
pub use table::{Counts, Landing, PageState, PageTable, ReadTicket, RunTicket, Want};
pub use uffd::{EventBatch, FaultContext, FaultKind, Outcome, UffdEvent, UffdFeatures};
pub use units::{Backing, ByteLen, ByteRange, FileOffset, Hva, PageIndex, PageRun, PageSize, UnknownBacking};
