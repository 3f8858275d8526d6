//! Memory that takes part in transfers.
//!
//! Rules (for the `unsafe` in this file):
//! 1. The creator of a [`MemoryArea`] promises that the memory stays valid as long as any region over it; a
//!    region's last drop ends every access before it returns.
#![allow(unsafe_code)]

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::sys::memory::{Piece, to_usize};

/// What a peer needs to read or write a region. Give it to a peer and that peer can, as far as the region's
/// [`Access`] goes, so send it only over connections that deserve it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// Where the region begins, in the numbering of the back end (tcp: 0; local: address in the peer process).
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The key that grants access.
    pub rkey: u64,
}

impl std::fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key is a capability: it does not belong in logs.
        f.debug_struct("RemoteRegion")
            .field("addr", &format_args!("{:#x}", self.addr))
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl RemoteRegion {
    /// The place `offset` bytes into the region; `None` if `offset` is not inside it.
    #[must_use]
    pub fn at(&self, offset: u64) -> Option<RemoteSlice> {
        if offset >= self.len {
            return None;
        }
        Some(RemoteSlice { addr: self.addr.checked_add(offset)?, rkey: self.rkey })
    }
}

/// A place in a peer's region. The length comes from the local side of the segment; the peer checks it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RemoteSlice {
    /// Address in the numbering of [`RemoteRegion::addr`].
    pub addr: u64,
    /// The region's key.
    pub rkey: u64,
}

impl std::fmt::Debug for RemoteSlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteSlice").field("addr", &format_args!("{:#x}", self.addr)).finish_non_exhaustive()
    }
}

/// What peers may do with a region. This side may always do both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// Peers may READ.
    pub remote_read: bool,
    /// Peers may WRITE.
    pub remote_write: bool,
}

impl Access {
    /// For memory that READs of this side land in or WRITEs of this side come from.
    pub const LOCAL: Self = Self { remote_read: false, remote_write: false };
    /// For memory that peers read.
    pub const REMOTE_READ: Self = Self { remote_read: true, remote_write: false };
    /// For memory that peers write.
    pub const REMOTE_WRITE: Self = Self { remote_read: false, remote_write: true };
}

/// A range of this process's memory.
#[derive(Debug, Clone, Copy)]
pub struct MemoryArea {
    ptr: NonNull<u8>,
    len: u64,
}

// SAFETY: an address and a length; what may be done with them is promised by whoever called `new`.
unsafe impl Send for MemoryArea {}
// SAFETY: as above.
unsafe impl Sync for MemoryArea {}

impl MemoryArea {
    /// Describes `len` bytes at `ptr`.
    ///
    /// # Safety
    /// Until the last clone of every [`Region`] registered over it is dropped:
    /// - the range stays mapped, readable and writable (readable is enough for a region that is only ever the
    ///   source of transfers), and backed by memory, or guarded (`vmove-guard`) if somebody may shorten the file behind it;
    /// - no Rust reference to any byte of it is used, because transfers, of this process and of peers, read
    ///   and write it at any time.
    #[must_use]
    pub unsafe fn new(ptr: NonNull<u8>, len: u64) -> Self {
        Self { ptr, len }
    }

