//! Private memory of a running process, moved to a file that the process then maps shared: piece by piece, while it runs.
//!
//! What the process has not written since its memory became private is in the file already (whoever made the file has copied it
//! from the frozen one). Its own pages are still to be copied. For each piece of 2 MiB, or one huge page (more of
//! them in a guest with very many):
//!
//! ```text
//! write-protect the piece --> copy the process's own pages to the file --> map the file over it --> wake
//!      writers wait                                                       (mremap, in one step)     they go on, in the file
//! ```
//!
//! So nobody stands still but who writes to the piece under work, for as long as that takes (some 0.1 ms, or 1 ms where all of it is the
//! process's own); and however fast it writes, each piece is copied once.
//!
//! The userfaultfd is made inside the process and kept by us alone. If we die, protection ends and writers go on; what was moved is the
//! file's, the rest is private as before, and both are whole. What may be left is a mapping of the file, made aside for the pieces that
//! were next: [`Mover::new`] takes it away. Protection must not end before the call that maps the piece under work was made, though:
//! [`Mover::with_standby`] sees to that. Without it, stop the guest while memory is moved.
//!
//! Memory that a device writes to past the page table (direct I/O that is under way) would lose what it writes: stop and drain the guest
//! before, or be sure that there is none.

mod pieces;
#[cfg(test)]
#[cfg(not(loom))]
mod qemu_tests;
mod standby;
mod standing;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

use std::fs::File;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::standby::{STAND_BY, stand_by};
pub use self::standing::{Standing, unmap_strays};

use self::pieces::{Batch, PieceSize, batches, own_runs};
use self::standby::Standby;
use crate::attach::{
    Injector, Keep, MappingHints, Replacement, Sharing, advise, create_uffd, map_aside, move_over, unmap,
};
use crate::error::{MemoryError, Result};
use crate::process::Process;
use crate::qemu_mapping::QemuMapping;
use crate::ram::{Mapping, RamFile};
use crate::uffd::{EventBatch, FaultContext, UffdEvent, UffdFeatures};
use crate::units::{ByteLen, ByteRange, FileOffset, Hva};

/// Bytes copied at once.
const PART: u64 = 2 << 20;
/// Events taken from the kernel at once.
const EVENTS: usize = 64;

/// The file that memory is moved to.
#[derive(Debug)]
pub struct OwnFile {
    /// The file.
    pub file: RamFile,
    /// Our mapping of it.
    pub mapping: Arc<Mapping>,
    /// The number of a descriptor of it inside the process.
    pub fd_in_qemu: RawFd,
}

/// Memory that is still private.
#[derive(Clone, Debug)]
pub struct PrivatePart {
    /// Where it is mapped, and what part of the file of index `file_index` is to take its place.
    pub at: QemuMapping,
    /// What the program asked of the kernel for it.
    pub hints: MappingHints,
    /// The file holds all that the process has not written. If not, all of it is copied from the process.
    pub filled: bool,
}

/// What was moved, and what it cost the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Pieces.
    pub pieces: u64,
    /// Bytes that were the process's own, or that counted as such.
    pub own: ByteLen,
    /// Threads that waited for a piece.
    pub waits: u64,
    /// How long all of them waited, at most: a thread counts from when its piece was protected.
    pub waited: Duration,
    /// Longest time that a piece was protected.
    pub longest: Duration,
}

/// Moves the memory of one process.
#[derive(Debug)]
pub struct Mover {
    process: Arc<Process>,
    context: FaultContext,
    pagemap: File,
    memory: File,
    files: Vec<OwnFile>,
    /// Last one first.
    batches: Vec<Batch>,
    events: EventBatch,
    part: Vec<u8>,
    moved: Moved,
    standby: Option<Standby>,
    /// The mistake that tests look for.
    #[cfg(test)]
    unprotected: bool,
}

