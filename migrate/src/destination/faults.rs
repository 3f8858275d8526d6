//! The fault thread: answers the guest's page faults with reads over a connection of its own.
//!
//! Nothing here waits for QMP, disk, logging or a lock that such work holds: QEMU's main loop may itself be stopped on a page. After
//! the start nothing is allocated. What the thread shares with others are atomics: page states, counters, the ring of hints.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use vmove_fabric::{
    Completions, CountersHandle, Endpoint, MAX_SEGMENTS, PostError, ReadSegment, ThreadOptions, WrId,
};
use vmove_memory::{EventBatch, FaultContext, Hva, PageIndex, PageRun, ReadTicket, UffdEvent, Want};

use super::error::{PageError, PagesLost};
use super::fill::{Fill, FillEvent};
use super::guest_memory::{Events, GuestMemory, step_aside};
use super::read_parts::{self, LeftOut};
use super::slow_faults::{Answered, Slowest};
use crate::waiting_faults::Found;
use vmove_types::time::Mono;

/// Events taken from the kernel at once.
const EVENTS: usize = 64;
/// Faults that wait for room on the connection: as many as a QEMU may have threads.
const BACKLOG: usize = 4096;
/// How long the thread sleeps before it looks whether it shall end.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// A running fault thread; joined when dropped (call [`Fill::stop`] first).
#[derive(Debug)]
pub(super) struct FaultThread {
    pub counters: CountersHandle,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for FaultThread {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Starts it. It serves once [`super::guest_memory::GuestMemory::begin_serving`] was called and memory is attached; faults wait until then.
pub(super) fn start(fill: &Arc<Fill>, endpoint: Box<dyn Endpoint>) -> std::io::Result<FaultThread> {
    let counters = endpoint.counters_handle();
    let fill = Arc::clone(fill);
    let thread = ThreadOptions::urgent("vmove-faults").spawn(move |_| {
        let Some(attached) = fill.memory.wait_until_served(|| fill.stopping()) else { return };
        let mut server = Server::new(&fill, &attached.context, endpoint);
        if let Err(event) = server.run() {
            fill.tell(event);
        }
    })?;
    Ok(FaultThread { counters, thread: Some(thread) })
}

/// A fault whose page is being read.
struct Reading {
    block: usize,
    ticket: ReadTicket,
    /// A huge page of which the file has an earlier state.
    old: bool,
    since: Mono,
    /// When its read was handed to the fabric; until then as `since`.
    asked: Mono,
}

/// Takes events from the kernel. A thread of QEMU that gives memory back blocks until its event is read, and until then
/// `UFFDIO_CONTINUE` fails with `EAGAIN`. So the fault thread reads events also while it maps.
struct Reader<'a> {
    context: &'a FaultContext,
    memory: &'a GuestMemory,
    events: EventBatch,
    /// Faults that have not been answered, and since when they wait: one for each thread of QEMU at most.
    faults: VecDeque<(Hva, Mono)>,
    waited: u32,
    slowest: Slowest,
}

impl Reader<'_> {
    /// Takes what there is. Discards are noted at once.
    fn read(&mut self) -> Result<usize, PageError> {
        let count = self.context.read_events(&mut self.events).map_err(PageError::Events)?;
        if count > 0 {
            self.waited = 0;
            let now = Mono::now();
            for event in self.events.events() {
                match *event {
                    UffdEvent::Fault { hva, .. } => self.faults.push_back((hva, now)),
                    UffdEvent::Remove { hva, len } => self.memory.discarded(hva, len),
                }
            }
        }
        Ok(count)
    }
}

impl Events for Reader<'_> {
    fn pending(&mut self) -> Result<(), PageError> {
        if self.read()? == 0 {
            // It has been read, and QEMU has yet to go on.
            step_aside(&mut self.waited);
        }
        Ok(())
    }

    fn answered(&mut self, fault: Answered) {
        self.slowest.note(fault);
    }
}

