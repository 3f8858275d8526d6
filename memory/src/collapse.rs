//! Many 4 KiB mappings of a 2 MiB folio turned into one 2 MiB mapping, in place.
//!
//! A guest on thp memory faults its pages in one by one, each by a page-table entry of its own. When all 512 of a 2 MiB
//! stretch have landed, one request gives it the one large entry it would have had without us.
//!
//! **Only when all have landed**: a collapse maps the whole 2 MiB, userfaultfd or not.

use crate::error::{MemoryError, Result};
use crate::pagemap::Pagemap;
use crate::process::Process;
use crate::sys::process_madvise;
use crate::units::{ByteLen, Hva};

const MADV_COLLAPSE: i32 = 25;

/// What a collapse did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collapsed {
    /// All of the range is mapped by huge pages now.
    Done,
    /// Not possible now (pages are in use, or memory is short); worth another try later.
    Busy,
    /// Not possible for this range or on this kernel (before 6.1).
    Unfit,
}

/// Maps a range of the process by 2 MiB pages. `hva` and `len` should be multiples of 2 MiB.
///
/// Stops nobody; takes about 10 us for a 2 MiB folio that only has to be remapped, and longer if the memory has to be
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

/// Bytes of the range that the process maps by huge pages (2 MiB or 1 GiB).
///
/// # Errors
/// [`MemoryError::ProcessGone`]; [`MemoryError::Proc`] on kernels before 6.7.
pub fn huge_mapped(process: &Process, hva: Hva, len: ByteLen) -> Result<ByteLen> {
    Pagemap::open(process)?.huge(hva, len)
}