impl Mover {
    /// Asks the running kernel.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] names what is missing.
    pub fn supported() -> Result<()> {
        UffdFeatures::WriteProtection.check()
    }

    /// Prepares to move `parts` to `files` (in the order of `file_index`). Nothing is changed yet, but that mappings which an attempt that
    /// was cut off has left aside are taken away: `strays`.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`]; those of [`create_uffd`]; [`MemoryError::Proc`].
    pub fn new(
        process: Arc<Process>,
        parts: &[PrivatePart],
        files: Vec<OwnFile>,
        strays: &[(Hva, ByteLen)],
    ) -> Result<Self> {
        Self::in_pieces(process, parts, files, strays, PieceSize::allowed())
    }

    fn in_pieces(
        process: Arc<Process>,
        parts: &[PrivatePart],
        files: Vec<OwnFile>,
        strays: &[(Hva, ByteLen)],
        size: PieceSize,
    ) -> Result<Self> {
        let open = |name: &str| {
            let path = process.path(name);
            File::open(&path).map_err(|source| MemoryError::Proc { path, source })
        };
        let (pagemap, memory) = (open("pagemap")?, open("mem")?);
        standing::unmap_all(&process, strays)?;
        // Ours only: writers must go on if we die.
        let remote = create_uffd(&process, UffdFeatures::WriteProtection, Keep::OursOnly)?;
        let mut batches: Vec<Batch> = batches(parts, size);
        batches.reverse();
        Ok(Self {
            process,
            context: FaultContext::new(remote),
            pagemap,
            memory,
            files,
            batches,
            events: EventBatch::new(EVENTS),
            part: vec![0; ByteLen(PART).as_usize()],
            moved: Moved::default(),
            standby: None,
            #[cfg(test)]
            unprotected: false,
        })
    }

    /// With a second process, which keeps protection up for a moment if this one is killed: then the process may run while it is moved.
    /// `program` calls [`stand_by`] when its first argument is [`STAND_BY`].
    ///
    /// # Errors
    /// [`MemoryError::System`] if it cannot be started.
    pub fn with_standby(mut self, program: &Path) -> Result<Self> {
        self.standby = Some(Standby::start(program, self.context.as_fd())?);
        Ok(self)
    }

    /// Moves the next few pieces: 2 ms or so, for which one thread of the process that sleeps anyway is held. False when none is left.
    ///
    /// # Errors
    /// [`MemoryError`]; all memory is whole then, some of it private.
    pub fn step(&mut self) -> Result<bool> {
        let Some(batch) = self.batches.pop() else { return Ok(false) };
        // First of all: a thread that waits for one of our pieces could not be stopped.
        let mut injector = Injector::attach(&self.process)?;
        if let Some(standby) = &mut self.standby {
            standby.holding(self.process.pid(), injector.thread())?;
        }
        let done = self.move_batch(&mut injector, &batch);
        injector.release()?;
        done.map(|()| self.is_left())
    }

    /// The process may run while it is moved, as far as our own end goes.
    #[must_use]
    pub const fn may_run(&self) -> bool {
        self.standby.is_some()
    }

    /// Something is left to be moved.
    #[must_use]
    pub const fn is_left(&self) -> bool {
        !self.batches.is_empty()
    }

    /// What is left to be moved.
    #[must_use]
    pub fn left(&self) -> ByteLen {
        ByteLen(self.batches.iter().map(|batch| batch.whole.len.0).sum())
    }

    /// What was moved so far.
    #[must_use]
    pub const fn moved(&self) -> Moved {
        self.moved
    }

