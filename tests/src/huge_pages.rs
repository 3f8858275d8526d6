//! The machine's pool of huge pages of 2 MiB, and somebody who takes all of it.

use std::fs::File;
use std::path::PathBuf;

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
    /// Takes all but `left` bytes of those that are free.
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
