//! A guest's RAM file, filled from the template that its private memory lies over. The template never changes.

use std::sync::Arc;

use vmove_memory::{
    ByteLen, ByteRange, FileOffset, Mapping, MemoryError, OwnFile, PageSize, Process, RamFile, Standing,
};

use crate::CloneError;

/// Bytes looked at, and copied, at once: a huge page.
const PART: u64 = 2 << 20;

/// A file of the template, as the guest's QEMU has it mapped. It may have lost its name.
#[derive(Debug)]
pub(super) struct Frozen(RamFile);

/// The template's files, for each part that is private; `None` where this process may not open what another has mapped.
pub(super) fn frozen(process: &Process, standing: &Standing) -> Result<Vec<Option<Frozen>>, CloneError> {
    let maps = process.maps()?;
    let open = |part: &vmove_memory::QemuMapping| {
        let covers = |e: &&vmove_memory::MapEntry| e.hva <= part.hva && part.hva.0 < e.hva.0 + e.len.0;
        let entry = maps.iter().find(covers)?;
        let end = entry.hva.0 + entry.len.0;
        let path = format!("/proc/{}/map_files/{:x}-{end:x}", process.pid(), entry.hva.0);
        RamFile::open(path.as_ref()).ok().map(Frozen)
    };
    Ok(standing.private.iter().map(open).collect())
}

/// Memory that the files will take beside what they have.
pub(super) fn needed(standing: &Standing, frozen: &[Option<Frozen>]) -> Result<u64, CloneError> {
    let mut needed = 0;
    for (part, frozen) in standing.private.iter().zip(frozen) {
        needed += match frozen {
            // All of it must be there: to touch a huge page that is not kills.
            Some(Frozen(file)) if part.page_size == PageSize::Base4K => {
                file.allocated_bytes()?.0.min(part.len.0)
            }
            _ => part.len.0,
        };
    }
    Ok(needed)
}

/// Copies all that the template has where memory is still private. Returns how many bytes. `reached` is told how many bytes of that
/// memory are done, those that needed no copy among them.
pub(super) fn fill(
    standing: &Standing,
    frozen: &[Option<Frozen>],
    own: &[OwnFile],
    reached: &dyn Fn(u64),
) -> Result<u64, CloneError> {
    let (mut copied, mut before) = (0, 0);
    for part in &standing.private {
        // What an attempt that was cut off has left.
        own[part.file_index].file.punch(part.file_range())?;
    }
    for part in standing.private.iter().filter(|part| part.page_size != PageSize::Base4K) {
        give_huge_pages(&own[part.file_index].file, standing, part.file_range())?;
    }
    for (part, frozen) in standing.private.iter().zip(frozen) {
        if let Some(Frozen(file)) = frozen {
            let (source, target) = (file.map()?, &own[part.file_index].mapping);
            for extent in file.data_extents()? {
                let Some(range) = extent.intersection(part.file_range()) else { continue };
                let done = before + (range.start.0 - part.file_offset.0);
                copied += copy(&source, target, range, &|bytes| reached(done + bytes))?;
            }
        }
        before += part.len.0;
        reached(before);
    }
    Ok(copied)
}

/// Zeros go nowhere. `reached` is told how many bytes of the range are done.
fn copy(
    source: &Arc<Mapping>,
    target: &Arc<Mapping>,
    range: ByteRange,
    reached: &dyn Fn(u64),
) -> Result<u64, CloneError> {
    let (mut copied, mut at) = (0, range.start.0);
    while at < range.end().0 {
        let len = (PART - at % PART).min(range.end().0 - at);
        let part = ByteRange::new(FileOffset(at), ByteLen(len));
        if !source.is_zero_range(part)? {
            target.populate(target.page_size().run_of(part))?;
            target.copy_from(source, part)?;
            copied += len;
        }
        at += len;
        reached(at - range.start.0);
    }
    Ok(copied)
}

fn give_huge_pages(file: &RamFile, standing: &Standing, range: ByteRange) -> Result<(), CloneError> {
    let Err(error) = file.allocate(range) else { return Ok(()) };
    for part in &standing.private {
        // Of this file; another one is punched again when it is filled.
        let _ = file.punch(part.file_range());
    }
    let (mib, page) = (range.len.0 >> 20, file.page_size().bytes() >> 20);
    let full = matches!(&error, MemoryError::Path { source, .. } if source.kind() == std::io::ErrorKind::StorageFull);
    if !full {
        return Err(error.into());
    }
    Err(CloneError::NoRoom(format!(
        "memory of its own needs {mib} MiB of free huge pages of {page} MiB, found less: reserve more with vm.nr_hugepages"
    )))
}