    fn move_batch(&mut self, injector: &mut Injector, batch: &Batch) -> Result<()> {
        let whole = batch.whole;
        let replacement = Replacement {
            at: whole,
            fd_in_qemu: self.files[whole.file_index].fd_in_qemu,
            sharing: Sharing::Shared,
            hints: batch.hints.clone(),
        };
        let aside = map_aside(injector, &replacement)?;
        let mut done = ByteLen(0);
        let moved = advise(injector, aside, whole.len, &batch.hints)
            .and_then(|()| self.context.register_write_protection(&[whole]))
            .and_then(|()| {
                batch.pieces.iter().try_for_each(|piece| {
                    self.move_piece(injector, aside + done.0, piece, batch.filled)?;
                    done.0 += piece.len.0;
                    Ok(())
                })
            });
        if moved.is_err() {
            self.let_go(injector, aside + done.0, rest_of(whole, done))?;
        }
        moved
    }

    fn move_piece(
        &mut self,
        injector: &mut Injector,
        aside: u64,
        piece: &QemuMapping,
        filled: bool,
    ) -> Result<()> {
        let protected = Instant::now();
        #[cfg(test)]
        let protect = !self.unprotected;
        #[cfg(not(test))]
        let protect = true;
        if protect {
            self.context.protect(piece.hva, piece.len)?;
        }
        self.copy_own(piece, filled)?;
        #[cfg(test)]
        if self.unprotected {
            std::thread::sleep(Duration::from_micros(500));
        }
        move_over(injector, aside, piece.len, piece.hva)?;
        let waits = self.waiting_in(piece)?;
        self.context.wake(piece.hva, piece.len)?;
        let took = protected.elapsed();
        self.moved.pieces += 1;
        self.moved.waits += waits;
        self.moved.waited += took * u32::try_from(waits).unwrap_or(u32::MAX);
        self.moved.longest = self.moved.longest.max(took);
        Ok(())
    }

    /// Copies what the process has written to the file. Nobody writes there meanwhile.
    fn copy_own(&mut self, piece: &QemuMapping, filled: bool) -> Result<()> {
        let whole = [(piece.hva, piece.len)];
        let runs = if filled { own_runs(&self.pagemap, piece)? } else { whole.to_vec() };
        let target = &self.files[piece.file_index].mapping;
        for (hva, len) in runs {
            self.moved.own.0 += len.0;
            let start = piece.file_offset.0 + (hva.0 - piece.hva.0);
            let mut at = 0;
            while at < len.0 {
                let part = &mut self.part[..ByteLen((len.0 - at).min(PART)).as_usize()];
                self.memory
                    .read_exact_at(part, hva.0 + at)
                    .map_err(|source| MemoryError::Proc { path: self.process.path("mem"), source })?;
                let range = ByteRange::new(FileOffset(start + at), ByteLen(part.len() as u64));
                target.populate(target.page_size().run_of(range))?;
                target.copy_in(range.start, part)?;
                at += range.len.0;
            }
        }
        Ok(())
    }

    /// Threads that are waiting for the piece. Events of other kinds are read, too: whoever discards memory waits for that.
    fn waiting_in(&mut self, piece: &QemuMapping) -> Result<u64> {
        let mut waits = 0;
        while self.context.read_events(&mut self.events)? > 0 {
            let here = |event: &&UffdEvent| matches!(event, UffdEvent::Fault { hva, .. } if piece.to_file(*hva).is_some());
            waits += self.events.events().iter().filter(here).count() as u64;
        }
        Ok(waits)
    }

    /// After an error: what was not moved stays private, and whoever waits for it goes on.
    fn let_go(&self, injector: &mut Injector, aside: u64, rest: QemuMapping) -> Result<()> {
        self.context.unregister(&[rest])?;
        // Unregistering lifts protection and wakes nobody.
        self.context.wake(rest.hva, rest.len)?;
        unmap(injector, aside, rest.len)
    }
}

/// What is left of a mapping behind its first `done` bytes.
const fn rest_of(whole: QemuMapping, done: ByteLen) -> QemuMapping {
    QemuMapping {
        hva: whole.hva.add(done),
        len: ByteLen(whole.len.0 - done.0),
        file_offset: FileOffset(whole.file_offset.0 + done.0),
        ..whole
    }
}
