//! Frames on their way to one host.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Bytes that may wait before senders must.
const ROOM: usize = 4 << 20;

/// A queue ordered by the time at which frames are due, and by arrival where that is the same.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: BinaryHeap<Reverse<Waiting>>,
    bytes: usize,
    /// Arrivals so far.
    count: u64,
    open: bool,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    due: Instant,
    number: u64,
    frame: Arc<[u8]>,
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'g>(&self, guard: MutexGuard<'g, State>) -> MutexGuard<'g, State> {
        self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// A host is there.
    pub(super) fn open(&self) {
        self.lock().open = true;
    }

    /// The host is gone: what waits for it is lost, and its writer ends.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        *state = State { count: state.count, ..State::default() };
        self.changed.notify_all();
    }

    /// Adds a frame; waits for room while the host is there. A frame for a host that is not there is lost.
    pub(super) fn push(&self, due: Instant, frame: Arc<[u8]>) {
        let mut state = self.lock();
        while state.open && state.bytes > ROOM {
            state = self.wait(state);
        }
        if !state.open {
            return;
        }
        state.bytes += frame.len();
        state.count += 1;
        let number = state.count;
        state.waiting.push(Reverse(Waiting { due, number, frame }));
        self.changed.notify_all();
    }

    /// Sends frames when they are due, until closed or the host hangs up.
    pub(super) fn write_to(&self, mut stream: UnixStream) {
        let mut bytes = Vec::with_capacity(256 << 10);
        while self.collect(&mut bytes) {
            if stream.write_all(&bytes).is_err() {
                self.close();
                return;
            }
        }
    }

    /// Waits until something is due and puts it into `bytes`; false at the end.
    fn collect(&self, bytes: &mut Vec<u8>) -> bool {
        bytes.clear();
        let mut state = self.lock();
        loop {
            if !state.open {
                return false;
            }
            let now = Instant::now();
            while bytes.len() < 128 << 10 && state.waiting.peek().is_some_and(|first| first.0.due <= now) {
                let Some(Reverse(Waiting { frame, .. })) = state.waiting.pop() else { break };
                state.bytes -= frame.len();
                bytes.extend(u32::try_from(frame.len()).unwrap_or(0).to_be_bytes());
                bytes.extend_from_slice(&frame);
            }
            if !bytes.is_empty() {
                self.changed.notify_all();
                return true;
            }
            state = match state.waiting.peek().map(|first| first.0.due) {
                None => self.wait(state),
                Some(due) => {
                    let time = due.saturating_duration_since(now);
                    self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
