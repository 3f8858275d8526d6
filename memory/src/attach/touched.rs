//! Which pages a process has touched.

use crate::error::Result;
use crate::pagemap::Pagemap;
use crate::process::Process;
use crate::ram::QemuMapping;
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
