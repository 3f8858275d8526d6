//! Memory of this process for the table of checksums.
//!
//! Rules (for the `unsafe` in this file):
//! 1. A mapping is anonymous, private, made at an address of the kernel's choice and unmapped only by the drop of its owner.
//! 2. The regions over it are a field that is dropped first, and no clone of one leaves this module.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use vmove_fabric::{Access, Fabric, FabricError, LocalSlice, MemoryArea, Region, RemoteRegion};

/// Zeroed memory, registered with a fabric, or with several.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// One for each fabric, the first for use here. Dropped by hand before the memory they are over.
    regions: Vec<Region>,
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
        let failed = |source| FabricError::Io { operation: "map memory", source };
        // SAFETY: rule 1.
        let at = unsafe {
            mmap_anonymous(ptr::null_mut(), len.get(), ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let at = at.map_err(|error| failed(error.into()))?;
        let at = NonNull::new(at).ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        let mut buffer = Self { regions: Vec::new(), at, len };
        buffer.also(fabric, access)?;
        Ok(buffer)
    }

    /// Registers it with another fabric, too; what peers of that one need to read it.
    pub(crate) fn also(&mut self, fabric: &dyn Fabric, access: Access) -> Result<RemoteRegion, FabricError> {
        // SAFETY: rules 1 and 2: mapped, readable and writable until after the region's drop; no reference to it is made.
        let area = unsafe { MemoryArea::new(self.at.cast(), self.len.get() as u64) };
        let region = fabric.register(area, access)?;
        let remote = region.remote();
        self.regions.push(region);
        Ok(remote)
    }

    /// Registers it with this fabric instead.
    pub(crate) fn move_to(&mut self, fabric: &dyn Fabric, access: Access) -> Result<(), FabricError> {
        self.also(fabric, access)?;
        self.regions.drain(..self.regions.len() - 1);
        Ok(())
    }

    fn region(&self) -> &Region {
        self.regions.first().expect("registered by new")
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
        self.regions.clear();
        // SAFETY: rules 1 and 2: nobody uses it any more.
        let _ = unsafe { munmap(self.at.as_ptr(), self.len.get()) };
    }
}
