//! Events that the kernel reports through a userfaultfd.

use std::fmt;

use userfaultfd::{Event, EventBuffer, ReadWrite};

use crate::error::{MemoryError, Result};
use crate::units::{ByteLen, Hva};

/// Why a thread faulted. A hint only: between the fault and the answer the file may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The file had a page there; it was not mapped.
    Minor,
    /// The file had a hole there.
    Missing,
    /// A write to what [`FaultContext::protect`](super::FaultContext::protect) protects.
    Protected,
}

/// Something the kernel reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UffdEvent {
    /// A thread waits for a page.
    Fault {
        /// Address of the page's first byte (of the huge page's on hugetlbfs).
        hva: Hva,
        /// Why.
        kind: FaultKind,
        /// True for a write.
        write: bool,
        /// The waiting thread; a vCPU, mostly.
        thread: u32,
    },
    /// QEMU discarded memory by `madvise`; its thread waited until this was read. Whether the bytes are gone is for the
    /// file to tell ([`RamFile::is_hole`](crate::RamFile::is_hole)): `MADV_DONTNEED` alone drops page-table entries
    /// only. It may arrive after faults that came later, and a discard on hugetlbfs raises none at all.
    Remove {
        /// First address.
        hva: Hva,
        /// Bytes.
        len: ByteLen,
    },
}

/// Room for events, reused between reads so that reading allocates nothing.
pub struct EventBatch {
    pub(super) buffer: EventBuffer,
    pub(super) events: Vec<UffdEvent>,
    capacity: usize,
}

impl EventBatch {
    /// Room for `capacity` events at a time; at least 1.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(1);
        Self { buffer: EventBuffer::new(capacity), events: Vec::with_capacity(capacity), capacity }
    }

    /// What the last read brought, oldest first.
    #[must_use]
    pub fn events(&self) -> &[UffdEvent] {
        &self.events
    }
}

impl fmt::Debug for EventBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventBatch").field("events", &self.events).field("capacity", &self.capacity).finish()
    }
}

pub(super) fn translate(event: &Event) -> Result<UffdEvent> {
    match *event {
        Event::Pagefault { kind, rw, addr, thread_id } => {
            let kind = match kind {
                userfaultfd::FaultKind::Minor => FaultKind::Minor,
                userfaultfd::FaultKind::Missing => FaultKind::Missing,
                userfaultfd::FaultKind::WriteProtected => FaultKind::Protected,
            };
            Ok(UffdEvent::Fault {
                hva: Hva(addr as u64),
                kind,
                write: rw == ReadWrite::Write,
                thread: u32::try_from(thread_id.as_raw()).unwrap_or(0),
            })
        }
        Event::Remove { start, end } => {
            Ok(UffdEvent::Remove { hva: Hva(start as u64), len: ByteLen(end as u64 - start as u64) })
        }
        _ => Err(MemoryError::UnexpectedEvent(format!("{event:?}"))),
    }
}
