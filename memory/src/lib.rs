//! A guest's RAM seen from outside its QEMU: neither QEMU nor the kernel is changed.
//!
//! - [`RamFile`], [`Mapping`], [`find_mappings`]: the file behind a RAM block, our own view of it, QEMU's view of it.
//! - [`attach`]: system calls run inside QEMU by ptrace; how a userfaultfd for QEMU's memory comes into our hands.
//! - [`uffd`]: faults of the guest, and mapping pages in answer to them.
//! - [`dirty`]: which pages the guest wrote since the last look.
//! - [`keep`]: memory copied as it was at one moment, while its process writes on.
//! - [`own_file`]: private memory moved to a file that the process shares, while it runs.
//! - [`table`]: where each page of a destination stands.
//! - [`mod@collapse`], [`memdir`]: huge pages, and the directories that hold RAM files.
//!
//! Nothing here knows of sockets, QMP or migration.
//!
//! Which pages a running QEMU writes (as root, or as its user with `CAP_SYS_PTRACE`):
//!
//! ```no_run
//! use vmove_memory::{DirtyTracker, Precision, Process, RamFile, find_mappings};
//!
//! let process = Process::open(4711)?;
//! let ram = RamFile::open("/run/vmove/ram/vm1/ram0".as_ref())?;
//! let mappings = find_mappings(&process, &[&ram])?;
//! let mut tracker = DirtyTracker::arm(&process, &mappings, Precision::Page)?;
//! std::thread::sleep(std::time::Duration::from_secs(1));
//! let scan = tracker.scan_and_rearm(0, |run| println!("{} pages from page {}", run.len, run.start.0))?;
//! println!("{} pages written, found in {:?}", scan.pages, scan.took);
//! tracker.disarm()?;
//! # Ok::<(), vmove_memory::MemoryError>(())
//! ```
//!
//! The table of page states needs no QEMU. A page that a guest thread faults on while it is on its way is mapped by whoever lands it:
//!
//! ```
//! use vmove_memory::{Landing, PageIndex, PageTable, Want};
//!
//! let table = PageTable::anonymous(512)?;
//! let reader = table.claim(PageIndex(7)).expect("nobody has it");
//! assert!(matches!(table.want(PageIndex(7)), Want::OnItsWay)); // a fault
//! assert!(matches!(reader.landed(), Landing::Ready { wanted: true })); // its bytes are in the file
//! # Ok::<(), vmove_memory::MemoryError>(())
//! ```

pub mod attach;
pub mod collapse;
pub mod dirty;
mod error;
pub mod keep;
mod maps;
pub mod memdir;
pub mod own_file;
mod pagemap;
mod process;
mod qemu_mapping;
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
    Injector, Keep, MappingHints, Replacement, Sharing, close_in_qemu, create_uffd, descriptors_of,
    discard_in_qemu, drops_locked, fill_locked_in_qemu, none_mapped, own_pages_in_qemu, reopen_uffd,
    replace_in_qemu, touched_in_qemu, uffds_in,
};
pub use collapse::{Collapsed, collapse, huge_mapped, map_folio};
pub use dirty::{DirtyTracker, Dropped, HoleWatch, OrphanWatch, Precision, ScanStats, Unsupported};
pub use error::{MemoryError, Result};
pub use keep::{KeepFailure, Keeper, Kept};
pub use maps::MapEntry;
pub use memdir::MemoryDir;
pub use own_file::{Moved, Mover, OwnFile, PrivatePart, STAND_BY, Standing, stand_by, unmap_strays};
pub use process::Process;
pub use qemu_mapping::QemuMapping;
pub use ram::{Mapping, RamFile, find_mappings, is_shared_whole};
pub use table::{Counts, Landing, PageState, PageTable, ReadTicket, RunTicket, Want};
pub use uffd::{EventBatch, FaultContext, FaultKind, Outcome, RemoteUffd, UffdEvent, UffdFeatures};
pub use units::{ByteLen, ByteRange, FileOffset, Hva, PageIndex, PageRun, PageSize};
pub use vmove_types::Backing;
