//! Memory copied as it was at one moment, while its process writes on.
//!
//! All of it is write-protected at that moment. Whoever writes waits until the old bytes of that piece (64 KiB) are in the copy:
//! one thread answers writers, another copies everything else in order. Each piece is copied once, by whoever comes first, and
//! its protection is lifted when its copy is whole. So the copy needs no room beside its own, and writers are never further
//! ahead than it.
//!
//! ```text
//! piece   PROTECTED --claim--> CLAIMED --bytes are in the copy--> KEPT, then lifted, writers woken
//! ```
//!
//! The userfaultfd is made inside the process and kept by us alone: if we die, nothing is protected any more and writers go on.
//! If the copy cannot be made (no room, or the process discards memory), the same is done at once, and the copy is worthless.

mod pieces;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::attach::{Keep, create_uffd};
use crate::error::{MemoryError, Result};
use crate::process::Process;
use crate::qemu_mapping::QemuMapping;
use crate::ram::RamFile;
use crate::uffd::{EventBatch, FaultContext, FaultKind, Outcome, UffdEvent, UffdFeatures};
use crate::units::{ByteLen, ByteRange, FileOffset, Hva, PageSize};

use self::pieces::{Claim, PIECE, Pieces};

const PAGE: usize = 4096;
/// Events taken from the kernel at once.
const EVENTS: usize = 64;
/// How long the copier sleeps between looks at a piece that the other thread is at work on.
const PIECE_CHECK_INTERVAL: Duration = Duration::from_micros(50);

/// How far a copy has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Pages of 4 KiB that were copied since somebody wrote there.
    pub by_faults: u64,
    /// Pages of 4 KiB that were copied in order.
    pub by_copy: u64,
    /// Pages of 4 KiB in all.
    pub pages: u64,
    /// What the copy takes: zeros take nothing.
    pub stored: ByteLen,
}

/// Why a copy was aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeepFailure {
    /// No memory is left for it.
    #[error("there is no memory left for it")]
    Full,
    /// It exceeds its limit.
    #[error("it exceeds its limit of {} MiB", .0.0 >> 20)]
    Limit(ByteLen),
    /// The process discarded memory before it was copied.
    #[error("the process has discarded memory at {0}, as a balloon does")]
    Discarded(Hva),
    /// Something else.
    #[error("{0}")]
    Other(String),
}

/// Makes the copy. Any number of threads may use it at once.
#[derive(Debug)]
pub struct Keeper {
    context: FaultContext,
    mappings: Vec<QemuMapping>,
    files: Vec<Copied>,
    limit: Option<ByteLen>,
    /// Ends [`Self::serve`].
    bell: OwnedFd,
    failure: OnceLock<KeepFailure>,
    stored: AtomicU64,
    by_faults: AtomicU64,
    by_copy: AtomicU64,
    /// Odd while events are read and acted upon.
    turns: AtomicU64,
    /// The mistake that tests look for.
    #[cfg(test)]
    lift_first: std::sync::atomic::AtomicBool,
}

/// One file, and where its copy goes.
#[derive(Debug)]
struct Copied {
    source: File,
    store: File,
    pieces: Pieces,
}

impl Keeper {
    /// Asks the running kernel.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] names what is missing.
    pub fn supported() -> Result<()> {
        UffdFeatures::WriteProtection.check()
    }

    /// Prepares to copy what `mappings` show of `files` (in the order of `file_index`) to `stores`, which must be as long and all
    /// hole, and take `limit` at most. Nothing is protected yet. For memory on tmpfs.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`]; [`MemoryError::RangeBusy`] if another userfaultfd watches the memory; those of
    /// [`create_uffd`].
    pub fn new(
        process: &Process,
        mappings: &[QemuMapping],
        files: &[RamFile],
        stores: &[RamFile],
        limit: Option<ByteLen>,
    ) -> Result<Self> {
        let small = |file: &RamFile| file.page_size() == PageSize::Base4K;
        if !files.iter().chain(stores).all(small) || files.len() != stores.len() {
            return Err(MemoryError::Unsupported {
                feature: "write protection with a copy of memory on hugetlbfs",
                consequence: "only memory on tmpfs can be copied as it was",
            });
        }
        let copied = |(source, store): (&RamFile, &RamFile)| {
            let open = |file: &RamFile| {
                let fd = file.fd().try_clone_to_owned();
                fd.map(File::from).map_err(|source| MemoryError::system("Duplicating a descriptor", source))
            };
            Ok(Copied { source: open(source)?, store: open(store)?, pieces: Pieces::new(source.len()) })
        };
        let files = files.iter().zip(stores).map(copied).collect::<Result<Vec<_>>>()?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = bell.map_err(|source| MemoryError::system("eventfd", source))?;
        // Ours only: writers must go on if we die.
        let remote = create_uffd(process, UffdFeatures::WriteProtection, Keep::OursOnly)?;
        let context = FaultContext::new(remote);
        context.register_write_protection(mappings)?;
        Ok(Self {
            context,
            mappings: mappings.to_vec(),
            files,
            limit,
            bell,
            failure: OnceLock::new(),
            stored: AtomicU64::new(0),
            by_faults: AtomicU64::new(0),
            by_copy: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            #[cfg(test)]
            lift_first: std::sync::atomic::AtomicBool::new(false),
        })
    }

