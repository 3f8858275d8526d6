//! A stretch of a RAM file in the address space of a QEMU.

use serde::{Deserialize, Serialize};

use crate::units::{ByteLen, ByteRange, FileOffset, Hva, PageSize};

/// One stretch of a RAM file in the address space of a QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuMapping {
    /// First address, in QEMU.
    pub hva: Hva,
    /// Bytes.
    pub len: ByteLen,
    /// Where in the file it begins.
    pub file_offset: FileOffset,
    /// Which file: index in the slice given to [`find_mappings`](crate::find_mappings).
    pub file_index: usize,
    /// Granularity of faults.
    pub page_size: PageSize,
    /// True for `MAP_SHARED`: QEMU sees what we write to the file. False in a forked child or its parent.
    pub shared: bool,
}

impl QemuMapping {
    /// First address after it.
    #[must_use]
    pub const fn end(&self) -> Hva {
        Hva(self.hva.0 + self.len.0)
    }

    /// The part of the file that it shows.
    #[must_use]
    pub const fn file_range(&self) -> ByteRange {
        ByteRange { start: self.file_offset, len: self.len }
    }

    /// True if 2 MiB of the file that begin at a multiple of 2 MiB do so in QEMU too: only then can they be mapped by one
    /// page. QEMU gives a `memory-backend-file` on tmpfs any address, unless told `align=2M`.
    #[must_use]
    pub const fn fits_huge_pages(&self) -> bool {
        self.hva.0 % PageSize::Huge2M.bytes() == self.file_offset.0 % PageSize::Huge2M.bytes()
    }

    /// Offset in the file of the byte at `hva`, `None` if that is elsewhere.
    #[must_use]
    pub fn to_file(&self, hva: Hva) -> Option<FileOffset> {
        (self.hva <= hva && hva < self.end()).then(|| FileOffset(self.file_offset.0 + (hva.0 - self.hva.0)))
    }

    /// Address in QEMU of the byte at `offset` of the file, `None` if it is not shown here.
    #[must_use]
    pub fn to_hva(&self, offset: FileOffset) -> Option<Hva> {
        let range = self.file_range();
        (range.start <= offset && offset < range.end())
            .then(|| Hva(self.hva.0 + (offset.0 - self.file_offset.0)))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn mapping() -> QemuMapping {
        QemuMapping {
            hva: Hva(0x7000_0000),
            len: ByteLen(0x3000),
            file_offset: FileOffset(0x1000),
            file_index: 0,
            page_size: PageSize::Base4K,
            shared: true,
        }
    }

    #[test]
    fn addresses_translate_both_ways() {
        let m = mapping();
        assert_eq!(m.to_file(Hva(0x7000_0000)), Some(FileOffset(0x1000)));
        assert_eq!(m.to_file(Hva(0x7000_2fff)), Some(FileOffset(0x3fff)));
        assert_eq!(m.to_file(Hva(0x7000_3000)), None);
        assert_eq!(m.to_hva(FileOffset(0x1000)), Some(Hva(0x7000_0000)));
        assert_eq!(m.to_hva(FileOffset(0xfff)), None);
        assert_eq!(m.to_hva(FileOffset(0x4000)), None);
    }

    #[test]
    fn huge_pages_need_aligned_mappings() {
        let mut m = mapping();
        assert!(!m.fits_huge_pages());
        m.hva.0 += 0x1000;
        assert!(m.fits_huge_pages());
    }
}
