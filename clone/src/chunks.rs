//! What of a template is there: one state for each 4 KiB, in plain atomics. Shared by the thread that receives the template and the one
//! that answers faults; neither ever waits for the other.
//!
//! The bytes of a chunk are written before [`Chunks::landed`]; whoever then finds it [`Need::Whole`] sees them. A chunk that somebody
//! waits for rings a bell when it lands. The waiting thread silences the bell *before* it looks at what it waits for: a chunk that lands
//! after the look rings it again (`loom_no_arrival_is_missed`).

use std::ops::Range;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU8, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU8, Ordering};

use self::bell::Bell;

/// Bytes of a chunk: a page.
pub const CHUNK: u64 = 4096;

/// It is zero: nothing arrives.
const ZERO: u8 = 0;
/// It has not arrived, and nobody asked for it.
const MISSING: u8 = 1;
/// It was asked for, and whoever did waits for [`Chunks::arrivals`].
const WANTED: u8 = 2;
/// It is there, and its checksum was right.
const WHOLE: u8 = 3;

/// Why there are no chunks.
#[derive(Debug, thiserror::Error)]
pub enum ChunksError {
    /// No descriptor to spare.
    #[error("no event descriptor for arrivals: {0}")]
    Bell(#[source] std::io::Error),
    /// Chunks that arrive lie outside of their region.
    #[error("chunks outside of region {0} of a template")]
    Outside(u16),
}

/// The states of all chunks of a template that is on its way.
#[derive(Debug)]
pub struct Chunks {
    regions: Box<[Box<[AtomicU8]>]>,
    bell: Bell,
}

/// What a chunk that is needed now is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// It has not arrived: the caller is the first to need it, and must ask for it.
    Ask,
    /// It was asked for.
    Wait,
    /// It is there.
    Whole,
    /// It is zero.
    Zero,
}

impl Chunks {
    /// Regions of these lengths (bytes), all zero but for `travelling`: region, first chunk, number of chunks.
    ///
    /// # Errors
    /// [`ChunksError`].
    pub fn new(
        lens: &[u64],
        travelling: impl IntoIterator<Item = (u16, u32, u32)>,
    ) -> Result<Self, ChunksError> {
        let zeros = |len: &u64| (0..len.div_ceil(CHUNK)).map(|_| AtomicU8::new(ZERO)).collect();
        let regions: Box<[Box<[AtomicU8]>]> = lens.iter().map(zeros).collect();
        for (region, first, count) in travelling {
            let first = first as usize;
            let cells = regions.get(usize::from(region)).and_then(|r| r.get(first..first + count as usize));
            let cells = cells.ok_or(ChunksError::Outside(region))?;
            cells.iter().for_each(|cell| cell.store(MISSING, Ordering::Relaxed));
        }
        Ok(Self { regions, bell: Bell::new().map_err(ChunksError::Bell)? })
    }

    /// The chunk at `offset` (bytes) of a region is there and verified, and nobody writes to it any more.
    pub fn landed(&self, region: u16, offset: u64) {
        let Some(cell) = self.cell(usize::from(region), offset / CHUNK) else { return };
        // Release: whoever sees it finds the bytes.
        if cell.swap(WHOLE, Ordering::AcqRel) == WANTED {
            self.ring();
        }
    }

    /// Readable when a chunk has arrived that was asked for, or [`Self::ring`] was called.
    #[cfg(not(loom))]
    pub(crate) fn arrivals(&self) -> std::os::fd::BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Wakes who waits for arrivals.
    pub(crate) fn ring(&self) {
        self.bell.ring();
    }

    /// From now on [`Self::arrivals`] tells of what comes later. Look at what you wait for after this, not before.
    pub(crate) fn silence(&self) {
        self.bell.silence();
    }

    /// A chunk is needed now. `None`: there is no such chunk.
    pub(crate) fn need(&self, region: usize, chunk: u64) -> Option<Need> {
        let cell = self.cell(region, chunk)?;
        let asked = cell.compare_exchange(MISSING, WANTED, Ordering::AcqRel, Ordering::Acquire);
        Some(match asked {
            Ok(_) => Need::Ask,
            Err(WANTED) => Need::Wait,
            Err(WHOLE) => Need::Whole,
            Err(_) => Need::Zero,
        })
    }