    /// The moment: what memory holds now is what the copy will hold. Nobody may be writing, and [`Self::serve`] must be at work.
    ///
    /// # Errors
    /// [`MemoryError::Uffd`]; nothing is protected then.
    pub fn protect(&self) -> Result<()> {
        let done = self.mappings.iter().try_for_each(|m| self.context.protect(m.hva, m.len));
        if done.is_err() {
            self.fail(KeepFailure::Other("memory could not be protected".to_owned()));
        }
        done
    }

    /// Answers writers until [`Self::end`] or a failure. For a thread of its own: after its start it neither allocates nor waits
    /// for anything but events.
    pub fn serve(&self) {
        let mut events = EventBatch::new(EVENTS);
        let mut buffer = vec![0; PIECE];
        loop {
            let (faults, bell) = (self.context.as_fd(), &self.bell);
            let mut ready = [PollFd::new(&faults, PollFlags::IN), PollFd::new(bell, PollFlags::IN)];
            // Interrupted by a signal: one look around.
            let _ = poll(&mut ready, None);
            let told = ready[1].revents().contains(PollFlags::IN);
            if told || self.failure.get().is_some() {
                return;
            }
            // Before they are read: memory may be discarded as soon as its event was (see `heard`).
            self.turns.fetch_add(1, Ordering::SeqCst);
            if let Err(error) = self.context.read_events(&mut events) {
                return self.fail(KeepFailure::Other(error.to_string()));
            }
            for event in events.events() {
                match *event {
                    UffdEvent::Fault { hva, kind: FaultKind::Protected, .. } => {
                        self.answer(hva, &mut buffer);
                    }
                    UffdEvent::Fault { hva, .. } => self.wake(hva),
                    UffdEvent::Remove { hva, .. } => return self.fail(KeepFailure::Discarded(hva)),
                }
            }
            self.turns.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Copies, in order, all that no writer has come to first. Returns when the copy is whole and nothing is protected any more.
    ///
    /// # Errors
    /// Why it was given up; nothing is protected then either.
    pub fn copy_rest(&self) -> Result<Kept, KeepFailure> {
        let mut buffer = vec![0; PIECE];
        for (file, copied) in self.files.iter().enumerate() {
            for piece in 0..copied.pieces.len() {
                if self.failure.get().is_some() {
                    break;
                }
                if copied.pieces.claim(piece) == Claim::Ours {
                    self.keep(file, piece, &mut buffer, &self.by_copy);
                }
            }
        }
        while self.failure.get().is_none() && !self.files.iter().all(|copied| copied.pieces.all_kept()) {
            std::thread::sleep(PIECE_CHECK_INTERVAL);
        }
        self.heard();
        self.end();
        self.failure.get().map_or_else(|| Ok(self.kept()), |why| Err(why.clone()))
    }

    /// Waits until whoever serves has acted on the events that it has read: what was discarded since may be in the copy as zeros.
    fn heard(&self) {
        let seen = self.turns.load(Ordering::SeqCst);
        while !seen.is_multiple_of(2)
            && self.turns.load(Ordering::SeqCst) == seen
            && self.failure.get().is_none()
        {
            std::thread::sleep(PIECE_CHECK_INTERVAL);
        }
    }

    /// How far it has come.
    #[must_use]
    pub fn kept(&self) -> Kept {
        let of = |copied: &Copied| copied.pieces.bytes() / PAGE as u64;
        Kept {
            by_faults: self.by_faults.load(Ordering::Relaxed),
            by_copy: self.by_copy.load(Ordering::Relaxed),
            pages: self.files.iter().map(of).sum(),
            stored: ByteLen(self.stored.load(Ordering::Relaxed)),
        }
    }

    /// Lifts all protection and ends [`Self::serve`]; writers go on. Before the copy is whole, that is to give it up.
    pub fn end(&self) {
        // Should it fail: closing the descriptor, with the last use of this, lifts and wakes, too.
        let _ = self.context.unregister(&self.mappings);
        for mapping in &self.mappings {
            let _ = self.context.wake(mapping.hva, mapping.len);
        }
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    fn fail(&self, why: KeepFailure) {
        // In this order: who copies what is left must not take unprotected memory for kept.
        let _ = self.failure.set(why);
        self.end();
    }

    /// A writer waits at `hva`.
    fn answer(&self, hva: Hva, buffer: &mut [u8]) {
        let shown = self.mappings.iter().find_map(|m| Some((m.file_index, m.to_file(hva)?)));
        let Some((file, offset)) = shown else { return self.wake(hva) };
        let piece = Pieces::of(offset);
        match self.files[file].pieces.claim(piece) {
            Claim::Ours => self.keep(file, piece, buffer, &self.by_faults),
            // Who claimed it lifts after this, and wakes.
            Claim::Others => {}
            // It came late, and nobody else would wake it.
            Claim::Kept => self.wake(hva),
        }
    }

    /// Copies a claimed piece, then lifts its protection.
    fn keep(&self, file: usize, piece: usize, buffer: &mut [u8], count: &AtomicU64) {
        let copied = &self.files[file];
        let range = copied.pieces.range(piece);
        #[cfg(test)]
        if self.lift_first.load(Ordering::Relaxed) {
            let _ = self.lift(file, range);
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Err(why) = self.store(copied, range, &mut buffer[..range.len.as_usize()]) {
            return self.fail(why);
        }
        count.fetch_add(range.len.0 / PAGE as u64, Ordering::Relaxed);
        // Before it is lifted: a writer that comes to wait afterwards is woken by whoever sees this.
        copied.pieces.kept(piece);
        if let Err(error) = self.lift(file, range) {
            self.fail(KeepFailure::Other(error.to_string()));
        }
    }

    /// Writes what is not zero of a piece to the copy.
    fn store(&self, copied: &Copied, range: ByteRange, buffer: &mut [u8]) -> Result<(), KeepFailure> {
        let failed = |error: io::Error| match error.raw_os_error() {
            Some(libc::ENOSPC) => KeepFailure::Full,
            _ => KeepFailure::Other(error.to_string()),
        };
        copied.source.read_exact_at(buffer, range.start.0).map_err(failed)?;
        let mut at = 0;
        while at < buffer.len() {
            let zero = is_zero(&buffer[at..at + PAGE]);
            let alike = buffer[at..].chunks_exact(PAGE).take_while(|page| is_zero(page) == zero).count();
            let end = at + alike * PAGE;
            if !zero {
                self.count_stored((end - at) as u64)?;
                copied.store.write_all_at(&buffer[at..end], range.start.0 + at as u64).map_err(failed)?;
            }
            at = end;
        }
        Ok(())
    }

    fn count_stored(&self, more: u64) -> Result<(), KeepFailure> {
        let stored = self.stored.fetch_add(more, Ordering::Relaxed) + more;
        match self.limit {
            Some(limit) if stored > limit.0 => Err(KeepFailure::Limit(limit)),
            _ => Ok(()),
        }
    }

    /// A discard under way makes the kernel refuse; it fails the copy as soon as its event is read, which lifts everything.
    fn lift(&self, file: usize, range: ByteRange) -> Result<Outcome> {
        let mut last = Outcome::AlreadyMapped;
        for mapping in self.mappings.iter().filter(|m| m.file_index == file) {
            let Some(shown) = range.intersection(mapping.file_range()) else { continue };
            let Some(hva) = mapping.to_hva(shown.start) else { continue };
            last = self.context.lift(hva, shown.len)?;
        }
        Ok(last)
    }

    fn wake(&self, hva: Hva) {
        if let Err(error) = self.context.wake(hva, ByteLen(PAGE as u64)) {
            self.fail(KeepFailure::Other(error.to_string()));
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.end();
    }
}

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}
