//! How far memory has been moved: what is mapped where it lies.

use crate::attach::{Injector, unmap};
use crate::error::{MemoryError, Result};
use crate::maps::MapEntry;
use crate::process::Process;
use crate::qemu_mapping::QemuMapping;
use crate::ram::RamFile;
use crate::units::{ByteLen, ByteRange, FileOffset, Hva};

/// What of a process's memory is still private.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What is still private, in address order.
    pub private: Vec<QemuMapping>,
    /// Mappings elsewhere, of the files or of what is still mapped privately: an attempt that was cut off has left them.
    pub strays: Vec<(Hva, ByteLen)>,
}

impl Standing {
    /// Looks at a process whose memory was mapped privately at `mappings`, and is to be moved to `files` (in the order of `file_index`).
    ///
    /// To count what is mapped shared would not do: a piece that was made aside may be as long as the one that is still private.
    ///
    /// # Errors
    /// [`MemoryError::NotMapped`] if something else, or nothing, is mapped there; those of [`Process::maps`].
    pub fn read(process: &Process, mappings: &[QemuMapping], files: &[RamFile]) -> Result<Self> {
        let maps = process.maps()?;
        let mut standing = Self::default();
        for mapping in mappings {
            let file = &files[mapping.file_index];
            let covered = private_in(&maps, mapping, file.identity(), &mut standing.private);
            if covered < mapping.len {
                return Err(MemoryError::NotMapped { pid: process.pid(), path: file.path().to_owned() });
            }
        }
        let mut of: Vec<(u64, u64)> = files.iter().map(RamFile::identity).collect();
        of.extend(maps.iter().filter(|e| e.inode != 0 && lies_in(e, mappings)).map(|e| (e.dev, e.inode)));
        standing.strays = strays_in(&maps, &of, mappings);
        Ok(standing)
    }

    /// Nothing is private any more.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.private.is_empty()
    }

    /// The parts of file `index` that the process shares already.
    #[must_use]
    pub fn shared_ranges(&self, index: usize, mappings: &[QemuMapping]) -> Vec<ByteRange> {
        let mut shared = Vec::new();
        for mapping in mappings.iter().filter(|m| m.file_index == index) {
            let mut at = mapping.file_range().start.0;
            let inside = |part: &&QemuMapping| mapping.hva <= part.hva && part.hva < mapping.end();
            for part in self.private.iter().filter(inside) {
                let start = part.file_offset.0;
                if start > at {
                    shared.push(ByteRange::new(FileOffset(at), ByteLen(start - at)));
                }
                at = part.file_range().end().0;
            }
            let end = mapping.file_range().end().0;
            if end > at {
                shared.push(ByteRange::new(FileOffset(at), ByteLen(end - at)));
            }
        }
        shared
    }
}

fn lies_in(entry: &MapEntry, mappings: &[QemuMapping]) -> bool {
    mappings.iter().any(|m| m.hva < Hva(entry.hva.0 + entry.len.0) && entry.hva < m.end())
}

/// Where files (by device and inode) are mapped besides `mappings`.
pub(crate) fn strays_in(
    maps: &[MapEntry],
    files: &[(u64, u64)],
    mappings: &[QemuMapping],
) -> Vec<(Hva, ByteLen)> {
    let of_files = |e: &&MapEntry| files.contains(&(e.dev, e.inode));
    maps.iter().filter(of_files).filter(|e| !lies_in(e, mappings)).map(|e| (e.hva, e.len)).collect()
}

/// Takes away where files (by device and inode) are mapped besides `mappings`: what was mapped aside and not moved into its place, since
/// whoever did it died in between. It would keep the file's memory, and huge pages reserved for it, as long as the process lives.
///
/// # Errors
/// Those of [`Process::maps`] and [`Injector::attach`]; [`MemoryError::Remote`].
pub fn unmap_strays(process: &Process, files: &[(u64, u64)], mappings: &[QemuMapping]) -> Result<()> {
    unmap_all(process, &strays_in(&process.maps()?, files, mappings))
}

