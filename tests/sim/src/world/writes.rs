//! How a daemon follows the writes of a guest that [`crate::world::qemu`] plays.

use vmove_memory::{MemoryError, PageIndex, PageRun, RamFile};
use vmove_migrate::vmm::{During, GuestWrites, MappedFile, WriteTracker};

use crate::world::qemu;
use crate::world::vmm::{Qemu, ended};

impl GuestWrites for Qemu {
    fn follow(&self, _: &[MappedFile<'_>]) -> Result<Box<dyn WriteTracker>, MemoryError> {
        let tracker = self.look(qemu::Machine::track).ok_or_else(|| ended(self.pid()))?;
        Ok(Box::new(Tracker { qemu: self.clone(), tracker }))
    }
}

#[derive(Debug)]
struct Tracker {
    qemu: Qemu,
    tracker: u64,
}

impl WriteTracker for Tracker {
    fn scan(
        &mut self,
        _: During,
        _: usize,
        _: &RamFile,
        dirty: &mut dyn FnMut(PageRun),
    ) -> Result<(), MemoryError> {
        let written = self.qemu.look(|machine| machine.take_written(self.tracker));
        for (page, written) in (0..).zip(written.ok_or_else(|| ended(self.qemu.pid()))?) {
            if written {
                dirty(PageRun::new(PageIndex(page), 1));
            }
        }
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<(), MemoryError> {
        Ok(())
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        self.qemu.look(|machine| machine.end_tracking(self.tracker));
    }
}
