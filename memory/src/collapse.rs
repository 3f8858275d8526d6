//! Many 4 KiB mappings of a 2 MiB folio turned into one 2 MiB mapping, in place.
//!
//! A guest on thp memory faults its pages in one by one, each by a page-table entry of its own. When all 512 of a 2 MiB
//! stretch have landed, one request gives it the one large entry it would have had without us.
//!
//! What the kernel does for memory registered with a userfaultfd (measured on Linux 6.18):
//!
//! - A collapse maps the whole 2 MiB, **also pages that were never CONTINUEd**. So collapse only what has landed to the
//!   last page. Then it is also the fastest way to map it: 3 us where nothing of it was mapped, 18 us where all was,
//!   against 110 us for CONTINUE of 512 pages.
//! - It wakes nobody. Threads that wait in the range are to be woken afterwards
//!   ([`FaultContext::wake`](crate::FaultContext::wake)); a CONTINUE of their page does it too.
//! - While [`DirtyTracker`](crate::DirtyTracker) watches the range, the kernel refuses.

use crate::error::{MemoryError, Result};
use crate::pagemap::Pagemap;
use crate::process::Process;
use crate::sys::process_madvise;
use crate::uffd::FaultContext;
use crate::units::{ByteLen, Hva, PageSize};

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

const MADV_COLLAPSE: i32 = 25;

/// What a collapse did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collapsed {
    /// All of the range is mapped by huge pages now.
    Done,
    /// Not possible now (pages are in use, or memory is short); worth another try later.
    Busy,
    /// Not possible for this range or on this kernel (before 6.1). For a QEMU whose mapping does not
    /// [fit](crate::QemuMapping::fits_huge_pages), never.
    Unfit,
}

/// Maps a range of the process by 2 MiB pages. `hva` and `len` should be multiples of 2 MiB.
///
/// Stops nobody; takes 3 to 20 us for a 2 MiB folio that only has to be remapped, and longer if the memory has to be
/// gathered into one first.
///
/// # Errors
/// [`MemoryError::ProcessGone`]; [`MemoryError::System`] with `EPERM` without `CAP_SYS_NICE` for another user's process.
pub fn collapse(process: &Process, hva: Hva, len: ByteLen) -> Result<Collapsed> {
    match process_madvise(process.pidfd(), hva, len, MADV_COLLAPSE) {
        Ok(advised) if advised == len.0 => Ok(Collapsed::Done),
        Ok(_) => Ok(Collapsed::Busy),
        Err(source) => match source.raw_os_error() {
            Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => Ok(Collapsed::Busy),
            Some(libc::EINVAL) => Ok(Collapsed::Unfit),
            Some(libc::ESRCH) => Err(MemoryError::ProcessGone { pid: process.pid() }),
            _ => Err(MemoryError::system("MADV_COLLAPSE", source)),
        },
    }
}

/// Maps 2 MiB of which every page has landed (or was mapped before), by one huge page, and wakes whoever waits there.
/// The fastest way to map them; where it does not succeed, use
/// [`FaultContext::continue_range`](crate::FaultContext::continue_range).
///
/// # Errors
/// Those of [`collapse`] and of [`FaultContext::wake`](crate::FaultContext::wake).
pub fn map_folio(process: &Process, context: &FaultContext, hva: Hva) -> Result<Collapsed> {
    let len = ByteLen(PageSize::Huge2M.bytes());
    let collapsed = collapse(process, hva, len)?;
    if collapsed == Collapsed::Done {
        context.wake(hva, len)?;
    }
    Ok(collapsed)
}

/// Bytes of the range that the process maps by huge pages (2 MiB or 1 GiB).
///
/// # Errors
/// [`MemoryError::ProcessGone`]; [`MemoryError::Proc`] on kernels before 6.7.
pub fn huge_mapped(process: &Process, hva: Hva, len: ByteLen) -> Result<ByteLen> {
    let mut huge = ByteLen(0);
    Pagemap::open(process)?.huge(hva, len, |_, len| huge.0 += len.0)?;
    Ok(huge)
}
