//! A guest comes home from a visit: its memory of before is still here, and is its memory again.
//!
//! The file itself is used, not a copy: it gets a second name. QEMU writes to the RAM that it starts with before anybody can watch it (firmware
//! tables, say), and of a page that was overwritten so, nobody else may have the bytes. So QEMU starts with an empty stand-in, which is then
//! replaced by the file in QEMU itself.

use std::path::{Path, PathBuf};

use vmove_memory::RamFile;
use vmove_node::disk::Disk;

use super::error::VmFilesError;

/// The name of a file of kept memory until QEMU has it: beside the RAM file that it will be.
pub(super) fn beside(ram: &Path) -> PathBuf {
    let mut name = ram.as_os_str().to_owned();
    name.push(".home");
    name.into()
}

/// Gives kept memory its second name beside the RAM file that it will be, and opens it. It is QEMU's user's already.
pub(super) fn link(kept: &Path, ram: &Path) -> Result<RamFile, VmFilesError> {
    let beside = beside(ram);
    let failed = |source| VmFilesError::Kept { path: kept.to_owned(), source };
    std::fs::hard_link(kept, &beside).map_err(failed)?;
    Ok(RamFile::open(&beside)?)
}

/// QEMU has it: it is the RAM file now.
pub(super) fn settle(disk: &dyn Disk, ram: &[PathBuf]) -> std::io::Result<()> {
    ram.iter().try_for_each(|ram| disk.rename(&beside(ram), ram))
}
