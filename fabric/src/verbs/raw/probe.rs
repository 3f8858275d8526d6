//! A page to try a new connection on: the peer reads ours, we read the peer's.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::device::Domain;
use super::queue::{Ended, Outcome, Post, Qp};
use super::registered::{Held, Mr};
use crate::region::{Access, MemoryArea};
use crate::table::Need;

/// Bytes that cross: a full packet of the largest size there is, so that a path on which only small ones pass is found out.
const LEN: usize = 4096;
/// Words of that.
const WORDS: usize = LEN / 8;

/// Ours, which is full of a number, and behind it room for the peer's.
#[derive(Debug)]
pub(in crate::verbs) struct Probe {
    // Order matters: deregistered before the memory is freed.
    mr: Mr,
    words: Box<[AtomicU64]>,
}

impl Probe {
    /// A page full of `number`.
    pub(in crate::verbs) fn new(domain: &Arc<Domain>, number: u32) -> io::Result<Self> {
        let ours = std::iter::repeat_with(|| AtomicU64::new(u64::from(number))).take(WORDS);
        let words: Box<[AtomicU64]> = ours.chain((0..WORDS).map(|_| AtomicU64::new(0))).collect();
        let start = NonNull::from(&words[0]).cast();
        // SAFETY: the memory is part of the value made below, which drops the registration first, and all use of it is by
        // atomics.
        let area = unsafe { MemoryArea::new(start, 2 * LEN as u64) };
        Ok(Self { mr: Mr::register(domain, area, Access::REMOTE_READ, Held::Pinned)?, words })
    }

    /// Where the peer finds our page.
    pub(in crate::verbs) fn address(&self) -> u64 {
        self.words.as_ptr().expose_provenance() as u64
    }

    /// With which key.
    pub(in crate::verbs) fn key(&self) -> u32 {
        self.mr.rkey()
    }

    /// Reads the peer's page, by its address and key, which must be full of `number`. Gives up after `timeout`, if the device
    /// has not done so.
    ///
    /// # Errors
    /// What the device says, for people.
    pub(in crate::verbs) fn read(
        &self,
        qp: &mut Qp,
        (address, key): (u64, u32),
        number: u32,
        timeout: Duration,
    ) -> Result<(), String> {
        let local = self.address() + LEN as u64;
        let len = u32::try_from(LEN).unwrap_or(0);
        let (lkey, signalled) = (self.mr.lkey(), true);
        let post = Post { id: 0, need: Need::Read, local, lkey, len, remote: address, rkey: key, signalled };
        qp.post(&[post]).map_err(|error| format!("a READ could not be posted: {error}"))?;
        let begun = Instant::now();
        let mut ended: Vec<Ended> = Vec::with_capacity(1);
        while qp.cq.poll(&mut ended).map_err(|error| error.to_string())? == 0 {
            if begun.elapsed() > timeout {
                return Err(format!("a READ of {LEN} bytes was not answered within {timeout:?}"));
            }
            // As long as an ordinary READ takes, look again and again; it is slower only where something is wrong.
            if begun.elapsed() > Duration::from_millis(1) {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        match ended[0].outcome {
            Outcome::Done => {}
            Outcome::Broken(12) => {
                return Err(format!("a READ of {LEN} bytes was not answered; do packets of this size pass?"));
            }
            other => return Err(format!("a READ of {LEN} bytes failed: {other:?}")),
        }
        let right = |word: &AtomicU64| word.load(Ordering::Relaxed) == u64::from(number);
        if self.words[WORDS..].iter().all(right) {
            Ok(())
        } else {
            Err("a READ brought other bytes than the peer has there".to_owned())
        }
    }
}
