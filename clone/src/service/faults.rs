//! The thread that answers faults. It waits for nothing but events and arrivals: no QMP, no disk, no logging, no lock that such work
//! holds, and after its start it allocates nothing. A QEMU's main loop may itself be stopped on a page.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::{Timespec, epoll};
use vmove_fabric::ThreadOptions;
use vmove_memory::{ByteLen, EventBatch, Hva, MemoryError, Outcome, PageSize, UffdEvent};
use vmove_types::time::Mono;

use super::{ARRIVALS, Ask, Served, Shared};
use crate::chunks::{CHUNK, Need};

/// Events taken from the kernel at once, of one child.
const EVENTS: usize = 64;
/// Threads that wait for a missing chunk: those of all children of a host.
const WAITING: usize = 8192;
/// What is mapped in one answer, at most: a huge page's worth.
const AHEAD: u64 = (2 << 20) / CHUNK;
/// How long the thread sleeps if nothing happens.
const LOOK_AROUND: i64 = 200_000_000;
/// How long it sleeps before it tries again what the kernel could not do at once.
const AGAIN: i64 = 200_000;

/// The running thread; joined when dropped (set `stopping` and ring first).
#[derive(Debug)]
pub(super) struct FaultThread(Option<std::thread::JoinHandle<()>>);

impl Drop for FaultThread {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}

pub(super) fn start(shared: &Arc<Shared>, ask: Ask) -> std::io::Result<FaultThread> {
    let shared = Arc::clone(shared);
    let thread = ThreadOptions::urgent("vmove-fork-f").spawn(move |_| {
        Server {
            shared: &shared,
            ask,
            events: EventBatch::new(EVENTS),
            waiting: Vec::with_capacity(WAITING),
            again: false,
        }
        .run();
    })?;
    Ok(FaultThread(Some(thread)))
}

/// A fault that is not answered yet.
#[derive(Debug, Clone, Copy)]
struct Fault {
    child: usize,
    hva: Hva,
    region: usize,
    chunk: u64,
    /// Until the end of what may be mapped with it, in chunks.
    ahead: u64,
    since: Mono,
}

/// What became of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Done,
    /// Its chunk is on its way.
    Waits,
    /// The kernel or the ring had no room: look at it again soon.
    Again,
}

struct Server<'a> {
    shared: &'a Shared,
    ask: Ask,
    events: EventBatch,
    waiting: Vec<Fault>,
    again: bool,
}

impl Server<'_> {
    fn run(mut self) {
        let nothing =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(ARRIVALS) };
        let mut ready = [nothing; 64];
        while !self.shared.stopping.load(Ordering::Relaxed) {
            let nap = Timespec { tv_sec: 0, tv_nsec: if self.again { AGAIN } else { LOOK_AROUND } };
            // Interrupted by a signal: one look around.
            let count = epoll::wait(&self.shared.epoll, &mut ready, Some(&nap)).unwrap_or(0);
            let mut arrived = std::mem::take(&mut self.again);
            for event in &ready[..count] {
                match event.data.u64() {
                    ARRIVALS => {
                        self.shared.chunks.silence();
                        arrived = true;
                    }
                    child => self.take_events(usize::try_from(child).unwrap_or(usize::MAX)),
                }
            }
            if arrived {
                self.answer_waiting();
            }
        }
    }

    fn take_events(&mut self, child: usize) {
        let Some(served) = self.shared.children.get(child).and_then(|c| c.get()) else { return };
        let read = served.context.read_events(&mut self.events);
        let now = Mono::now();
        let mut index = 0;
        while let Some(event) = self.events.events().get(index).copied() {
            index += 1;
            // What QEMU discards of a private mapping is there again as the template has it, when it is touched.
            if let UffdEvent::Fault { hva, .. } = event {
                self.take(child, served, hva, now);
            }
        }
        if let Err(error) = read {
            fail(served, &error);
        }
    }

    fn take(&mut self, child: usize, served: &Served, hva: Hva, since: Mono) {
        let Some((region, chunk, ahead)) = locate(served, hva) else { return wake(served, hva) };
        let fault = Fault { child, hva, region, chunk, ahead, since };
        let answer = self.answer(served, &fault);
        if answer == Answer::Done {
            return self.shared.latencies.count_other();
        }
        if self.waiting.len() == WAITING {
            // It faults again, until there is room.
            return wake(served, hva);
        }
        self.waiting.push(fault);
        self.again |= answer == Answer::Again;
    }

    /// Answers what waits and can be answered now.
    fn answer_waiting(&mut self) {
        let mut index = 0;
        while let Some(fault) = self.waiting.get(index).copied() {
            let Some(served) = self.shared.children.get(fault.child).and_then(|c| c.get()) else { return };
            match self.answer(served, &fault) {
                Answer::Done => {
                    self.shared.latencies.record(Mono::now().since(fault.since));
                    self.waiting.swap_remove(index);
                    continue;
                }
                Answer::Waits => {}
                Answer::Again => self.again = true,
            }
            index += 1;
        }
    }

    fn answer(&self, served: &Served, fault: &Fault) -> Answer {
        let Fault { hva, region, chunk, ahead, .. } = *fault;
        let chunks = &self.shared.chunks;
        let outcome = match chunks.need(region, chunk) {
            None => return Answer::Done,
            Some(Need::Ask) => {
                let number = u16::try_from(region).unwrap_or(u16::MAX);
                if (self.ask)(number, chunk * CHUNK) {
                    return Answer::Waits;
                }
                chunks.not_asked(region, chunk);
                return Answer::Again;
            }
            Some(Need::Wait) => return Answer::Waits,
            Some(Need::Whole) => {
                let len = ByteLen(chunks.alike(region, chunk..chunk + ahead) * CHUNK);
                served.context.continue_ahead(hva, len, PageSize::Base4K)
            }
            Some(Need::Zero) => {
                let len = ByteLen(chunks.alike(region, chunk..chunk + ahead) * CHUNK);
                served.context.zero_ahead(hva, len, PageSize::Base4K)
            }
        };
        match outcome {
            Ok(Outcome::Retry { .. }) => return Answer::Again,
            // It was there: somebody has punched the template.
            Ok(Outcome::Hole { .. }) => {
                fail_because(served, || format!("the template has lost a page that had arrived, at {hva}"));
            }
            Ok(Outcome::Mapped(_) | Outcome::AlreadyMapped | Outcome::Gone) => {}
            Err(error) => fail(served, &error),
        }
        Answer::Done
    }
}

/// Region and chunk of an address in a child, and how many chunks an answer may be for.
fn locate(served: &Served, hva: Hva) -> Option<(usize, u64, u64)> {
    let mapping = served.mappings.iter().find(|m| m.hva <= hva && hva < m.end())?;
    let chunk = mapping.to_file(hva)?.0 / CHUNK;
    let end = mapping.file_range().end().0 / CHUNK;
    let ahead = AHEAD - chunk % AHEAD;
    Some((mapping.file_index, chunk, ahead.min(end - chunk)))
}

fn wake(served: &Served, hva: Hva) {
    if let Err(error) = served.context.wake(hva, ByteLen(CHUNK)) {
        fail(served, &error);
    }
}

/// A child that cannot be served is ended: it must not wait for ever, nor read what is not there.
fn fail(served: &Served, error: &MemoryError) {
    fail_because(served, || error.to_string());
}

fn fail_because(served: &Served, why: impl FnOnce() -> String) {
    if served.process.alive() && served.failed.set(why()).is_ok() {
        let _ = served.process.kill();
    }
}
