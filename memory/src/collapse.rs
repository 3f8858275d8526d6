//! 4 KiB mappings of a 2 MiB folio turned into one 2 MiB mapping.

use crate::error::Result;
use crate::process::Process;
use crate::units::{ByteLen, Hva};

/// What a collapse did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collapsed {
    /// The range is mapped by huge pages now.
    Done,
    /// Not possible now; worth another try later.
    Busy,
    /// Not possible for this range.
    Unfit,
}

/// Maps a range of the process by 2 MiB pages (`MADV_COLLAPSE`).
///
/// # Errors
/// Not yet written.
pub fn collapse(_process: &Process, _hva: Hva, _len: ByteLen) -> Result<Collapsed> {
    todo!()
}

/// Bytes of the range that the process maps by huge pages.
///
/// # Errors
/// Not yet written.
pub fn huge_mapped(_process: &Process, _hva: Hva, _len: ByteLen) -> Result<ByteLen> {
    todo!()
}
