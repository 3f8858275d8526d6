//! How a guest's writes to its memory are followed: the kernel notes them in QEMU's page tables.

use vmove_memory::{DirtyTracker, HoleWatch, MemoryError, PageRun, Precision, Process, QemuMapping, RamFile};

use super::{During, GuestWrites, MappedFile, WriteTracker};

/// The guest's memory, as QEMU maps it.
#[derive(Debug)]
pub(super) struct InQemu {
    pub process: Process,
    pub mappings: Vec<QemuMapping>,
}

/// The guest has left, and its QEMU has ended.
#[derive(Debug)]
pub(super) struct QemuHasEnded;

impl GuestWrites for QemuHasEnded {
    fn follow(&self, _: &[MappedFile<'_>]) -> Result<Box<dyn WriteTracker>, MemoryError> {
        Ok(Box::new(NothingIsWritten))
    }
}

/// Of a guest that does not run here.
#[derive(Debug)]
struct NothingIsWritten;

impl WriteTracker for NothingIsWritten {
    fn scan(
        &mut self,
        _: During,
        _: usize,
        _: &RamFile,
        _: &mut dyn FnMut(PageRun),
    ) -> Result<(), MemoryError> {
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<(), MemoryError> {
        Ok(())
    }
}

impl GuestWrites for InQemu {
    fn follow(&self, mapped: &[MappedFile<'_>]) -> Result<Box<dyn WriteTracker>, MemoryError> {
        // Hole watch first: a hole made after this is found, whichever way.
        let holes =
            mapped.iter().map(|m| HoleWatch::new(m.file, m.mapping)).collect::<Result<Vec<_>, _>>()?;
        // What comes to have memory after this was never protected, and is told of.
        let held = mapped.iter().map(|m| m.file.data_extents()).collect::<Result<Vec<_>, _>>()?;
        let held = |index: usize| held.get(index).cloned();
        let tracker = DirtyTracker::arm_where(&self.process, &self.mappings, Precision::Page, held)?;
        Ok(Box::new(Followed { tracker, holes }))
    }
}

/// Writes that the kernel notes, and memory that the guest gives back.
#[derive(Debug)]
struct Followed {
    tracker: DirtyTracker,
    holes: Vec<HoleWatch>,
}

impl WriteTracker for Followed {
    fn scan(
        &mut self,
        during: During,
        index: usize,
        file: &RamFile,
        dirty: &mut dyn FnMut(PageRun),
    ) -> Result<(), MemoryError> {
        let held = file.data_extents()?;
        match during {
            During::Rounds => self.tracker.scan_held(index, &held, &mut *dirty)?,
            During::Pause => self.tracker.scan_stopped(index, &held, &mut *dirty)?,
        };
        // Memory given back to the host (balloon) changes without a write that is sure to be reported.
        let dropped = self.holes[index].look_among(&held)?;
        for range in dropped.holes.into_iter().chain(dropped.replaced) {
            dirty(file.page_size().run_of(range));
        }
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<(), MemoryError> {
        self.tracker.disarm()
    }
}
