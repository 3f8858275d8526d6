//! The machine's pool of huge pages of 2 MiB, and somebody who takes all of it.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::posix_fallocate;

use crate::sandbox::Sandbox;

const PAGE: u64 = 2 << 20;

/// Huge pages that are neither used nor promised.
#[must_use]
pub fn free_huge_pages() -> u64 {
    let read = |name: &str| -> u64 {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    };
    read("free_hugepages").saturating_sub(read("resv_hugepages"))
}

/// Has huge pages that nobody else has, until this is dropped.
#[derive(Debug)]
pub struct Hog(PathBuf);

impl Hog {
    /// Takes all but `left` bytes of those that are free. The sandbox's huge pages were reserved alone.
    ///
    /// # Errors
    /// When they cannot be had.
    pub fn all_but(sandbox: &Sandbox, left: u64) -> Result<Self> {
        let path = sandbox.mount_hugetlb("hog", 0)?.join("file");
        let hog = Self(path);
        let file = File::create(&hog.0)?;
        // One by one: others take some meanwhile.
        for number in 0.. {
            if free_huge_pages() * PAGE <= left {
                break;
            }
            match posix_fallocate(&file, number * PAGE.cast_signed(), PAGE.cast_signed()) {
                Err(Errno::ENOSPC) => break,
                taken => taken.context("huge pages cannot be taken")?,
            }
        }
        Ok(hog)
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        // Its mount goes with the sandbox.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A QEMU that waits, if it is to take device state in (at a destination, or as a child), until the file is removed that it makes first. Gives
/// its path and that of the file.
///
/// # Panics
/// If it cannot be written.
#[must_use]
pub fn waiting_qemu(folder: &Path, qemu: &Path) -> (PathBuf, PathBuf) {
    // QEMU runs as a user of its own, who makes the file.
    let open = folder.join("open");
    std::fs::create_dir(&open).expect("a folder");
    std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).expect("may be written to");
    let (path, waiting) = (folder.join("qemu-wrapper"), open.join("waiting"));
    let text = format!(
        "#!/bin/sh\nfor word; do if [ \"$word\" = -incoming ]; then : > '{0}'; while [ -e '{0}' ]; do sleep 0.05; done; fi; done\nexec '{1}' \"$@\"\n",
        waiting.display(),
        qemu.display()
    );
    std::fs::write(&path, text).expect("writes");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("may be run");
    (path, waiting)
}
