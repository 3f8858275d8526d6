//! Memory with a pattern that each process can work out.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmove_fabric::{Access, Fabric, MemoryArea, Region};
use vmove_spread::{CHUNK, Layout, SpreadError, Target};

/// A mapping that stays until the process ends.
pub fn area(len: usize) -> MemoryArea {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let at =
        unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    // SAFETY: mapped for good, and no reference to it is made.
    unsafe { MemoryArea::new(NonNull::new(at.cast()).unwrap(), len as u64) }
}

/// What a chunk holds; every fourth is zero.
pub fn pattern(chunk: u64) -> [u8; CHUNK as usize] {
    let mut bytes = [0; CHUNK as usize];
    if chunk % 4 == 3 {
        return bytes;
    }
    let mut state = chunk.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in bytes.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    bytes
}

/// A region filled with the pattern.
pub fn patterned(fabric: &dyn Fabric, bytes: u64) -> Region {
    let region = fabric.register(area(usize::try_from(bytes).unwrap()), Access::REMOTE_READ).unwrap();
    for chunk in 0..bytes / u64::from(CHUNK) {
        if chunk % 4 != 3 {
            assert!(region.write_at(chunk * u64::from(CHUNK), &pattern(chunk)));
        }
    }
    region
}

/// Where a host's copy goes, and which chunks were said to be there, and when.
#[derive(Clone)]
pub struct Into {
    pub fabric: Arc<dyn Fabric>,
    pub state: Arc<Mutex<(Vec<Region>, Vec<(u64, Instant)>)>>,
}

impl Into {
    pub fn new(fabric: Arc<dyn Fabric>) -> Self {
        Self { fabric, state: Arc::default() }
    }

    /// Chunks that were said to be there and hold other bytes; how many were said to be there; whether all memory is as it should be.
    pub fn verdict(&self) -> (usize, usize, bool) {
        let state = self.state.lock().unwrap();
        let Some(region) = state.0.first() else { return (0, 0, false) };
        let right = |chunk: u64| {
            let mut bytes = [0; CHUNK as usize];
            assert!(region.read_at(chunk * u64::from(CHUNK), &mut bytes));
            bytes == pattern(chunk)
        };
        let wrong = state.1.iter().filter(|(chunk, _)| !right(*chunk)).count();
        (wrong, state.1.len(), (0..region.len() / u64::from(CHUNK)).all(right))
    }

    /// Whether this chunk was said to be there.
    pub fn has(&self, chunk: u64) -> bool {
        self.state.lock().unwrap().1.iter().any(|(landed, _)| *landed == chunk)
    }

    /// From when the first quarter of the memory was there until all of it was.
    pub fn after_the_first_quarter(&self) -> Duration {
        let state = self.state.lock().unwrap();
        let quarter = state.0.first().map_or(0, |region| region.len() / u64::from(CHUNK) / 4);
        let last = |below: u64| state.1.iter().filter(|(chunk, _)| *chunk < below).map(|(_, at)| *at).max();
        let (first, all) = (last(quarter), last(u64::MAX));
        first.zip(all).map_or(Duration::ZERO, |(first, all)| all - first)
    }
}

impl Target for Into {
    fn regions(&mut self, fabric: &dyn Fabric, layout: &Layout) -> Result<Vec<Region>, SpreadError> {
        let make =
            |len: &u64| Ok(fabric.register(area(usize::try_from(*len).unwrap()), Access::REMOTE_READ)?);
        let regions = layout.regions.iter().map(make).collect::<Result<Vec<_>, SpreadError>>()?;
        self.state.lock().unwrap().0.clone_from(&regions);
        Ok(regions)
    }

    fn landed(&mut self, _: u16, offset: u64) {
        self.state.lock().unwrap().1.push((offset / u64::from(CHUNK), Instant::now()));
    }
}
