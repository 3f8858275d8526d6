//! `/proc/PID/pagemap`: which pages a process has mapped, and in what state.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use crate::error::{MemoryError, Result};
use crate::process::Process;
use crate::sys::{PageRegion, ScanArg, pagemap_scan};
use crate::units::{ByteLen, Hva};

pub(crate) const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_HUGE: u64 = 1 << 6;
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
/// Regions taken from the kernel at a time: 96 KiB.
const REGIONS: usize = 4096;
/// Bits of the entries in the file itself, for kernels that cannot scan.
const ENTRY_PRESENT_OR_SWAPPED: u64 = 3 << 62;

/// The page map of one process.
#[derive(Debug)]
pub(crate) struct Pagemap {
    file: File,
    pid: u32,
    regions: Vec<PageRegion>,
}

/// Pages found mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Present {
    pub pages: u64,
    pub first: Option<Hva>,
}

impl Pagemap {
    pub(crate) fn open(process: &Process) -> Result<Self> {
        let path = process.path("pagemap");
        let file = File::open(&path).map_err(|source| MemoryError::Proc { path, source })?;
        if !process.alive() {
            return Err(MemoryError::ProcessGone { pid: process.pid() });
        }
        Ok(Self { file, pid: process.pid(), regions: vec![PageRegion::default(); REGIONS] })
    }

    /// The same for another thread.
    pub(crate) fn another(&self) -> Result<Self> {
        let file = self.file.try_clone().map_err(|source| self.error(source))?;
        Ok(Self { file, pid: self.pid, regions: vec![PageRegion::default(); REGIONS] })
    }

    /// True if the kernel knows `PAGEMAP_SCAN`.
    pub(crate) fn can_scan(&mut self) -> bool {
        // An empty range is scanned at once, and is an error only for kernels that do not know the request.
        let mut arg = ScanArg::default();
        pagemap_scan(self.file.as_fd(), &mut arg, &mut []).is_ok()
    }

    /// Tells of the regions written since they were last write-protected, and protects them again, each in one step.
    /// The kernel is asked for at most `step` at once, counted from `hva`.
    pub(crate) fn written_and_protect(
        &mut self,
        hva: Hva,
        len: ByteLen,
        step: ByteLen,
        mut tell: impl FnMut(Hva, ByteLen),
    ) -> Result<()> {
        let arg = ScanArg {
            flags: PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
            category_mask: PAGE_IS_WRITTEN,
            return_mask: PAGE_IS_WRITTEN,
            ..ScanArg::default()
        };
        steps(hva, len, step).try_for_each(|(hva, len)| self.scan(arg, hva, len, &mut tell))
    }

    /// Tells of the regions written since they were last write-protected.
    pub(crate) fn written(&mut self, hva: Hva, len: ByteLen, tell: impl FnMut(Hva, ByteLen)) -> Result<()> {
        let arg = ScanArg {
            flags: PM_SCAN_CHECK_WPASYNC,
            category_mask: PAGE_IS_WRITTEN,
            return_mask: PAGE_IS_WRITTEN,
            ..ScanArg::default()
        };
        self.scan(arg, hva, len, tell)
    }

    /// Write-protects everything, present or not. `step` as above.
    pub(crate) fn protect(&mut self, hva: Hva, len: ByteLen, step: ByteLen) -> Result<()> {
        let flags = PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC;
        for (hva, len) in steps(hva, len, step) {
            let mut arg = ScanArg { flags, start: hva.0, end: hva.add(len).0, ..ScanArg::default() };
            while arg.start < arg.end {
                pagemap_scan(self.file.as_fd(), &mut arg, &mut []).map_err(|source| self.error(source))?;
                self.advance(&mut arg)?;
            }
        }
        Ok(())
    }

    /// Tells of the regions for which the process has no page-table entry that leads to memory.
    pub(crate) fn absent(&mut self, hva: Hva, len: ByteLen, tell: impl FnMut(Hva, ByteLen)) -> Result<()> {
        let arg = ScanArg {
            category_mask: PAGE_IS_PRESENT,
            category_inverted: PAGE_IS_PRESENT,
            return_mask: PAGE_IS_PRESENT,
            ..ScanArg::default()
        };
        self.scan(arg, hva, len, tell)
    }

