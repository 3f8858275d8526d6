//! Asynchronous write protection and `PAGEMAP_SCAN`: the kernel notes the first write to each page by itself, nobody
//! is trapped, and one request reads the notes and protects the pages again.

use std::time::{Duration, Instant};

use super::stopped::{self, Part};
use crate::attach::{Keep, create_uffd};
use crate::error::Result;
use crate::pagemap::Pagemap;
use crate::process::Process;
use crate::qemu_mapping::QemuMapping;
use crate::uffd::{FaultContext, UffdFeatures};
use crate::units::{ByteLen, ByteRange, FileOffset, Hva, PageRun, PageSize};

/// Why dirty tracking is not possible on this host.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// The kernel lacks something.
    #[error(
        "This kernel lacks {missing} (Linux 6.7 has it): full post-copy is possible, pre-copy and hybrid are not"
    )]
    Kernel {
        /// What.
        missing: &'static str,
    },
}

/// How exactly writes are reported if 2 MiB pages are mapped. Memory mapped by 4 KiB pages is always tracked exactly,
/// hugetlbfs always by its page size.
///
/// A first write to something protected costs the guest a fault of about 2 us; so a guest that writes to all of its
/// memory pays 1 ms per GiB with `Folio`, and about 0.5 s per GiB and round with `Page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// A write anywhere in a mapped 2 MiB page counts as a write to all of it. Nearly free. For a first round, which
    /// takes so long that most of what the guest works on is written anyway.
    Folio,
    /// Every 4 KiB page counts for itself. The 2 MiB mappings are taken apart, so that the guest also faults once on
    /// each page that it only reads. For later rounds.
    Page,
}

/// What one scan found and cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanStats {
    /// Pages written since the last scan.
    pub pages: u64,
    /// Runs of them.
    pub runs: u64,
    /// Time of the scan on `CLOCK_MONOTONIC`, callbacks excluded.
    pub took: Duration,
}

/// Tracks which pages of a process's RAM are written.
///
/// Tracked is what is written *through the mappings of this process*, by its threads and by KVM. Not tracked are
/// writers outside it (vhost-user, VFIO), and a page pinned for direct I/O before it was protected: arm and scan while
/// the guest is stopped and drained, or when nothing uses direct I/O.
///
/// Holes of 2 MiB may go unreported: see [`HoleWatch`](super::HoleWatch).
///
/// Dropping it (or our death) ends tracking; the guest does not notice.
#[derive(Debug)]
pub struct DirtyTracker {
    context: FaultContext,
    pagemap: Pagemap,
    mappings: Vec<QemuMapping>,
    precision: Precision,
    /// Where 2 MiB mappings may be left to take apart: index of the mapping, and where in it.
    maybe_huge: Vec<(usize, Hva, ByteLen)>,
    /// For [`Self::scan_stopped`].
    threads: usize,
}

impl DirtyTracker {
    /// Asks the running kernel.
    ///
    /// # Errors
    /// [`Unsupported`] names what is missing.
    pub fn supported() -> Result<(), Unsupported> {
        UffdFeatures::DirtyTracking
            .bits()
            .map_err(|_| Unsupported::Kernel { missing: "asynchronous write protection" })?;
        let can_scan = Process::open(std::process::id())
            .and_then(|us| Pagemap::open(&us))
            .is_ok_and(|mut pagemap| pagemap.can_scan());
        if can_scan { Ok(()) } else { Err(Unsupported::Kernel { missing: "PAGEMAP_SCAN" }) }
    }

    /// Write-protects the mappings. From now on the first write to each page is noted.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`](crate::MemoryError::Unsupported);
    /// [`MemoryError::RangeBusy`](crate::MemoryError::RangeBusy) if another userfaultfd watches the memory; those of
    /// [`create_uffd`].
    pub fn arm(process: &Process, mappings: &[QemuMapping], precision: Precision) -> Result<Self> {
        Self::arm_where(process, mappings, precision, |_| None)
    }

