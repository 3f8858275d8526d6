//! A child's memory compared with the template, byte for byte, before the child runs.
//!
//! What QEMU and KVM write there while they load the device state is told apart from damage: see `verify/written.rs`.

mod written;

use std::fs::File;
use std::os::unix::fs::FileExt;

use uuid::Uuid;
use vmove_memory::{ByteRange, PageSize, Process, QemuMapping, RamFile, touched_in_qemu};
use vmove_types::fork_report::LoadWrite;

use self::written::{Write, Writers};
use crate::CloneError;

/// Bytes compared at once.
const PART: u64 = 1 << 20;
const PAGE: usize = 4096;

/// What is compared.
#[derive(Debug)]
pub struct Comparison<'a> {
    /// Name of the child, for messages.
    pub child: &'a str,
    /// Its QEMU.
    pub process: &'a Process,
    /// Where guest RAM is mapped there.
    pub mappings: &'a [QemuMapping],
    /// The template's files, in the order of `file_index`.
    pub files: &'a [RamFile],
    /// The child's VM Generation ID, which QEMU has written into its memory by now.
    pub generation: &'a str,
}

impl Comparison<'_> {
    /// Compares everything. Returns what was written while the device state was loaded: nothing else differs.
    ///
    /// # Errors
    /// [`CloneError::Differs`] with the first other difference.
    pub fn run(&self) -> Result<Vec<LoadWrite>, CloneError> {
        let path = format!("/proc/{}/mem", self.process.pid());
        let memory = File::open(&path).map_err(CloneError::io("read", path.as_ref()))?;
        let generation = Uuid::parse_str(self.generation).ok().map(|id| id.to_bytes_le());
        let by = Writers { generation, kvm: has_kvm(self.process) };
        let mut written = Vec::new();
        for mapping in self.mappings {
            let file = &self.files[mapping.file_index];
            let template = File::open(file.path()).map_err(CloneError::io("read", file.path()))?;
            let mut found = Found::default();
            for range in self.ranges(mapping, file)? {
                for at in range.as_range().step_by(usize::try_from(PART).unwrap_or(1)) {
                    let len = usize::try_from(PART.min(range.end().0 - at)).unwrap_or(0);
                    let hva = mapping.hva.0 + (at - mapping.file_offset.0);
                    let (mut a, mut b) = (vec![0; len], vec![0; len]);
                    memory
                        .read_exact_at(&mut a, hva)
                        .map_err(CloneError::io("read memory of", path.as_ref()))?;
                    template.read_exact_at(&mut b, at).map_err(CloneError::io("read", file.path()))?;
                    found.compare(at, &a, &b, by);
                }
            }
            if let Some(first) = found.first {
                let (child, file) = (self.child.to_owned(), file.path().display().to_string());
                return Err(CloneError::Differs { child, file, pages: found.pages, first });
            }
            let block = mapping.file_index;
            let write = |w: &Write| LoadWrite { what: w.what, block, offset: w.at, bytes: w.bytes };
            written.extend(found.written.iter().map(write));
        }
        Ok(written)
    }

    /// What has memory on either side. Everywhere else both are holes, and looking at them would fill them.
    fn ranges(&self, mapping: &QemuMapping, file: &RamFile) -> Result<Vec<ByteRange>, CloneError> {
        let mut ranges: Vec<ByteRange> =
            file.data_extents()?.into_iter().filter_map(|r| r.intersection(mapping.file_range())).collect();
        touched_in_qemu(self.process, std::slice::from_ref(mapping), |_, run| {
            ranges.push(mapping.page_size.range_of(run));
        })?;
        Ok(merged(ranges))
    }
}

/// Ranges of whole pages in order, none of them overlapping.
pub(crate) fn merged(mut ranges: Vec<ByteRange>) -> Vec<ByteRange> {
    ranges.sort_by_key(|r| r.start);
    let mut out: Vec<ByteRange> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end() => {
                let end = range.end().max(last.end());
                last.len.0 = end.0 - last.start.0;
            }
            _ => out.push(range),
        }
    }
    out
}

/// Whether the guest of this QEMU runs under KVM: it has a virtual machine open there.
fn has_kvm(process: &Process) -> bool {
    let open = std::fs::read_dir(format!("/proc/{}/fd", process.pid())).into_iter().flatten().flatten();
    let mut targets = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.any(|target| target.as_os_str() == "anon_inode:kvm-vm")
}

#[derive(Debug, Default)]
struct Found {
    /// Pages with a difference that is not known.
    pages: u64,
    first: Option<u64>,
    written: Vec<Write>,
}

impl Found {
    fn compare(&mut self, at: u64, child: &[u8], template: &[u8], by: Writers) {
        if child == template {
            return;
        }
        let pages = child.chunks(PAGE).zip(template.chunks(PAGE));
        for (number, (a, b)) in pages.enumerate().filter(|(_, (a, b))| a != b) {
            let page = at + (number * PAGE) as u64;
            match written::between(a, b, by) {
                Ok(writes) => self.written.extend(writes.into_iter().map(|w| Write { at: page + w.at, ..w })),
                Err(byte) => {
                    self.pages += 1;
                    self.first.get_or_insert(page + byte as u64);
                }
            }
        }
    }
}

/// Size of a page for which [`merged`] need not round.
const _: () = assert!(PageSize::Base4K.bytes() == PAGE as u64);

#[cfg(test)]
mod tests {
    use vmove_memory::{ByteLen, FileOffset};
    use vmove_types::fork_report::LoadWriteKind;

    use super::*;

    #[test]
    fn unknown_differences_are_counted_and_the_first_is_told() {
        let by = Writers { generation: Some([7; 16]), kvm: true };
        let template = vec![1; 2 * PAGE];
        let mut child = template.clone();
        child[PAGE + 40..PAGE + 56].copy_from_slice(&[7; 16]);
        let mut found = Found::default();
        found.compare(1 << 20, &child, &template, by);
        assert_eq!((found.pages, found.first), (0, None));
        let at = (1 << 20) + PAGE as u64 + 40;
        assert_eq!(found.written, [Write { what: LoadWriteKind::GenerationId, at, bytes: 16 }]);
        child[PAGE + 100] = 2;
        child[3] = 9;
        found.compare(1 << 20, &child, &template, by);
        assert_eq!((found.pages, found.first), (2, Some((1 << 20) + 3)));
    }

    #[test]
    fn ranges_that_touch_become_one() {
        let range = |start, len| ByteRange::new(FileOffset(start), ByteLen(len));
        let found = merged(vec![range(8192, 4096), range(0, 4096), range(4096, 4096), range(20480, 4096)]);
        assert_eq!(found, [range(0, 12288), range(20480, 4096)]);
    }
}
