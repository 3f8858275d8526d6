//! Memory of this process for the table of checksums.
//!
//! Rules (for the `unsafe` in this file):
//! 1. A mapping is anonymous, private, made at an address of the kernel's choice and unmapped only by the drop of its owner.
//! 2. The region over it is a field that is dropped first, and no clone of it leaves this module.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use vmove_fabric::{Access, Fabric, FabricError, LocalSlice, MemoryArea, Region, RemoteRegion};

/// Zeroed memory, registered with a fabric.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Dropped by hand before the memory it is over.
    region: Option<Region>,
    at: NonNull<c_void>,
    len: NonZeroUsize,
}

// SAFETY: an owned mapping; all access goes through the region, which is made for several threads.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` bytes, at least 1.
    pub(crate) fn new(fabric: &dyn Fabric, len: usize, access: Access) -> Result<Self, FabricError> {
        let len = NonZeroUsize::new(len).unwrap_or(NonZeroUsize::MIN);
        // SAFETY: rule 1.
        let at = unsafe {
            mmap_anonymous(None, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
        };
        let at = at.map_err(|error| FabricError::Io { operation: "map memory", source: error.into() })?;
        let mut buffer = Self { region: None, at, len };
        // SAFETY: rules 1 and 2: mapped, readable and writable until after the region's drop; no reference to it is made.
        let area = unsafe { MemoryArea::new(at.cast(), len.get() as u64) };
        buffer.region = Some(fabric.register(area, access)?);
        Ok(buffer)
    }

    fn region(&self) -> &Region {
        self.region.as_ref().expect("set by new")
    }

    pub(crate) fn remote(&self) -> RemoteRegion {
        self.region().remote()
    }

    pub(crate) fn local(&self, offset: u64, len: u32) -> Option<LocalSlice> {
        self.region().local(offset, len)
    }

    pub(crate) fn checksum_at(&self, offset: u64, len: usize, seed: u64) -> Option<u64> {
        self.region().checksum_at(offset, len, seed)
    }

    pub(crate) fn read_at(&self, offset: u64, to: &mut [u8]) -> bool {
        self.region().read_at(offset, to)
    }

    pub(crate) fn write_at(&self, offset: u64, from: &[u8]) -> bool {
        self.region().write_at(offset, from)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.region = None;
        // SAFETY: rules 1 and 2: nobody uses it any more.
        let _ = unsafe { munmap(self.at, self.len.get()) };
    }
}