    /// As [`Self::arm`], where `held` tells which parts of a file (by its index) have memory. Only those are protected, and only those are to
    /// be scanned ([`Self::scan_held`]). To protect a hole would cost the kernel a page table of 4 KiB for each 2 MiB of it, and every later
    /// scan the time to read that: 2 GiB and a second for 1 TiB.
    ///
    /// # Errors
    /// Those of [`Self::arm`].
    pub fn arm_where(
        process: &Process,
        mappings: &[QemuMapping],
        precision: Precision,
        held: impl Fn(usize) -> Option<Vec<ByteRange>>,
    ) -> Result<Self> {
        let context = FaultContext::new(create_uffd(process, UffdFeatures::DirtyTracking, Keep::OursOnly)?);
        let mut pagemap = Pagemap::open(process)?;
        context.register_write_protection(mappings)?;
        for mapping in mappings {
            for (hva, len) in parts(mapping, held(mapping.file_index).as_deref()) {
                pagemap.protect(hva, len, step(mapping, precision))?;
            }
        }
        let all = mappings.iter().enumerate().map(|(index, m)| (index, m.hva, m.len));
        let maybe_huge = if precision == Precision::Folio { all.collect() } else { Vec::new() };
        Ok(Self {
            context,
            pagemap,
            mappings: mappings.to_vec(),
            precision,
            maybe_huge,
            threads: stopped::threads(),
        })
    }

    /// Chooses how exactly later scans protect again. From `Folio` to `Page`, a 2 MiB page counts as a whole the first
    /// time that it is told of, and by its 4 KiB pages from then on. There is no way back.
    pub const fn set_precision(&mut self, precision: Precision) {
        self.precision = precision;
    }

    /// Tells of the pages of file `file_index` written since the last scan (or since arming) and protects them again,
    /// each in one step. A page may be told of though its bytes are the same, and once more in the same scan if it is
    /// written meanwhile.
    ///
    /// **Read their bytes after this, never before**: what is written in between would be lost.
    ///
    /// # Errors
    /// [`MemoryError::ProcessGone`](crate::MemoryError::ProcessGone), [`MemoryError::Proc`](crate::MemoryError::Proc).
    /// Pages reported before the error are protected again and are not reported twice.
    pub fn scan_and_rearm(&mut self, file_index: usize, dirty: impl FnMut(PageRun)) -> Result<ScanStats> {
        self.scan(file_index, None, dirty)
    }

    /// As [`Self::scan_and_rearm`], where only these parts of the file have memory, in order. Elsewhere nothing can have been written: what
    /// was, and was given back since, is found by [`HoleWatch`](super::HoleWatch). Memory that has come to be since the last scan was never
    /// protected, and is told of.
    ///
    /// # Errors
    /// Those of [`Self::scan_and_rearm`].
    pub fn scan_held(
        &mut self,
        file_index: usize,
        held: &[ByteRange],
        dirty: impl FnMut(PageRun),
    ) -> Result<ScanStats> {
        self.scan(file_index, Some(held), dirty)
    }

    /// As [`Self::scan_held`], of a guest that is stopped and waits for this. Several threads share the work, and nothing is protected
    /// again: what is told of here is told of again by a later scan.
    ///
    /// # Errors
    /// Those of [`Self::scan_and_rearm`].
    pub fn scan_stopped(
        &mut self,
        file_index: usize,
        held: &[ByteRange],
        mut dirty: impl FnMut(PageRun),
    ) -> Result<ScanStats> {
        let begin = Instant::now();
        let mut stats = ScanStats::default();
        let mut all = Vec::new();
        for (index, mapping) in self.mappings.iter().enumerate().filter(|(_, m)| m.file_index == file_index) {
            all.extend(parts(mapping, Some(held)).into_iter().map(|(hva, len)| Part { index, hva, len }));
        }
        let written = stopped::scan(&mut self.pagemap, &all, self.threads)?;
        stats.took = begin.elapsed();
        for Part { index, hva, len } in written {
            let run = pages_of(&self.mappings[index], hva, len);
            stats.pages += run.len;
            stats.runs += 1;
            dirty(run);
        }
        Ok(stats)
    }