    /// Start of the range.
    #[must_use]
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the range has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Registered memory. The last clone's drop deregisters: it returns when no transfer touches the memory any
/// more, and later requests for it fail with [`RemoteStatus::BadKey`](crate::RemoteStatus::BadKey).
#[derive(Debug, Clone)]
pub struct Region(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    area: MemoryArea,
    access: Access,
    remote: RemoteRegion,
    /// Proves to endpoints of the same fabric that the region is alive.
    local_key: u64,
    pins: bool,
    /// Its drop deregisters.
    _registration: Box<dyn Registration>,
    /// Dropped after that: fields drop in order of declaration.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// A back end's hold on registered memory; dropping it deregisters.
pub(crate) trait Registration: Send + Sync + std::fmt::Debug {}

/// A region that may have been dropped.
#[cfg(feature = "simulation")]
#[derive(Debug)]
pub(crate) struct WeakRegion(std::sync::Weak<Inner>);

#[cfg(feature = "simulation")]
impl WeakRegion {
    pub(crate) fn upgrade(&self) -> Option<Region> {
        self.0.upgrade().map(Region)
    }
}

impl Region {
    pub(crate) fn new(
        area: MemoryArea,
        access: Access,
        remote: RemoteRegion,
        local_key: u64,
        pins: bool,
        registration: Box<dyn Registration>,
    ) -> Self {
        Self(Arc::new(Inner {
            area,
            access,
            remote,
            local_key,
            pins,
            _registration: registration,
            owner: None,
        }))
    }

    /// Finds it again as long as a clone lives.
    #[cfg(feature = "simulation")]
    pub(crate) fn downgrade(&self) -> WeakRegion {
        WeakRegion(Arc::downgrade(&self.0))
    }

    /// Keeps `owner`, typically what has the memory mapped, until the last clone is dropped and the memory deregistered. `None` if
    /// there are clones already.
    #[must_use]
    pub fn keeping(mut self, owner: Arc<dyn Any + Send + Sync>) -> Option<Self> {
        Arc::get_mut(&mut self.0)?.owner = Some(owner);
        Some(self)
    }

    /// What to tell peers.
    #[must_use]
    pub fn remote(&self) -> RemoteRegion {
        self.0.remote
    }

    /// The memory.
    #[must_use]
    pub fn area(&self) -> MemoryArea {
        self.0.area
    }

    /// Whether peers reach the pages that were there when it was registered, which are pinned, and not those that are there now.
    #[must_use]
    pub fn pins(&self) -> bool {
        self.0.pins
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.area.len
    }

    /// Whether the region has no bytes; never true, since such a region is refused.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.area.is_empty()
    }

    /// What peers may do.
    #[must_use]
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// Copies bytes from `offset` on into `to`. `false`: they are not all inside the region, and nothing was copied; or the file behind
    /// the region was shortened, and what was copied is worth nothing. Bytes that change meanwhile give some mixture.
    #[must_use]
    pub fn read_at(&self, offset: u64, to: &mut [u8]) -> bool {
        let read = self.piece(offset, to.len()).map(|piece| piece.copy_to(to)).is_some();
        read && !self.is_broken()
    }

    /// Copies `from` to `offset` on. `false`: it does not fit the region, and nothing was copied; or the file behind the region was
    /// shortened, and the bytes are lost. The memory must be writable.
    #[must_use]
    pub fn write_at(&self, offset: u64, from: &[u8]) -> bool {
        let written = self.piece(offset, from.len()).map(|piece| piece.copy_from(from)).is_some();
        written && !self.is_broken()
    }

    /// Whether `len` bytes at `offset` are all zero; `None` if they are not all inside the region, or its file was shortened.
    #[must_use]
    pub fn is_zero_at(&self, offset: u64, len: usize) -> Option<bool> {
        self.piece(offset, len).map(Piece::is_zero).filter(|_| !self.is_broken())
    }

    /// XXH3-64 of `len` bytes at `offset`, with a seed; `None` if they are not all inside the region, or its file was
    /// shortened.
    #[must_use]
    pub fn checksum_at(&self, offset: u64, len: usize, seed: u64) -> Option<u64> {
        let mut rest = self.piece(offset, len)?;
        let mut scratch = [0; 4096];
        if len <= scratch.len() {
            rest.copy_to(&mut scratch);
            return Some(xxh3_64_with_seed(&scratch[..len], seed)).filter(|_| !self.is_broken());
        }
        let mut hash = Xxh3::with_seed(seed);
        while rest.len() > 0 {
            let copied = rest.copy_to(&mut scratch);
            hash.update(&scratch[..copied]);
            rest = rest.skip(copied);
        }
        Some(hash.digest()).filter(|_| !self.is_broken())
    }

    /// Whether the file behind the region was shortened, as far as anybody has noticed.
    fn is_broken(&self) -> bool {
        vmove_guard::is_broken(self.0.area.ptr.addr().get(), to_usize(self.len()))
    }

    fn piece(&self, offset: u64, len: usize) -> Option<Piece<'_>> {
        if offset.checked_add(len as u64)? > self.len() {
            return None;
        }
        let addr = self.0.area.ptr.as_ptr().expose_provenance() + to_usize(offset);
        // SAFETY: rule 1: this region is one of those over the area, and the range is inside it.
        Some(unsafe { Piece::new(addr, len) })
    }

    /// `len` bytes at `offset`, as the local end of a segment; `None` if that is not inside the region or empty.
    #[must_use]
    pub fn local(&self, offset: u64, len: u32) -> Option<LocalSlice> {
        let end = offset.checked_add(u64::from(len))?;
        if len == 0 || end > self.len() {
            return None;
        }
        let addr = self.0.area.ptr.as_ptr().expose_provenance() + to_usize(offset);
        Some(LocalSlice { addr, len, key: self.0.local_key })
    }
}

/// A piece of a [`Region`]. It does not keep the region alive: using it after the region's drop is refused.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LocalSlice {
    pub(crate) addr: usize,
    pub(crate) len: u32,
    pub(crate) key: u64,
}

impl LocalSlice {
    /// Length in bytes, at least 1.
    #[allow(clippy::len_without_is_empty)] // never empty
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }
}

impl std::fmt::Debug for LocalSlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalSlice")
            .field("addr", &format_args!("{:#x}", self.addr))
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nothing;
    impl Registration for Nothing {}

    /// As in `table/bounds_tests.rs`, for the local end.
    #[test]
    fn no_piece_reaches_beyond_its_region() {
        let mut bytes = vec![7_u8; 4096];
        for len in [1_usize, 2, 3, 4095, 4096] {
            let start = NonNull::from(&mut bytes[..len]).cast::<u8>();
            // SAFETY: rule 1: `bytes` outlives the region, and nothing else uses it.
            let area = unsafe { MemoryArea::new(start, len as u64) };
            let remote = RemoteRegion { addr: 0, len: len as u64, rkey: 1 };
            let region = Region::new(area, Access::LOCAL, remote, 1, false, Box::new(Nothing));
            let near = |edge: u64| (edge.saturating_sub(2)..=edge).chain(edge..edge.saturating_add(3));
            for offset in [0, len as u64, 1 << 32, u64::MAX].into_iter().flat_map(near) {
                for count in [0, 1, 2, 3, 4094, 4095, 4096, 4097] {
                    let fits = u128::from(offset) + u128::from(count) <= len as u128;
                    let local = region.local(offset, count);
                    assert_eq!(local.is_some(), fits && count > 0, "{count} at {offset} of {len}");
                    assert!(
                        local.is_none_or(|local| local.addr as u64 - start.addr().get() as u64 == offset)
                    );
                    let mut to = vec![0; count as usize];
                    assert_eq!(region.read_at(offset, &mut to), fits, "{count} at {offset} of {len}");
                    assert!(!fits || to.iter().all(|byte| *byte == 7));
                    assert_eq!(region.is_zero_at(offset, to.len()), fits.then_some(count == 0));
                    assert_eq!(region.checksum_at(offset, to.len(), 0).is_some(), fits);
                }
                let inside = offset < len as u64;
                assert_eq!(region.remote().at(offset).map(|at| at.addr), inside.then_some(offset));
            }
        }
    }
}
