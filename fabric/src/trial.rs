//! A connection tried out: how long a READ takes, and how many bytes cross in a second; and, where the back end has
//! multicast, how many datagrams get lost.
//!
//! One side [`answer`]s, the other [`measure`]s. It works on any back end.
//!
//! Rules (for the `unsafe` in this file):
//! 1. A `Buffer` owns its memory and drops the region over it first; all other use of the memory is by atomics.
#![allow(unsafe_code)]

mod group;

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::{
    Access, CompletionKind, Completions, Endpoint, Fabric, FabricError, MemoryArea, Multicast, ReadSegment,
    Region, RemoteRegion, RemoteSlice, WrId,
};
pub use group::Datagrams;
#[cfg(feature = "fuzzing")]
pub(crate) use group::any_message;

/// Bytes that one side offers to be read.
const LEN: u64 = 4 << 20;
/// Bytes of a small READ: a page.
const SMALL: u32 = 4096;
/// Bytes of a large one.
const LARGE: u32 = 256 << 10;
/// Large READs under way at a time.
const DEPTH: usize = 8;
/// Small READs measured at most, and the time for them, and for large ones.
const SAMPLES: usize = 1000;
const MEASURING_INTERVAL: Duration = Duration::from_secs(1);
/// Nothing came for this long: the other side hangs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a side answers at most.
const ANSWERING_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of the message that says where the memory is.
const OFFER: usize = 24;

/// What a trial found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Small READs that were timed, one after the other.
    pub samples: usize,
    /// Median time of a READ of 4 KiB in microseconds.
    pub read_4k_p50_us: f64,
    /// Time that one in a hundred exceeds.
    pub read_4k_p99_us: f64,
    /// Bytes per second by READs of 256 KiB, 8 at a time.
    pub read_bytes_per_s: f64,
    /// Datagrams to a group that the other side had joined, or why there were none; `None` without multicast.
    pub datagrams: Option<Result<Datagrams, String>>,
}

/// Memory of this side.
#[derive(Debug)]
struct Buffer {
    // Order matters: deregistered before it is freed.
    region: Region,
    words: Box<[AtomicU64]>,
}

impl Buffer {
    fn new(fabric: &dyn Fabric, access: Access, value: u64) -> Result<Self, FabricError> {
        let words: Box<[AtomicU64]> = (0..LEN / 8).map(|_| AtomicU64::new(value)).collect();
        // SAFETY: rule 1.
        let area = unsafe { MemoryArea::new(NonNull::from(&words[0]).cast(), LEN) };
        Ok(Self { region: fabric.register(area, access)?, words })
    }
}

