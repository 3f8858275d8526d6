//! The only place where guest memory is handed to a fabric.
//!
//! Rule 1 (lifetime): the mapping stays mapped, at one address, as long as any [`Region`] made from it is alive: a
//! [`GuestRegion`] holds both and drops the region first. Whoever clones the region out of it keeps the [`GuestRegion`] as well.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use vmove_fabric::{Access, Fabric, FabricError, LocalSlice, MemoryArea, Region, RemoteRegion};
use vmove_memory::Mapping;

/// A RAM block registered with a fabric.
#[derive(Debug, Clone)]
pub struct GuestRegion {
    // Order matters: fields drop in order of declaration.
    region: Region,
    mapping: Arc<Mapping>,
}

impl GuestRegion {
    /// Registers a whole RAM block.
    ///
    /// # Errors
    /// The fabric's answer.
    pub fn register(fabric: &dyn Fabric, mapping: Arc<Mapping>, access: Access) -> Result<Self, FabricError> {
        let start = NonNull::new(mapping.ptr()).unwrap_or(NonNull::dangling());
        // SAFETY: rule 1: the value made below keeps the mapping until after the region is dropped.
        let area = unsafe { MemoryArea::new(start, mapping.len().0) };
        Ok(Self { region: fabric.register(area, access)?, mapping })
    }

    /// What a peer needs to read it.
    #[must_use]
    pub fn remote(&self) -> RemoteRegion {
        self.region.remote()
    }

    /// A part of it as the target of a read, if it lies inside.
    #[must_use]
    pub fn local(&self, offset: u64, len: u32) -> Option<LocalSlice> {
        self.region.local(offset, len)
    }

    /// The memory itself.
    #[must_use]
    pub const fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}
