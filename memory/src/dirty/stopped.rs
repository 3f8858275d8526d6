//! The scan that a stopped guest waits for, shared by several threads: the processors that ran the guest are free.
//!
//! The memory is cut into pieces. Each thread takes the next one until none is left, so that the guest waits for no thread that a busy host
//! does not let run: the others do its work.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::{io, thread};

use crate::error::{MemoryError, Result};
use crate::pagemap::Pagemap;
use crate::units::{ByteLen, Hva};

/// More would wait for each other: all read page tables of one process.
const MOST_THREADS: usize = 8;
/// Takes some 0.1 ms if it is mapped by pages of 4 KiB: twice of what it takes to start a thread.
const PIECE: u64 = 128 << 20;

/// A part of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Number of the mapping.
    pub index: usize,
    pub hva: Hva,
    pub len: ByteLen,
}

/// How many threads may take part. To ask reads files of control groups: not while a guest waits.
pub(super) fn threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS)
}

/// What was written since it was protected, in order, found by at most `threads` threads.
pub(super) fn scan(pagemap: &mut Pagemap, parts: &[Part], threads: usize) -> Result<Vec<Part>> {
    let pieces = pieces(parts);
    let threads = threads.min(pieces.len());
    let work = Arc::new(Work::new(pieces));
    for _ in 1..threads {
        // Without them it takes longer. Nobody waits for their end: one that starts late finds nothing left.
        let Ok(mut pagemap) = pagemap.another() else { break };
        let work = Arc::clone(&work);
        let started =
            thread::Builder::new().name("vmove-scan".to_owned()).spawn(move || work.take_part(&mut pagemap));
        if started.is_err() {
            break;
        }
    }
    work.take_part(pagemap);
    work.wait()
}

/// Pieces of memory, and what was found in each.
#[derive(Debug)]
struct Work {
    pieces: Vec<Part>,
    /// The next that nobody has taken.
    next: AtomicUsize,
    found: Mutex<Vec<(usize, Result<Vec<Part>>)>>,
    all_found: Condvar,
}

impl Work {
    fn new(pieces: Vec<Part>) -> Self {
        let found = Mutex::new(Vec::with_capacity(pieces.len()));
        Self { pieces, next: AtomicUsize::new(0), found, all_found: Condvar::new() }
    }

    fn take_part(&self, pagemap: &mut Pagemap) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = self.pieces.get(number) else { return };
            let mut taken = Taken { work: self, number, found: None };
            taken.found = Some(written(pagemap, piece));
        }
    }

    fn wait(&self) -> Result<Vec<Part>> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        while found.len() < self.pieces.len() {
            found = self.all_found.wait(found).unwrap_or_else(PoisonError::into_inner);
        }
        found.sort_unstable_by_key(|(number, _)| *number);
        let mut all = Vec::new();
        for (_, found) in found.drain(..) {
            all.extend(found?);
        }
        Ok(all)
    }
}

/// A piece that a thread works on. Its end is told whatever happens: the guest waits for it.
struct Taken<'a> {
    work: &'a Work,
    number: usize,
    found: Option<Result<Vec<Part>>>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let panicked = || {
            Err(MemoryError::System {
                what: "a scan for written pages",
                source: io::Error::other("it panicked"),
            })
        };
        let found = self.found.take().unwrap_or_else(panicked);
        self.work.found.lock().unwrap_or_else(PoisonError::into_inner).push((self.number, found));
        self.work.all_found.notify_one();
    }
}

fn written(pagemap: &mut Pagemap, piece: &Part) -> Result<Vec<Part>> {
    let mut found = Vec::new();
    pagemap.written(piece.hva, piece.len, |hva, len| found.push(Part { index: piece.index, hva, len }))?;
    Ok(found)
}

/// At most [`PIECE`] each.
fn pieces(parts: &[Part]) -> Vec<Part> {
    let mut pieces = Vec::new();
    for part in parts {
        for at in (0..part.len.0).step_by(usize::try_from(PIECE).unwrap_or(usize::MAX)) {
            let len = ByteLen(PIECE.min(part.len.0 - at));
            pieces.push(Part { index: part.index, hva: part.hva.add(ByteLen(at)), len });
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_byte_is_in_one_piece_and_in_order(lens in prop::collection::vec(1_u64..400, 0..20)) {
            let mut at = 0;
            let parts: Vec<_> = lens
                .iter()
                .enumerate()
                .map(|(index, mib)| {
                    let part = Part { index, hva: Hva(at), len: ByteLen(mib << 20) };
                    at += (mib << 20) + (2 << 20);
                    part
                })
                .collect();
            let mut again: Vec<Part> = Vec::new();
            for piece in pieces(&parts) {
                prop_assert!(piece.len.0 > 0 && piece.len.0 <= PIECE, "{:?}", piece);
                match again.last_mut() {
                    Some(last) if last.index == piece.index => {
                        prop_assert_eq!(last.hva.add(last.len), piece.hva);
                        last.len.0 += piece.len.0;
                    }
                    _ => again.push(piece),
                }
            }
            prop_assert_eq!(again, parts);
        }
    }

    #[test]
    fn a_thread_that_panics_keeps_nobody_waiting() {
        let part = Part { index: 0, hva: Hva(0), len: ByteLen(PIECE) };
        let work = Work::new(vec![part]);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _taken = Taken { work: &work, number: 0, found: None };
            panic!("in the middle of it");
        }));
        assert!(panicked.is_err());
        let error = work.wait().unwrap_err();
        assert!(error.to_string().contains("scan for written pages"), "{error}");
    }
}