/// Lets the other side read, until it closes the connection, and counts its datagrams.
///
/// # Errors
/// The connection or the registration failed.
pub fn answer(
    fabric: &dyn Fabric,
    multicast: Option<&dyn Multicast>,
    mut endpoint: Box<dyn Endpoint>,
) -> Result<(), FabricError> {
    // Not zero: zeros need not cross.
    let buffer = Buffer::new(fabric, Access::REMOTE_READ, u64::MAX)?;
    let remote = buffer.region.remote();
    let mut offer = [0; OFFER];
    offer[..8].copy_from_slice(&remote.addr.to_le_bytes());
    offer[8..16].copy_from_slice(&remote.len.to_le_bytes());
    offer[16..].copy_from_slice(&remote.rkey.to_le_bytes());
    endpoint.post_send(WrId(0), &offer).map_err(|error| FabricError::protocol(error.to_string()))?;
    endpoint.flush()?;
    let mut member = group::Member::new(multicast);
    let (mut done, begun) = (Completions::default(), Instant::now());
    while begun.elapsed() < ANSWERING_TIMEOUT {
        match endpoint.poll(&mut done) {
            Ok(0) => endpoint.wait(Some(Duration::from_millis(500)))?,
            Ok(_) => {
                for completion in done.drain() {
                    let CompletionKind::Received(message) = completion.kind else { continue };
                    let Some(words) = member.answer(&message) else { continue };
                    let posted = endpoint.post_send(WrId(0), &words);
                    posted.map_err(|error| FabricError::protocol(error.to_string()))?;
                    endpoint.flush()?;
                }
            }
            Err(FabricError::PeerClosed { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Measures READs from the side that answers, then datagrams to it. Takes two seconds and a little, one more with multicast.
///
/// # Errors
/// The connection or the registration failed, or the other side does not answer as it should.
pub fn measure(
    fabric: &dyn Fabric,
    multicast: Option<&dyn Multicast>,
    mut endpoint: Box<dyn Endpoint>,
) -> Result<Figures, FabricError> {
    let buffer = Buffer::new(fabric, Access::LOCAL, 0)?;
    let mut trial = Trial { endpoint: &mut *endpoint, buffer: &buffer, done: Completions::default() };
    let remote = trial.offer()?;
    let mut times = Vec::with_capacity(SAMPLES);
    let begun = Instant::now();
    while times.len() < SAMPLES && (begun.elapsed() < MEASURING_INTERVAL || times.is_empty()) {
        let at = (times.len() as u64 * u64::from(SMALL)) % LEN;
        let posted = Instant::now();
        trial.post(&remote, at, SMALL)?;
        trial.wait()?;
        times.push(posted.elapsed().as_secs_f64() * 1e6);
    }
    if buffer.words[..(SMALL / 8) as usize].iter().any(|word| word.load(Ordering::Relaxed) != u64::MAX) {
        return Err(FabricError::protocol("a READ brought other bytes than the peer has"));
    }
    times.sort_by(f64::total_cmp);
    let (begun, mut bytes, mut under_way, mut at) = (Instant::now(), 0_u64, 0, 0);
    loop {
        while under_way < DEPTH && begun.elapsed() < MEASURING_INTERVAL {
            trial.post(&remote, at, LARGE)?;
            at = (at + u64::from(LARGE)) % LEN;
            under_way += 1;
        }
        if under_way == 0 {
            break;
        }
        let came = trial.wait()?;
        under_way -= came;
        bytes += came as u64 * u64::from(LARGE);
    }
    #[allow(clippy::cast_precision_loss)] // far below 2^52
    let read_bytes_per_s = bytes as f64 / begun.elapsed().as_secs_f64();
    let datagrams = multicast.map(|multicast| {
        group::send(&mut trial, multicast, read_bytes_per_s).map_err(|error| group::with_cause(&error))
    });
    Ok(Figures {
        samples: times.len(),
        read_4k_p50_us: times[times.len() / 2],
        read_4k_p99_us: times[times.len() * 99 / 100],
        read_bytes_per_s,
        datagrams,
    })
}

struct Trial<'a> {
    endpoint: &'a mut dyn Endpoint,
    buffer: &'a Buffer,
    done: Completions,
}

impl Trial<'_> {
    /// Waits for the other side's word where its memory is.
    fn offer(&mut self) -> Result<RemoteRegion, FabricError> {
        let message = self.next(|kind| match kind {
            CompletionKind::Received(bytes) => Some(bytes.clone()),
            _ => None,
        })?;
        let number = |at: usize| -> Option<u64> {
            Some(u64::from_le_bytes(message.get(at..at + 8)?.try_into().ok()?))
        };
        match (number(0), number(8), number(16)) {
            (Some(addr), Some(LEN), Some(rkey)) => Ok(RemoteRegion { addr, len: LEN, rkey }),
            _ => Err(FabricError::protocol("no offer of memory where one should be")),
        }
    }

    fn post(&mut self, remote: &RemoteRegion, at: u64, len: u32) -> Result<(), FabricError> {
        let local = self.buffer.region.local(at, len);
        let local = local.ok_or_else(|| FabricError::protocol("a READ beyond the trial's memory"))?;
        let remote = RemoteSlice { addr: remote.addr.wrapping_add(at), rkey: remote.rkey };
        let posted = self.endpoint.post_read(WrId(at), &[ReadSegment { remote, local }]);
        posted.map_err(|error| FabricError::protocol(error.to_string()))?;
        self.endpoint.flush()
    }

    /// Waits until READs have ended; how many.
    fn wait(&mut self) -> Result<usize, FabricError> {
        self.next(|kind| matches!(kind, CompletionKind::Read { .. }).then_some(()))?;
        let mut ended = 1; // the first was taken out
        for completion in self.done.drain() {
            if let Err(status) = completion.status {
                return Err(FabricError::protocol(format!("a READ was refused: {status}")));
            }
            ended += 1;
        }
        Ok(ended)
    }

    fn next<T>(&mut self, wanted: impl Fn(&CompletionKind) -> Option<T>) -> Result<T, FabricError> {
        let begun = Instant::now();
        loop {
            if self.endpoint.poll(&mut self.done)? == 0 {
                let waited = begun.elapsed();
                if waited > ANSWER_TIMEOUT {
                    return Err(FabricError::timeout("an answer in a trial", waited));
                }
                self.endpoint.wait(Some(Duration::from_millis(100)))?;
                continue;
            }
            let mut rest = self.done.drain();
            let first = rest.next();
            let kept: Vec<_> = rest.collect();
            for completion in kept {
                self.done.push(completion);
            }
            let Some(first) = first else { continue };
            if let Err(status) = first.status {
                return Err(FabricError::protocol(format!("a READ was refused: {status}")));
            }
            if let Some(found) = wanted(&first.kind) {
                return Ok(found);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;

    use super::*;
    use crate::Class;
    use crate::tcp::{TcpFabric, TcpOptions};

    #[test]
    fn figures_are_those_of_reads_that_happened() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let fabric = Arc::new(TcpFabric::new(TcpOptions::default()).unwrap());
        let theirs = Arc::clone(&fabric);
        let answering = std::thread::spawn(move || {
            answer(&*theirs, None, theirs.adopt(accepted, Class::Urgent).unwrap())
        });
        let figures = measure(&*fabric, None, fabric.adopt(dialled, Class::Urgent).unwrap()).unwrap();
        answering.join().unwrap().unwrap();
        assert!(figures.samples > 0 && figures.read_4k_p50_us > 0.0, "{figures:?}");
        assert!(figures.read_4k_p99_us >= figures.read_4k_p50_us, "{figures:?}");
        assert!(figures.read_bytes_per_s > 1e6, "{figures:?}");
        assert_eq!(figures.datagrams, None);
    }
}