struct Server<'a> {
    fill: &'a Fill,
    endpoint: Box<dyn Endpoint>,
    reader: Reader<'a>,
    done: Completions,
    slots: Vec<Option<Reading>>,
    segments: Vec<ReadSegment>,
    backlog: VecDeque<Reading>,
}

impl<'a> Server<'a> {
    fn new(fill: &'a Fill, context: &'a FaultContext, endpoint: Box<dyn Endpoint>) -> Self {
        let slots = endpoint.capacity().clamp(1, 64);
        Self {
            fill,
            endpoint,
            reader: Reader {
                context,
                memory: &fill.memory,
                events: EventBatch::new(EVENTS),
                faults: VecDeque::with_capacity(BACKLOG),
                waited: 0,
                slowest: Slowest::default(),
            },
            done: Completions::with_limit(slots),
            slots: (0..slots).map(|_| None).collect(),
            segments: Vec::with_capacity(MAX_SEGMENTS),
            backlog: VecDeque::with_capacity(BACKLOG),
        }
    }

    fn run(&mut self) -> Result<(), FillEvent> {
        let ended = self.serve();
        // What was read while the last pages were mapped is told by nobody again: who serves next finds these pages wanted.
        let _ = self.answer();
        self.fill.memory.slow_faults.merge(&mut self.reader.slowest);
        ended
    }

    fn serve(&mut self) -> Result<(), FillEvent> {
        while !self.fill.stopping() {
            let faults = self.take_events()?;
            self.post_backlog()?;
            self.endpoint.flush()?;
            let got = self.endpoint.poll(&mut self.done)?;
            self.finish()?;
            if faults == 0 && got == 0 {
                self.sleep();
            }
        }
        Ok(())
    }

    fn sleep(&self) {
        let mut link = PollFlags::IN;
        if self.endpoint.wants_write() {
            link |= PollFlags::OUT;
        }
        let link_fd = self.endpoint.wait_fd();
        let uffd = self.reader.context.as_fd();
        let stop = self.fill.stop_fd();
        let mut fds = [
            PollFd::from_borrowed_fd(uffd, PollFlags::IN),
            PollFd::from_borrowed_fd(link_fd, link),
            PollFd::from_borrowed_fd(stop, PollFlags::IN),
        ];
        let limit =
            rustix::event::Timespec { tv_sec: 0, tv_nsec: i64::from(STOP_CHECK_INTERVAL.subsec_nanos()) };
        // Woken early or by a signal: one look around.
        let _ = rustix::event::poll(&mut fds, Some(&limit));
    }

    fn take_events(&mut self) -> Result<usize, FillEvent> {
        let count = self.reader.read()?;
        self.answer().map(|()| count)
    }

    /// Answers the faults that have been read. That may read more.
    fn answer(&mut self) -> Result<(), FillEvent> {
        let mut result = Ok(());
        while let Some((hva, since)) = self.reader.faults.pop_front() {
            let answered = self.fault(hva, since);
            if answered.is_err() {
                result = answered;
            }
        }
        result
    }

