//! The file systems of guest memory, which a test must not leave behind.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Unmounts what is mounted below a folder when it is dropped.
pub struct Mounts(pub PathBuf);

impl Drop for Mounts {
    fn drop(&mut self) {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let places = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        for place in places.filter(|place| Path::new(place).starts_with(&self.0)) {
            // Lazily: a QEMU that has just been killed may still have its memory mapped.
            let _ = Command::new("umount").args(["--lazy", place]).stderr(Stdio::null()).status();
        }
    }
}
