//! Hashes of disks that have moved, as both sides compute them for `--verify`.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use vmove_node::record::VmRecord;
use vmove_qmp::disks::{PIECE, compared};
use vmove_qmp::nbd::{ALLOCATION, Nbd, NbdError, ZERO};
use vmove_types::disk::{DiskReport, DiskVerified};
use xxhash_rust::xxh3::xxh3_64;

use crate::page_hash::{GIVEN_BACK, ZERO_PAGE};
use crate::proto::message::ChunkHashes;

/// Disks are compared in chunks of so many bytes; the last may be shorter.
pub(crate) const CHUNK: u64 = PIECE;
/// Chunks that are read at once: 2 MiB.
const AT_ONCE: u64 = 32;
/// How much of a disk QEMU is asked for holes at once.
const LOOK_AHEAD: u64 = 1 << 30;

/// Where QEMU lets a VM's disks be read.
pub(crate) fn socket(vm: &VmRecord) -> PathBuf {
    vm.vm_dir.join("vmove-verify.sock")
}

/// Chunks of a disk of so many bytes.
pub(crate) const fn chunks_of(size: u64) -> u64 {
    size.div_ceil(CHUNK)
}

/// As [`page_hash`](crate::page_hash::page_hash): 1 for zeros, whether or not they take room.
fn chunk_hash(chunk: &[u8]) -> u64 {
    if is_zero(chunk) { ZERO_PAGE } else { xxh3_64(chunk).clamp(2, GIVEN_BACK - 1) }
}

fn is_zero(bytes: &[u8]) -> bool {
    static ZEROS: [u8; 4096] = [0; 4096];
    bytes.chunks(ZEROS.len()).all(|part| part == &ZEROS[..part.len()])
}

/// A disk that is read chunk by chunk.
#[derive(Debug)]
pub(crate) struct Chunks {
    export: Nbd,
    /// What is known of what comes next: until where, and whether it is zeros.
    known: VecDeque<(u64, bool)>,
    buffer: Vec<u8>,
    /// Bytes that were read so far.
    pub read_bytes: u64,
}

impl Chunks {
    /// The disk of this number, behind the socket.
    pub(crate) fn open(socket: &Path, number: usize) -> Result<Self, NbdError> {
        let export = Nbd::open(socket, &compared(number), ALLOCATION)?;
        Ok(Self { export, known: VecDeque::new(), buffer: Vec::new(), read_bytes: 0 })
    }

    pub(crate) const fn size(&self) -> u64 {
        self.export.size()
    }

    /// Hashes of the next chunks, from `first` on: of at least one, and at most of `most`. Holes are not read.
    pub(crate) fn next(&mut self, first: u64, most: u64) -> Result<ChunkHashes, NbdError> {
        let size = self.size();
        let at = first * CHUNK;
        let (until, zeros) = self.known_at(at)?;
        if zeros {
            let whole = if until >= size { chunks_of(size) } else { until / CHUNK };
            let count = whole.saturating_sub(first).min(most);
            if count > 0 {
                return Ok(ChunkHashes::Zeros(count));
            }
        }
        let until = if zeros { at + CHUNK } else { until };
        let count = (chunks_of(until) - first).min(most).min(AT_ONCE);
        let end = ((first + count) * CHUNK).min(size);
        self.buffer.resize(usize::try_from(end - at).unwrap_or(usize::MAX), 0);
        self.export.read(at, &mut self.buffer)?;
        self.read_bytes += end - at;
        let chunk = usize::try_from(CHUNK).unwrap_or(usize::MAX);
        Ok(ChunkHashes::Of(self.buffer.chunks(chunk).map(chunk_hash).collect()))
    }

    /// Until where the disk is of one kind from this place on, and whether that is zeros.
    fn known_at(&mut self, at: u64) -> Result<(u64, bool), NbdError> {
        while self.known.front().is_some_and(|(until, _)| *until <= at) {
            self.known.pop_front();
        }
        if let Some(known) = self.known.front() {
            return Ok(*known);
        }
        let len = (self.size() - at).min(LOOK_AHEAD);
        let mut until = at;
        for extent in self.export.status(at, u32::try_from(len).unwrap_or(u32::MAX))? {
            until += extent.len;
            let zeros = extent.flags & ZERO != 0;
            match self.known.back_mut() {
                Some(last) if last.1 == zeros => last.0 = until,
                _ => self.known.push_back((until, zeros)),
            }
        }
        // The export has said of at least one byte.
        Ok(self.known.front().copied().unwrap_or((until, false)))
    }
}

impl ChunkHashes {
    /// Of how many chunks.
    pub(crate) fn count(&self) -> u64 {
        match self {
            Self::Zeros(count) => *count,
            Self::Of(hashes) => hashes.len() as u64,
        }
    }

    /// The hash of the chunk at this place.
    pub(crate) fn at(&self, place: u64) -> u64 {
        match self {
            Self::Zeros(_) => ZERO_PAGE,
            Self::Of(hashes) => {
                usize::try_from(place).ok().and_then(|place| hashes.get(place)).copied().unwrap_or(0)
            }
        }
    }
}

/// Adds to the reports of disks what was found of them, by their names.
pub(crate) fn tell_verified(disks: &mut [DiskReport], found: &[(String, DiskVerified)]) {
    for disk in disks {
        disk.verified = found.iter().find(|(name, _)| *name == disk.name).map(|(_, one)| one.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_have_one_hash_however_they_are_held() {
        assert_eq!(chunk_hash(&[0; 70_000]), ZERO_PAGE);
        assert_eq!(chunk_hash(&[]), ZERO_PAGE);
        let mut bytes = [0; 5000];
        bytes[4999] = 1;
        assert!(chunk_hash(&bytes) > ZERO_PAGE);
        assert_eq!((ChunkHashes::Zeros(3).count(), ChunkHashes::Zeros(3).at(2)), (3, ZERO_PAGE));
        assert_eq!((ChunkHashes::Of(vec![7]).at(0), ChunkHashes::Of(vec![7]).at(1)), (7, 0));
    }

    #[test]
    fn the_last_chunk_may_be_shorter() {
        assert_eq!([0, 1, CHUNK, CHUNK + 1].map(chunks_of), [0, 1, 1, 2]);
    }
}
