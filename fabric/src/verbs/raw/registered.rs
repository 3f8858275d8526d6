//! Registered memory.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{ibv_access_flags, ibv_mr};

use super::device::Domain;
use super::extended::bring_in;
use super::library::library;
use crate::region::{Access, MemoryArea};
use crate::sys::memory::to_usize;

/// How the device finds the pages of a memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::verbs) enum Held {
    /// They are pinned: the pages that were there when it was registered.
    Pinned,
    /// The device requests pages from the kernel, which notifies it when a page goes away.
    OnDemand,
}

/// A memory region that the device knows.
#[derive(Debug)]
pub(in crate::verbs) struct Mr {
    mr: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    /// Destroyed after the region.
    _domain: Arc<Domain>,
}

// SAFETY: rule 2.
unsafe impl Send for Mr {}
// SAFETY: rule 2.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers memory. Where it cannot be written (a read-only mapping), it is registered for reading only.
    pub(in crate::verbs) fn register(
        domain: &Arc<Domain>,
        area: MemoryArea,
        access: Access,
        held: Held,
    ) -> io::Result<Self> {
        let mut flags = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        if held == Held::OnDemand {
            flags |= ibv_access_flags::IBV_ACCESS_ON_DEMAND.0;
        }
        if access.remote_read {
            flags |= ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        }
        if access.remote_write {
            flags |= ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        }
        let read_only = flags & !ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        let made = match Self::with_flags(domain, area, flags) {
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) && !access.remote_write => {
                Self::with_flags(domain, area, read_only)
            }
            result => result,
        }?;
        if held == Held::OnDemand && access.remote_read {
            bring_in(domain, area.ptr().as_ptr().expose_provenance() as u64, area.len(), made.lkey);
        }
        Ok(made)
    }

    fn with_flags(domain: &Arc<Domain>, area: MemoryArea, flags: u32) -> io::Result<Self> {
        let flags = i32::try_from(flags).map_err(io::Error::other)?;
        let start = area.ptr().as_ptr().cast();
        // SAFETY: rules 1 and 4.
        let mr = unsafe { (library().reg_mr)(domain.as_ptr(), start, to_usize(area.len()), flags) };
        let mr = NonNull::new(mr).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: rule 1: the library filled in the keys and does not change them.
        let lkey = unsafe { (*mr.as_ptr()).lkey };
        // SAFETY: as above.
        let rkey = unsafe { (*mr.as_ptr()).rkey };
        Ok(Self { mr, lkey, rkey, _domain: Arc::clone(domain) })
    }

    pub(in crate::verbs) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(in crate::verbs) fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: rule 1. Returns when the device does not touch the memory any more.
        let result = unsafe { (library().dereg_mr)(self.mr.as_ptr()) };
        if result != 0 {
            let error = io::Error::from_raw_os_error(result);
            tracing::error!(%error, "could not deregister memory; it stays pinned until this process ends");
        }
    }
}
