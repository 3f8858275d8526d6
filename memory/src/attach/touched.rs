//! Which pages a process has touched.

use crate::error::Result;
use crate::pagemap::Pagemap;
use crate::process::Process;
use crate::qemu_mapping::QemuMapping;
use crate::units::{ByteLen, ByteRange, Hva, PageRun};

/// Tells of every page of the mappings that the process maps: it may have read or written it. With huge pages that is more than it
/// touched, never less. `tell` gets the file's index and a run of its pages.
///
/// Between registering a destination's memory and [`discard_in_qemu`](super::discard_in_qemu) this names the pages whose bytes its
/// QEMU may have changed while they were landing.
///
/// # Errors
/// Those of reading `/proc/PID/pagemap`.
pub fn touched_in_qemu(
    process: &Process,
    mappings: &[QemuMapping],
    mut tell: impl FnMut(usize, PageRun),
) -> Result<()> {
    let mut pagemap = Pagemap::open(process)?;
    for mapping in mappings {
        pagemap.each_present(mapping.hva, mapping.len, |hva: Hva, len: ByteLen| {
            if let Some(start) = mapping.to_file(hva) {
                tell(mapping.file_index, mapping.page_size.run_of(ByteRange::new(start, len)));
            }
        })?;
    }
    Ok(())
}

/// Tells of what the process has written in private mappings since they were made: the kernel keeps it apart from the file, which
/// still has what was there before. `tell` gets the file's index and a range of it. Kernels before 6.7 tell of nothing.
///
/// # Errors
/// Those of reading `/proc/PID/pagemap`.
pub fn own_pages_in_qemu(
    process: &Process,
    mappings: &[QemuMapping],
    mut tell: impl FnMut(usize, ByteRange),
) -> Result<()> {
    let mut pagemap = Pagemap::open(process)?;
    if !pagemap.can_scan() {
        return Ok(());
    }
    for mapping in mappings {
        pagemap.own(mapping.hva, mapping.len, |hva: Hva, len: ByteLen| {
            if let Some(start) = mapping.to_file(hva) {
                tell(mapping.file_index, ByteRange::new(start, len));
            }
        })?;
    }
    Ok(())
}