    fn fault(&mut self, hva: Hva, since: Mono) -> Result<(), FillEvent> {
        let (memory, reader) = (&self.fill.memory, &mut self.reader);
        let Some((block, page)) = memory.locate(hva) else { return Ok(()) };
        let index = PageIndex(page);
        let old = read_parts::has_old_bytes(&memory.blocks[block], index);
        let Found { want, recorded } = memory.waiting.want(&memory.blocks[block].table, block, index, since);
        if !recorded && matches!(want, Want::MapNow | Want::ZeroNow | Want::MapAgain) {
            memory.latencies.count_other();
        }
        match want {
            Want::Fetch(ticket) => {
                // Full only if more than `BACKLOG` threads of QEMU wait. Then the ticket is dropped, and a bulk reader fetches the page (`next_dropped`).
                if self.backlog.len() < BACKLOG {
                    self.backlog.push_back(Reading { block, ticket, old, since, asked: since });
                } else {
                    drop(ticket);
                    memory.demand.was_dropped();
                }
                // A hint that finds no room changes the order of reads, nothing else.
                let _ = self.fill.hints.force_push((block, page));
            }
            // Noted: whoever lands it maps it, and records the latency.
            Want::OnItsWay => {}
            Want::MapNow if memory.demand.is_active() => {
                // It was read ahead: what lies further ahead is likely to be touched next, and what is mapped counts as touched.
                memory.map(block, PageRun::new(index, 1), reader)?;
                memory.demand.was_touched();
                let _ = self.fill.hints.force_push((block, page));
            }
            Want::MapNow => {
                // What lies around is likely to be touched next; the faulted page is in the first run mapped.
                let folio = memory.blocks[block].folio(page);
                memory.map_folios(block, page..page + 1, reader)?;
                let (asked, arrived, mapped) = (None, since, Mono::now());
                reader.answered(Answered { block, page: index, since, asked, arrived, mapped });
                memory.map_landed(block, page..folio.end, reader)?;
                memory.map_landed(block, folio.start..page, reader)?;
            }
            Want::ZeroNow | Want::MapAgain => {
                // A hole under a mapped page was made by a discard (balloon, free-page reporting): mapping it fills it with zeros.
                memory.map(block, PageRun::new(index, 1), reader)?;
            }
            // The guest gets what the kernel gives for a page that cannot be had.
            Want::Poisoned => {
                let _ = reader.context.poison(
                    hva,
                    vmove_memory::ByteLen(memory.blocks[block].page_size.bytes()),
                    memory.blocks[block].page_size,
                );
            }
        }
        Ok(())
    }

    fn post_backlog(&mut self) -> Result<(), FillEvent> {
        while let Some(reading) = self.backlog.pop_front() {
            let Some(slot) = self.slots.iter().position(Option::is_none) else {
                self.backlog.push_front(reading);
                return Ok(());
            };
            let of = &self.fill.memory.blocks[reading.block];
            let run = PageRun::new(reading.ticket.page(), 1);
            self.segments.clear();
            for range in read_parts::parts(of, run, reading.old) {
                let Some(segment) = self.fill.remote.segment(reading.block, range) else {
                    return Err(PagesLost::NotReadable.into());
                };
                self.segments.push(segment);
            }
            let old = reading.old && self.fill.memory.comparing.pays();
            let old = old.then(|| std::iter::once((of, run)));
            let posted = read_parts::post(&mut *self.endpoint, WrId(slot as u64), &self.segments, old);
            match posted? {
                Ok(()) => self.slots[slot] = Some(Reading { asked: Mono::now(), ..reading }),
                Err(PostError::Full { .. }) => {
                    self.backlog.push_front(reading);
                    return Ok(());
                }
                Err(error) => return Err(PagesLost::from(error).into()),
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), FillEvent> {
        let memory = &self.fill.memory;
        for completion in self.done.drain() {
            let Some(left_out) = LeftOut::of(&completion.kind) else { continue };
            if let Err(status) = &completion.status {
                return Err(PagesLost::of_read(*status).into());
            }
            memory.comparing.note(&completion.kind, MAX_SEGMENTS);
            let slot = usize::try_from(completion.wr.0)
                .ok()
                .and_then(|s| self.slots.get_mut(s))
                .and_then(Option::take);
            let Some(Reading { block, ticket, old, since, asked }) = slot else { continue };
            let (page, arrived) = (ticket.page(), Mono::now());
            read_parts::complete(
                &memory.blocks[block],
                (PageRun::new(page, 1), old),
                left_out,
                &memory.landed_bytes,
            )?;
            // The ticket carries the mark that a thread waits: the page is mapped here.
            memory.landed(block, page, ticket.landed(), &mut self.reader)?;
            let (asked, mapped) = (Some(asked), Mono::now());
            memory.latencies.record(mapped.since(since));
            self.reader.answered(Answered { block, page, since, asked, arrived, mapped });
        }
        Ok(())
    }
}
