//! Where a process has RAM files mapped.

use super::file::RamFile;
use crate::error::{MemoryError, Result};
use crate::maps::MapEntry;
use crate::process::Process;
use crate::qemu_mapping::QemuMapping;

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
    use crate::units::{ByteLen, FileOffset, Hva};

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