    fn scan(
        &mut self,
        file_index: usize,
        held: Option<&[ByteRange]>,
        mut dirty: impl FnMut(PageRun),
    ) -> Result<ScanStats> {
        let (mut stats, mut told) = (ScanStats::default(), Duration::ZERO);
        let begin = Instant::now();
        let mut fresh = Vec::new();
        for (index, mapping) in self.mappings.iter().enumerate().filter(|(_, m)| m.file_index == file_index) {
            let mut tell = |hva: Hva, len: ByteLen| {
                let callback = Instant::now();
                let run = pages_of(mapping, hva, len);
                stats.pages += run.len;
                stats.runs += 1;
                dirty(run);
                told += callback.elapsed();
            };
            if self.precision == Precision::Page {
                let (of_this, others) = self.maybe_huge.drain(..).partition(|(of, ..)| *of == index);
                self.maybe_huge = others;
                for (hva, len) in huge_regions(&mut self.pagemap, mapping, of_this)? {
                    // Asked first: one request for all of it costs little beside one for each MiB.
                    let mut written = Vec::new();
                    self.pagemap.written(hva, len, |hva, len| written.push((hva, len)))?;
                    for (hva, len) in written {
                        self.pagemap.written_and_protect(
                            hva,
                            len,
                            step(mapping, Precision::Page),
                            &mut tell,
                        )?;
                    }
                    // What was not written is still huge.
                    fresh.push((index, hva, len));
                }
            }
            for (hva, len) in parts(mapping, held) {
                self.pagemap.written_and_protect(hva, len, len, |hva, len| {
                    // Memory that has come to be since the last scan may be mapped by a huge page, which was now protected as a whole.
                    if let Some((hva, len)) = huge_part(hva, len) {
                        fresh.push((index, hva, len));
                    }
                    tell(hva, len);
                })?;
            }
        }
        if self.precision == Precision::Page {
            self.maybe_huge.extend(fresh);
        }
        stats.took = begin.elapsed().saturating_sub(told);
        Ok(stats)
    }

    /// Ends tracking. Where 2 MiB mappings were taken apart, [`collapse`](crate::collapse()) puts them together again.
    ///
    /// # Errors
    /// [`MemoryError::Uffd`](crate::MemoryError::Uffd); tracking ends all the same.
    pub fn disarm(self) -> Result<()> {
        self.context.unregister(&self.mappings)
    }
}

/// Where a mapping shows parts of its file; all of it if these are not known.
fn parts(mapping: &QemuMapping, held: Option<&[ByteRange]>) -> Vec<(Hva, ByteLen)> {
    let Some(held) = held else { return vec![(mapping.hva, mapping.len)] };
    let shown = held.iter().filter_map(|part| part.intersection(mapping.file_range()));
    shown.filter_map(|part| Some((mapping.to_hva(part.start)?, part.len))).collect()
}

/// Pages of the file that a part of a mapping shows.
fn pages_of(mapping: &QemuMapping, hva: Hva, len: ByteLen) -> PageRun {
    let start = FileOffset(mapping.file_offset.0 + (hva.0 - mapping.hva.0));
    mapping.page_size.run_of(ByteRange::new(start, len))
}

/// 2 MiB mappings of tmpfs memory in some parts of it.
fn huge_regions(
    pagemap: &mut Pagemap,
    mapping: &QemuMapping,
    within: Vec<(usize, Hva, ByteLen)>,
) -> Result<Vec<(Hva, ByteLen)>> {
    let mut regions = Vec::new();
    if mapping.page_size == PageSize::Base4K {
        for (_, hva, len) in within {
            pagemap.huge(hva, len, |hva, len| regions.push((hva, len)))?;
        }
    }
    Ok(regions)
}

/// The whole 2 MiB of a region that one page can map.
fn huge_part(hva: Hva, len: ByteLen) -> Option<(Hva, ByteLen)> {
    let huge = PageSize::Huge2M.bytes();
    let (start, end) = (hva.0.next_multiple_of(huge), (hva.0 + len.0) / huge * huge);
    (start < end).then(|| (Hva(start), ByteLen(end - start)))
}

/// How much to hand to the kernel at once. Protecting a part of a 2 MiB mapping makes the kernel take it apart.
fn step(mapping: &QemuMapping, precision: Precision) -> ByteLen {
    match (mapping.page_size, precision) {
        (PageSize::Base4K, Precision::Page) => ByteLen::mib(1),
        _ => mapping.len,
    }
}