    /// It could not be asked for after all.
    pub(crate) fn not_asked(&self, region: usize, chunk: u64) {
        if let Some(cell) = self.cell(region, chunk) {
            let _ = cell.compare_exchange(WANTED, MISSING, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// How many chunks from `within.start` on, which is whole or zero, are the same as that one.
    pub(crate) fn alike(&self, region: usize, within: Range<u64>) -> u64 {
        let Some(first) = self.cell(region, within.start) else { return 0 };
        let first = first.load(Ordering::Acquire);
        // Acquire: what is found to be whole is mapped next.
        let same =
            |chunk: &u64| self.cell(region, *chunk).is_some_and(|c| c.load(Ordering::Acquire) == first);
        within.take_while(same).count() as u64
    }

    fn cell(&self, region: usize, chunk: u64) -> Option<&AtomicU8> {
        self.regions.get(region)?.get(usize::try_from(chunk).ok()?)
    }
}

/// A descriptor that a thread waits for among others.
#[cfg(not(loom))]
mod bell {
    use std::io;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    use rustix::event::{EventfdFlags, eventfd};

    #[derive(Debug)]
    pub(super) struct Bell(OwnedFd);

    impl Bell {
        pub(super) fn new() -> io::Result<Self> {
            Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
        }

        pub(super) fn ring(&self) {
            // Fails only when the counter is full, and then it is readable anyway.
            let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
        }

        pub(super) fn silence(&self) {
            let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
        }

        pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }
}

/// As the kernel's event counter behaves: its lock orders what rings and what silences.
#[cfg(loom)]
mod bell {
    use loom::sync::atomic::{AtomicU64, Ordering};

    #[derive(Debug)]
    pub(super) struct Bell(AtomicU64);

    impl Bell {
        #[allow(clippy::unnecessary_wraps)]
        pub(super) fn new() -> std::io::Result<Self> {
            Ok(Self(AtomicU64::new(0)))
        }

        pub(super) fn ring(&self) {
            self.0.fetch_add(1, Ordering::AcqRel);
        }

        pub(super) fn silence(&self) {
            self.0.swap(0, Ordering::AcqRel);
        }

        pub(super) fn rings(&self) -> bool {
            self.0.load(Ordering::Acquire) > 0
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_asked_for_once_and_tells_of_its_arrival_once() {
        let chunks = Chunks::new(&[8 * CHUNK, 4 * CHUNK], [(0, 2, 4), (1, 0, 1)]).unwrap();
        assert_eq!(chunks.need(0, 1), Some(Need::Zero));
        assert_eq!((chunks.need(0, 8), chunks.need(2, 0)), (None, None));
        assert_eq!((chunks.need(0, 3), chunks.need(0, 3)), (Some(Need::Ask), Some(Need::Wait)));
        chunks.not_asked(0, 3);
        assert_eq!(chunks.need(0, 3), Some(Need::Ask));
        let told = || rustix::io::read(chunks.arrivals(), &mut [0_u8; 8]).is_ok();
        chunks.landed(0, 2 * CHUNK);
        assert!(!told(), "nobody waits for it");
        chunks.landed(0, 3 * CHUNK);
        assert!(told());
        chunks.landed(0, 3 * CHUNK);
        assert!(!told());
        assert_eq!(chunks.need(0, 3), Some(Need::Whole));
        assert_eq!(chunks.alike(0, 2..8), 2);
        assert_eq!(chunks.alike(0, 6..8), 2);
        assert_eq!(chunks.alike(0, 0..1), 1);
        Chunks::new(&[CHUNK], [(0, 0, 2)]).unwrap_err();
    }
}

/// Every interleaving of the thread that receives and the one that answers: `./run test loom`.
#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// A template of two chunks, and their bytes: written with no order but what the states give.
    struct World {
        chunks: Chunks,
        bytes: [AtomicU8; 2],
    }

    impl World {
        fn new() -> Arc<Self> {
            let chunks = Chunks::new(&[2 * CHUNK], [(0, 0, 2)]).expect("chunks");
            Arc::new(Self { chunks, bytes: [AtomicU8::new(0), AtomicU8::new(0)] })
        }

        fn land(&self, chunk: u8) {
            self.bytes[usize::from(chunk)].store(7, Ordering::Relaxed);
            self.chunks.landed(0, u64::from(chunk) * CHUNK);
        }

        /// The thread that answers faults looks at a fault: true if it could be answered.
        fn answer(&self, chunk: u8) -> bool {
            let whole = self.chunks.need(0, chunk.into()) == Some(Need::Whole);
            assert!(
                !whole || self.bytes[usize::from(chunk)].load(Ordering::Relaxed) == 7,
                "stale bytes are mapped"
            );
            whole
        }
    }

    #[test]
    fn loom_no_arrival_is_missed() {
        loom::model(|| {
            let world = World::new();
            let receiver = Arc::clone(&world);
            let receiver = thread::spawn(move || {
                receiver.land(0);
                receiver.land(1);
            });
            let mut answered = [world.answer(0), world.answer(1)];
            if world.chunks.bell.rings() {
                world.chunks.silence();
                for chunk in [0, 1] {
                    answered[usize::from(chunk)] |= world.answer(chunk);
                }
            }
            receiver.join().expect("the receiver");
            assert!(answered == [true, true] || world.chunks.bell.rings(), "a fault waits for ever");
            world.chunks.silence();
            assert!(world.answer(0) && world.answer(1));
        });
    }

    #[test]
    fn loom_what_could_not_be_asked_for_is_not_lost() {
        loom::model(|| {
            let world = World::new();
            let receiver = Arc::clone(&world);
            let receiver = thread::spawn(move || receiver.land(0));
            if world.chunks.need(0, 0) == Some(Need::Ask) {
                world.chunks.not_asked(0, 0);
            }
            let seen = world.answer(0);
            receiver.join().expect("the receiver");
            assert!(seen || world.chunks.bell.rings(), "a fault waits for ever");
            assert!(world.answer(0));
        });
    }

    #[test]
    fn loom_chunks_mapped_ahead_have_their_bytes() {
        loom::model(|| {
            let world = World::new();
            let receiver = Arc::clone(&world);
            let receiver = thread::spawn(move || {
                receiver.land(0);
                receiver.land(1);
            });
            if world.answer(0) && world.chunks.alike(0, 0..2) == 2 {
                assert_eq!(world.bytes[1].load(Ordering::Relaxed), 7, "stale bytes are mapped ahead");
            }
            receiver.join().expect("the receiver");
        });
    }
}
