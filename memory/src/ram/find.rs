//! Where a process has RAM files mapped.

use serde::{Deserialize, Serialize};

use super::RamFile;
use crate::error::{MemoryError, Result};
use crate::maps::MapEntry;
use crate::process::Process;
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
    /// Which file: index in the slice given to [`find_mappings`].
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

/// Finds every mapping of `files` in the process, in address order.
///
/// Files are recognised by device and inode, so links and unlinked files are found too. A mapping that the kernel
/// shows in several pieces (because some have other flags) is given as one.
///
/// # Errors
/// [`MemoryError::NotMapped`] names the first file that is not mapped at all; errors of [`Process::maps`].
pub fn find_mappings(process: &Process, files: &[&RamFile]) -> Result<Vec<QemuMapping>> {
    let found = merge(&process.maps()?, files);
    for (index, file) in files.iter().enumerate() {
        if !found.iter().any(|mapping| mapping.file_index == index) {
            return Err(MemoryError::NotMapped { pid: process.pid(), path: file.path().to_owned() });
        }
    }
    Ok(found)
}

/// Whether the process sees all of these files through shared mappings. Not so of the parent and the children of a fork:
/// what they have written is in none of the files.
///
/// # Errors
/// Those of [`Process::maps`].
pub fn is_shared_whole(process: &Process, files: &[&RamFile]) -> Result<bool> {
    let found = merge(&process.maps()?, files);
    Ok(files.iter().enumerate().all(|(index, file)| {
        let of_file = || found.iter().filter(move |mapping| mapping.file_index == index);
        of_file().all(|mapping| mapping.shared) && of_file().map(|m| m.len.0).sum::<u64>() >= file.len().0
    }))
}

fn merge(maps: &[MapEntry], files: &[&RamFile]) -> Vec<QemuMapping> {
    let mut found: Vec<QemuMapping> = Vec::new();
    for entry in maps {
        let Some(file_index) = files.iter().position(|f| f.identity() == (entry.dev, entry.inode)) else {
            continue;
        };
        let next = QemuMapping {
            hva: entry.hva,
            len: entry.len,
            file_offset: entry.file_offset,
            file_index,
            page_size: files[file_index].page_size(),
            shared: entry.shared,
        };
        match found.last_mut() {
            Some(last)
                if last.end() == next.hva
                    && last.file_index == next.file_index
                    && last.file_range().end() == next.file_offset
                    && last.shared == next.shared =>
            {
                last.len.0 += next.len.0;
            }
            _ => found.push(next),
        }
    }
    found
}

#[cfg(test)]
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

    #[test]
    fn split_mappings_are_merged_and_others_are_not() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        for path in [&a, &b] {
            std::fs::write(path, vec![0; 0x4000]).expect("write");
        }
        let (a, b) = (RamFile::open(&a).expect("a"), RamFile::open(&b).expect("b"));
        let line = |file: &RamFile, hva, offset, shared| MapEntry {
            hva: Hva(hva),
            len: ByteLen(0x1000),
            readable: true,
            writable: true,
            executable: false,
            shared,
            file_offset: FileOffset(offset),
            dev: file.identity().0,
            inode: file.identity().1,
            path: file.path().to_owned(),
        };
        let maps = [
            line(&a, 0x1_0000, 0, true),
            line(&a, 0x1_1000, 0x1000, true),  // continues
            line(&b, 0x1_2000, 0x2000, true),  // other file
            line(&a, 0x2_0000, 0x2000, true),  // elsewhere
            line(&a, 0x2_1000, 0x3000, false), // private
        ];
        let found = merge(&maps, &[&a, &b]);
        let brief: Vec<_> = found.iter().map(|m| (m.hva.0, m.len.0, m.file_index, m.shared)).collect();
        assert_eq!(
            brief,
            [
                (0x1_0000, 0x2000, 0, true),
                (0x1_2000, 0x1000, 1, true),
                (0x2_0000, 0x1000, 0, true),
                (0x2_1000, 0x1000, 0, false)
            ]
        );
    }
}
