//! Faults of a guest: the only user of the `userfaultfd` crate.

use std::os::fd::BorrowedFd;

use crate::attach::RemoteUffd;
use crate::error::Result;
use crate::ram::QemuMapping;
use crate::units::{ByteLen, Hva};

/// What a userfaultfd is for; decides the features asked of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UffdFeatures {
    /// Serving pages: minor and missing faults, discard events, thread ids.
    Faults,
    /// Asynchronous write protection: [`DirtyTracker`](crate::DirtyTracker).
    DirtyTracking,
}

/// Why a thread faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The file has a page there; it is not mapped.
    Minor,
    /// The file has a hole there.
    Missing,
}

/// Something the kernel reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UffdEvent {
    /// A thread waits for a page.
    Fault {
        /// The page's address.
        hva: Hva,
        /// Why.
        kind: FaultKind,
        /// True for a write.
        write: bool,
        /// The waiting thread.
        thread: u32,
    },
    /// QEMU discarded memory. Its thread waits until this was read.
    Remove {
        /// First address.
        hva: Hva,
        /// Bytes.
        len: ByteLen,
    },
}

/// Room for events, reused between reads.
#[derive(Debug)]
pub struct EventBatch {
    events: Vec<UffdEvent>,
}

impl EventBatch {
    /// Room for `capacity` events at a time.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { events: Vec::with_capacity(capacity) }
    }

    /// What the last read brought.
    #[must_use]
    pub fn events(&self) -> &[UffdEvent] {
        &self.events
    }
}

/// How an attempt to map pages ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// All of the range is mapped now, this many bytes of it newly.
    Mapped(ByteLen),
    /// All of it had been mapped before; waiting threads were woken.
    AlreadyMapped,
    /// The file has a hole at `hva + done`: give it memory, then go on from there.
    Hole {
        /// Bytes that are mapped.
        done: ByteLen,
    },
    /// An event is waiting to be read: read events, then go on from `hva + done`.
    Retry {
        /// Bytes that are mapped.
        done: ByteLen,
    },
    /// QEMU is gone, or no longer has memory there.
    Gone,
}

/// The page faults of one QEMU.
#[derive(Debug)]
pub struct FaultContext {
    remote: RemoteUffd,
}

impl FaultContext {
    /// Takes a userfaultfd made with [`UffdFeatures::Faults`].
    #[must_use]
    pub fn new(remote: RemoteUffd) -> Self {
        Self { remote }
    }

    /// Begins to watch the mappings for minor and missing faults.
    ///
    /// # Errors
    /// Not yet written.
    pub fn register(&self, _mappings: &[QemuMapping]) -> Result<()> {
        todo!()
    }

    /// Ends watching; waiting threads go on and see whatever the file holds.
    ///
    /// # Errors
    /// Not yet written.
    pub fn unregister(&self, _mappings: &[QemuMapping]) -> Result<()> {
        todo!()
    }

    /// Reads what is there, without waiting and without allocating. Returns the number of events.
    ///
    /// # Errors
    /// Not yet written.
    pub fn read_events(&self, _out: &mut EventBatch) -> Result<usize> {
        todo!()
    }

    /// Maps pages that the file has, and wakes the threads that wait for them.
    ///
    /// # Errors
    /// Not yet written.
    pub fn continue_range(&self, _hva: Hva, _len: ByteLen) -> Result<Outcome> {
        todo!()
    }

    /// Wakes threads that wait in the range; each faults again if the page is still not mapped.
    ///
    /// # Errors
    /// Not yet written.
    pub fn wake(&self, _hva: Hva, _len: ByteLen) -> Result<()> {
        todo!()
    }

    /// Makes touching the range an error in QEMU (SIGBUS, a machine check for a KVM guest).
    ///
    /// # Errors
    /// Not yet written.
    pub fn poison(&self, _hva: Hva, _len: ByteLen) -> Result<Outcome> {
        todo!()
    }

    /// The descriptor, readable when events wait.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.remote.fd.as_fd()
    }
}