pub(super) fn unmap_all(process: &Process, strays: &[(Hva, ByteLen)]) -> Result<()> {
    if strays.is_empty() {
        return Ok(());
    }
    let mut injector = Injector::attach(process)?;
    let done = strays.iter().try_for_each(|(hva, len)| unmap(&mut injector, hva.0, *len));
    injector.release()?;
    done
}

/// Adds what is private of a mapping. Returns how much of it is mapped as it should be.
fn private_in(
    maps: &[MapEntry],
    mapping: &QemuMapping,
    home: (u64, u64),
    private: &mut Vec<QemuMapping>,
) -> ByteLen {
    let mut covered = ByteLen(0);
    for entry in maps {
        let start = entry.hva.max(mapping.hva);
        let end = (entry.hva.0 + entry.len.0).min(mapping.end().0);
        if start.0 >= end {
            continue;
        }
        let part = QemuMapping {
            hva: start,
            len: ByteLen(end - start.0),
            file_offset: FileOffset(mapping.file_offset.0 + (start.0 - mapping.hva.0)),
            shared: false,
            ..*mapping
        };
        let shows = entry.file_offset.0 + (start.0 - entry.hva.0) == part.file_offset.0;
        match (entry.shared, (entry.dev, entry.inode) == home) {
            (true, true) if shows => {}
            (false, _) if shows => match private.last_mut() {
                Some(last) if last.end() == part.hva && last.file_index == part.file_index => {
                    last.len.0 += part.len.0;
                }
                _ => private.push(part),
            },
            _ => continue,
        }
        covered.0 += part.len.0;
    }
    covered
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::units::PageSize;

    const HOME: (u64, u64) = (1, 7);

    fn entry(hva: u64, len: u64, shared: bool, offset: u64, inode: u64) -> MapEntry {
        MapEntry {
            hva: Hva(hva),
            len: ByteLen(len),
            readable: true,
            writable: true,
            executable: false,
            shared,
            file_offset: FileOffset(offset),
            dev: 1,
            inode,
            path: "/ram".into(),
        }
    }

    fn mapping() -> QemuMapping {
        QemuMapping {
            hva: Hva(0x10_0000),
            len: ByteLen(0x5000),
            file_offset: FileOffset(0x1000),
            file_index: 0,
            page_size: PageSize::Base4K,
            shared: false,
        }
    }

    #[test]
    fn moved_parts_and_private_ones_are_told_apart() {
        let maps = [
            entry(0x10_0000, 0x1000, true, 0x1000, 7),
            entry(0x10_1000, 0x1000, false, 0x2000, 9),
            entry(0x10_2000, 0x1000, false, 0x3000, 9),
            entry(0x10_3000, 0x1000, true, 0x4000, 7),
            // Longer than the mapping that is looked for.
            entry(0x10_4000, 0x9000, false, 0x5000, 9),
        ];
        let mut private = Vec::new();
        assert_eq!(private_in(&maps, &mapping(), HOME, &mut private), ByteLen(0x5000));
        let found: Vec<_> = private.iter().map(|p| (p.hva.0, p.len.0, p.file_offset.0)).collect();
        assert_eq!(found, [(0x10_1000, 0x2000, 0x2000), (0x10_4000, 0x1000, 0x5000)]);
        let standing = Standing { private, strays: Vec::new() };
        let shared = standing.shared_ranges(0, &[mapping()]);
        let shared: Vec<_> = shared.iter().map(|r| (r.start.0, r.len.0)).collect();
        assert_eq!(shared, [(0x1000, 0x1000), (0x4000, 0x1000)]);
    }

    #[test]
    fn what_is_mapped_otherwise_is_not_taken_for_either() {
        let wrong = [
            // Another part of the file; another file, shared; nothing.
            vec![entry(0x10_0000, 0x5000, true, 0, 7)],
            vec![entry(0x10_0000, 0x5000, true, 0x1000, 8)],
            vec![entry(0x10_0000, 0x4000, true, 0x1000, 7)],
        ];
        for maps in wrong {
            assert!(private_in(&maps, &mapping(), HOME, &mut Vec::new()) < mapping().len, "{maps:?}");
        }
    }
}