    /// Pages for which the process has a page-table entry that leads to memory.
    pub(crate) fn present(&mut self, hva: Hva, len: ByteLen) -> Result<Present> {
        let mut found = Present::default();
        self.each_present(hva, len, |at, len| {
            found.pages += len.0 >> 12;
            found.first.get_or_insert(at);
        })?;
        Ok(found)
    }

    /// Tells of each region that [`Self::present`] counts.
    pub(crate) fn each_present(
        &mut self,
        hva: Hva,
        len: ByteLen,
        mut add: impl FnMut(Hva, ByteLen),
    ) -> Result<()> {
        if self.can_scan() {
            let anyof = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
            let arg = ScanArg { category_anyof_mask: anyof, return_mask: anyof, ..ScanArg::default() };
            self.scan(arg, hva, len, add)?;
        } else {
            let mut entries = vec![0; 1 << 20];
            let end = hva.add(len).0;
            let mut at = hva.0;
            while at < end {
                let bytes =
                    usize::try_from((end - at) >> 12 << 3).map_or(entries.len(), |n| n.min(entries.len()));
                let chunk = &mut entries[..bytes];
                self.file.read_exact_at(chunk, at >> 12 << 3).map_err(|source| self.error(source))?;
                for (i, entry) in chunk.chunks_exact(8).enumerate() {
                    let entry = u64::from_ne_bytes(entry.try_into().unwrap_or_default());
                    if entry & ENTRY_PRESENT_OR_SWAPPED != 0 {
                        add(Hva(at + ((i as u64) << 12)), ByteLen(4096));
                    }
                }
                at += (bytes as u64) >> 3 << 12;
            }
        }
        Ok(())
    }

    /// Tells of the regions of a private mapping of a file that are not the file's any more: the process has written there. Only a
    /// kernel that can scan tells.
    pub(crate) fn own(&mut self, hva: Hva, len: ByteLen, tell: impl FnMut(Hva, ByteLen)) -> Result<()> {
        let anyof = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
        let arg = ScanArg {
            category_inverted: PAGE_IS_FILE,
            category_mask: PAGE_IS_FILE,
            category_anyof_mask: anyof,
            return_mask: anyof,
            ..ScanArg::default()
        };
        self.scan(arg, hva, len, tell)
    }

    /// Tells of the regions mapped by huge pages.
    pub(crate) fn huge(&mut self, hva: Hva, len: ByteLen, tell: impl FnMut(Hva, ByteLen)) -> Result<()> {
        let arg = ScanArg { category_mask: PAGE_IS_HUGE, return_mask: PAGE_IS_HUGE, ..ScanArg::default() };
        self.scan(arg, hva, len, tell)
    }

    fn scan(
        &mut self,
        mut arg: ScanArg,
        hva: Hva,
        len: ByteLen,
        mut tell: impl FnMut(Hva, ByteLen),
    ) -> Result<()> {
        arg.start = hva.0;
        arg.end = hva.add(len).0;
        while arg.start < arg.end {
            let found = pagemap_scan(self.file.as_fd(), &mut arg, &mut self.regions)
                .map_err(|source| self.error(source))?;
            for region in &self.regions[..found] {
                tell(Hva(region.start), ByteLen(region.end - region.start));
            }
            self.advance(&mut arg)?;
        }
        Ok(())
    }

    fn advance(&self, arg: &mut ScanArg) -> Result<()> {
        if arg.walk_end <= arg.start {
            return Err(self.error(io::Error::other("the scan came to no end")));
        }
        arg.start = arg.walk_end;
        Ok(())
    }

    fn error(&self, source: io::Error) -> MemoryError {
        if source.raw_os_error() == Some(libc::ESRCH) {
            return MemoryError::ProcessGone { pid: self.pid };
        }
        MemoryError::Proc { path: format!("/proc/{}/pagemap", self.pid).into(), source }
    }
}

/// A range in pieces of at most `step`.
fn steps(hva: Hva, len: ByteLen, step: ByteLen) -> impl Iterator<Item = (Hva, ByteLen)> {
    let step = step.0.max(1);
    (0..len.0.div_ceil(step)).map(move |i| (Hva(hva.0 + i * step), ByteLen(step.min(len.0 - i * step))))
}
