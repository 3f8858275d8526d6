//! Bulk readers: threads that read pages from the source into the guest's memory, each over a connection of its own.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use tokio::sync::mpsc;
use vmove_fabric::{
    Completion, CompletionKind, Completions, Endpoint, MAX_SEGMENTS, PostError, ReadSegment, Sched,
    ThreadOptions, WrId,
};
use vmove_memory::{ByteLen, ByteRange, PageIndex, PageRun, RunTicket};

use super::error::{PageError, PagesLost};
use super::guest_memory::{GuestMemory, ReadElsewhere};
use super::page_queue::{NamedPages, PageQueue};
use super::read_parts::{self, LeftOut};
use super::reader::{Reader, Running};
use super::remote_memory::RemoteMemory;
use super::window::{Posted, SERVING, Shape, WARM, Window};
use crate::host_cpu::Booking;
use crate::throttle::{BULK_NICE, Throttle};
use crate::vmm::PageWorkers;
use vmove_types::time::Mono;

/// Hints from the fault thread that have not been followed. More are dropped: a hint only changes the order.
const HINTS: usize = 64;
/// How long a reader waits for an answer, or for bandwidth, before it looks around.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How long an idle reader sleeps before it looks around: hints come without a word.
const IDLE_INTERVAL: Duration = Duration::from_millis(2);
/// The same before the guest's faults are served. Whatever there is to do is told, and QEMU, which starts meanwhile, needs the
/// processor.
const UNSERVED_IDLE_INTERVAL: Duration = Duration::from_millis(100);

/// What a reader tells the session.
#[derive(Debug)]
pub(super) enum FillEvent {
    /// A connection or the peer's memory failed: the attempt is over, another may be made.
    Lost(PagesLost),
    /// Something failed here: no other attempt will help.
    Failed(PageError),
    /// Nothing is missing any more.
    NothingLeft,
}

impl<E: Into<PagesLost>> From<E> for FillEvent {
    fn from(error: E) -> Self {
        Self::Lost(error.into())
    }
}

impl From<PageError> for FillEvent {
    fn from(error: PageError) -> Self {
        Self::Failed(error)
    }
}

/// One attempt to fill the memory, over one set of connections.
#[derive(Debug)]
pub(super) struct Fill {
    pub memory: Arc<GuestMemory>,
    pub remote: Arc<RemoteMemory>,
    pub queue: PageQueue,
    /// (block, page) of recent faults: what lies around them is read first.
    pub hints: ArrayQueue<(usize, u64)>,
    pub throttle: Throttle,
    pub events: mpsc::UnboundedSender<FillEvent>,
    stop: AtomicBool,
    /// Written on [`Fill::stop`], for a thread that sleeps in `poll(2)`.
    stop_fd: OwnedFd,
    /// All pages of the final set have been named: what is still missing was dropped by somebody.
    pub all_named: AtomicBool,
    told_nothing_left: AtomicBool,
}

impl Fill {
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        remote: Arc<RemoteMemory>,
        throttle: Throttle,
        events: mpsc::UnboundedSender<FillEvent>,
    ) -> std::io::Result<Self> {
        // With the attempt before this one, tickets were dropped.
        memory.demand.was_dropped();
        Ok(Self {
            stop_fd: rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?,
            memory,
            remote,
            queue: PageQueue::default(),
            hints: ArrayQueue::new(HINTS),
            throttle,
            events,
            stop: AtomicBool::new(false),
            all_named: AtomicBool::new(false),
            told_nothing_left: AtomicBool::new(false),
        })
    }

    pub(super) fn stop_fd(&self) -> BorrowedFd<'_> {
        self.stop_fd.as_fd()
    }

    /// Ends all readers and the fault thread of this attempt soon.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.queue.close();
        self.memory.wake();
        // An eventfd takes eight bytes at any time; a failure costs the sleeper one look-around interval.
        let _ = rustix::io::write(&self.stop_fd, &1u64.to_ne_bytes());
    }

    pub(super) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(super) fn tell(&self, event: FillEvent) {
        // The session may have ended already.
        let _ = self.events.send(event);
    }

    fn shape(&self) -> Shape {
        if self.memory.is_serving() { SERVING } else { WARM }
    }

    /// Starts a reader. It ends on [`Fill::stop`] or on an error, which it reports.
    pub(super) fn start_reader(
        self: &Arc<Self>,
        index: usize,
        endpoint: Box<dyn Endpoint>,
        workers: PageWorkers,
    ) -> std::io::Result<Reader> {
        let counters = endpoint.counters_handle();
        let fill = Arc::clone(self);
        if workers == PageWorkers::Turns {
            let task = vmove_node::task::spawn(read_in_turns(fill, endpoint)).abort_handle();
            return Ok(Reader { counters, worker: Running::Task(task) });
        }
        let name = format!("vmove-bulk-{index}");
        let options = ThreadOptions { sched: Sched::Normal { nice: BULK_NICE }, ..ThreadOptions::bulk(name) };
        let thread = options.spawn(move |_| {
            let window = Window::new(endpoint.round_trip().unwrap_or_default());
            let mut booking = fill.memory.cpu.booking();
            let mut worker = Worker::new(&fill, endpoint, Some(window));
            let ended = worker.run(&mut booking);
            booking.book();
            if let Err(event) = ended {
                fill.tell(event);
            }
        })?;
        Ok(Reader { counters, worker: Running::Thread(Some(thread)) })
    }
}

/// The same as the thread does, as a task that takes turns with others: see [`PageWorkers::Turns`].
async fn read_in_turns(fill: Arc<Fill>, endpoint: Box<dyn Endpoint>) {
    // Nothing here may follow from how fast this machine is.
    let mut worker = Worker::new(&fill, endpoint, None);
    while !fill.stopping() {
        match worker.turn() {
            Ok(Turn::Worked) => tokio::task::yield_now().await,
            Ok(Turn::Waits(_) | Turn::Rests(_) | Turn::Idle) => {
                tokio::time::sleep(IDLE_INTERVAL).await;
                // What a guest waits for is marked in the table, and told by nobody.
                fill.memory.demand.was_dropped();
            }
            Err(event) => return fill.tell(event),
        }
    }
}

/// A part of one read: consecutive pages of one block.
struct Piece {
    block: usize,
    run: PageRun,
    /// Held while serving; before that the rounds decide what is current.
    ticket: Option<RunTicket>,
    /// The file has an earlier state of it, which is worth comparing.
    old: bool,
}

/// A read that is under way, or room for one.
#[derive(Default)]
struct Read {
    /// None: there is room.
    pieces: Vec<Piece>,
    /// Only what is different crosses.
    compared: bool,
    bytes: u64,
    posted: Posted,
}

impl Piece {
    fn claimed(block: usize, (ticket, old): (RunTicket, bool)) -> Self {
        Self { block, run: ticket.run(), ticket: Some(ticket), old }
    }
}

/// What came of a turn.
enum Turn {
    Worked,
    /// Reads are under way, or the bandwidth is used up: for so long at most.
    Waits(Duration),
    /// The share of the processors is used up: for so long at most, unless the guest begins to wait.
    Rests(Duration),
    /// There is nothing to do.
    Idle,
}

struct Worker<'a> {
    fill: &'a Fill,
    endpoint: Box<dyn Endpoint>,
    slots: Vec<Read>,
    segments: Vec<ReadSegment>,
    done: Completions,
    /// Around a fault: what is left of its folio.
    around: Option<(usize, std::ops::Range<u64>)>,
    /// A run being taken apart.
    current: Option<NamedPages>,
    in_flight: usize,
    /// `None`: reads are as large as they may be.
    window: Option<Window>,
}

/// The bytes of a read come straight into the file, so of one that was under way some may be there, under a page of which nothing is known.
impl Drop for Worker<'_> {
    fn drop(&mut self) {
        for piece in self.slots.iter().flat_map(|read| &read.pieces).filter(|piece| piece.ticket.is_none()) {
            self.fill.memory.blocks[piece.block].table.mark_stale(piece.run);
        }
    }
}

impl<'a> Worker<'a> {
    fn new(fill: &'a Fill, endpoint: Box<dyn Endpoint>, window: Option<Window>) -> Self {
        let depth = WARM.depth.max(SERVING.depth).min(endpoint.capacity().max(1));
        Self {
            fill,
            endpoint,
            slots: (0..depth)
                .map(|_| Read { pieces: Vec::with_capacity(MAX_SEGMENTS), ..Read::default() })
                .collect(),
            segments: Vec::with_capacity(MAX_SEGMENTS),
            done: Completions::with_limit(depth),
            around: None,
            current: None,
            in_flight: 0,
            window,
        }
    }

    fn run(&mut self, booking: &mut Booking<'_>) -> Result<(), FillEvent> {
        let cpu = &self.fill.memory.cpu;
        let mut hurried = false;
        while !self.fill.stopping() {
            if !hurried && self.fill.memory.is_serving() {
                // The guest waits for these pages now. Where that is not permitted the thread goes on as it is.
                let _ = ThreadOptions::normal("vmove-bulk").apply();
                hurried = true;
            }
            let turn = self.turn()?;
            if cpu.is_shared() || !matches!(turn, Turn::Worked) {
                booking.book();
            }
            match turn {
                Turn::Worked => {}
                Turn::Rests(longest) => cpu.rest(longest),
                Turn::Waits(longest) if self.in_flight > 0 => self.endpoint.wait(Some(longest))?,
                Turn::Waits(longest) => std::thread::sleep(longest),
                Turn::Idle => {
                    let fill = self.fill;
                    fill.queue.wait(|| {
                        if fill.memory.is_serving() { IDLE_INTERVAL } else { UNSERVED_IDLE_INTERVAL }
                    });
                }
            }
        }
        Ok(())
    }

    /// Posts what it can, and takes in what has come. Never waits.
    fn turn(&mut self) -> Result<Turn, FillEvent> {
        let posted = self.post()?;
        self.endpoint.flush()?;
        let got = self.endpoint.poll(&mut self.done)?;
        self.finish()?;
        if posted || got > 0 {
            return Ok(Turn::Worked);
        }
        if self.in_flight == 0 {
            self.look_if_done();
        }
        let rest = self.fill.memory.cpu.free_in();
        if !rest.is_zero() && self.in_flight == 0 {
            return Ok(Turn::Rests(rest.min(LOOK_INTERVAL)));
        }
        let held_back = self.fill.throttle.free_in();
        Ok(match (held_back.is_zero(), self.in_flight) {
            (true, 0) => Turn::Idle,
            (true, _) => Turn::Waits(LOOK_INTERVAL),
            (false, _) => Turn::Waits(held_back.min(LOOK_INTERVAL)),
        })
    }

    /// Nothing to do: perhaps everything is done.
    fn look_if_done(&self) {
        let fill = self.fill;
        let perhaps = fill.memory.is_serving() && !fill.told_nothing_left.load(Ordering::Relaxed);
        if perhaps && fill.memory.left() == 0 {
            fill.told_nothing_left.store(true, Ordering::Relaxed);
            fill.tell(FillEvent::NothingLeft);
        }
    }

    /// Posts one read if there is room and work.
    fn post(&mut self) -> Result<bool, FillEvent> {
        let shape = self.fill.shape();
        if self.in_flight >= shape.depth.min(self.slots.len()) {
            return Ok(false);
        }
        // Before pages are claimed: a fault on one of them waits until it is here.
        if !self.fill.throttle.free_in().is_zero() || !self.fill.memory.cpu.free_in().is_zero() {
            return Ok(false);
        }
        let Some(free) = self.slots.iter().position(|read| read.pieces.is_empty()) else { return Ok(false) };
        let mut pieces = std::mem::take(&mut self.slots[free].pieces);
        let most = self.window.as_ref().map_or(shape.bytes, |window| window.read_bytes(shape));
        let gathered = self.gather(most, &mut pieces);
        let when = self.window.as_ref().map(|window| window.posted(Mono::now())).unwrap_or_default();
        let posted = gathered.and_then(|bytes| {
            if pieces.is_empty() {
                return Ok(None);
            }
            self.post_pieces(free, &pieces, bytes).map(|compared| Some((compared, bytes)))
        });
        match posted {
            Ok(Some((compared, bytes))) => {
                self.slots[free] = Read { pieces, compared, bytes, posted: when };
                self.in_flight += 1;
                Ok(true)
            }
            other => {
                pieces.clear();
                self.slots[free].pieces = pieces;
                other.map(|_| false)
            }
        }
    }

    /// Whether what is here is compared.
    fn post_pieces(&mut self, slot: usize, pieces: &[Piece], bytes: u64) -> Result<bool, FillEvent> {
        self.segments.clear();
        for piece in pieces {
            let block = &self.fill.memory.blocks[piece.block];
            for range in read_parts::parts(block, piece.run, piece.old) {
                let Some(segment) = self.fill.remote.segment(piece.block, range) else {
                    return Err(PagesLost::NotReadable.into());
                };
                self.segments.push(segment);
            }
        }
        let memory = &self.fill.memory;
        let compared = pieces.iter().all(|piece| piece.old) && memory.comparing.pays();
        self.fill.throttle.book(bytes);
        let old = compared.then(|| pieces.iter().map(|piece| (&memory.blocks[piece.block], piece.run)));
        let posted = read_parts::post(&mut *self.endpoint, WrId(slot as u64), &self.segments, old);
        match posted? {
            Ok(()) => Ok(compared),
            Err(PostError::Full { .. }) => unreachable!("at most `capacity` reads are posted"),
            Err(error) => Err(PagesLost::from(error).into()),
        }
    }

    /// Takes up to `most` bytes of work in at most [`MAX_SEGMENTS`] parts. Zero runs are dealt with on the way.
    fn gather(&mut self, most: u64, pieces: &mut Vec<Piece>) -> Result<u64, FillEvent> {
        let memory = &self.fill.memory;
        let compares = memory.comparing.all() && !memory.is_serving();
        let in_parts = compares || memory.blocks.iter().any(|block| block.is_home);
        let (mut bytes, mut parts) = (0, 0);
        while parts < MAX_SEGMENTS && bytes < most {
            let room = (MAX_SEGMENTS - parts) as u64 * read_parts::COMPARED_PART;
            let most = if in_parts { room.min(most - bytes) } else { most - bytes };
            let Some(piece) = self.next_piece(most, compares)? else { break };
            let block = &self.fill.memory.blocks[piece.block];
            bytes += block.page_size.range_of(piece.run).len.0;
            parts += read_parts::parts(block, piece.run, piece.old).len();
            pieces.push(piece);
        }
        Ok(bytes)
    }

    /// `compares`: all of the round are compared.
    fn next_piece(&mut self, most: u64, compares: bool) -> Result<Option<Piece>, FillEvent> {
        let fill = self.fill;
        let serving = fill.memory.is_serving();
        loop {
            let around = if serving { self.next_around(most) } else { None };
            if around.is_some() {
                return Ok(around);
            }
            let Some(work) = self.current.take().or_else(|| fill.queue.take(u64::MAX >> 1)) else {
                return Ok(if serving { self.next_dropped(most) } else { None });
            };
            if work.zero {
                let pages = work.pages.end - work.pages.start;
                fill.memory.zero(work.block, work.pages, serving)?;
                fill.queue.done(pages);
                continue;
            }
            if let Some(found) = self.take_from(work, most, serving, compares) {
                return Ok(Some(found));
            }
        }
    }

    /// Takes the next run out of a piece of work and keeps the rest of it for later.
    fn take_from(&mut self, mut work: NamedPages, most: u64, serving: bool, compares: bool) -> Option<Piece> {
        let block = &self.fill.memory.blocks[work.block];
        let max_pages = (most / block.page_size.bytes()).max(1);
        let within = PageRun::new(PageIndex(work.pages.start), work.pages.end - work.pages.start);
        if serving {
            let claimed = read_parts::claim(block, within, max_pages);
            let end = claimed.as_ref().map_or(work.pages.end, |(ticket, _)| ticket.run().end().0);
            self.fill.queue.done(end - work.pages.start);
            let index = work.block;
            work.pages.start = end;
            self.current = (!work.pages.is_empty()).then_some(work);
            return claimed.map(|claimed| Piece::claimed(index, claimed));
        }
        let in_part = block.part_end(within.start.0) - within.start.0;
        let run = PageRun::new(within.start, within.len.min(max_pages).min(in_part));
        let (index, old) = (work.block, compares || read_parts::has_old_bytes(block, run.start));
        work.pages.start = run.end().0;
        self.current = (!work.pages.is_empty()).then_some(work);
        let range = block.page_size.range_of(PageRun::new(run.start, 1));
        let first = ByteRange::new(range.start, ByteLen(range.len.0.min(4096)));
        if self.fill.remote.segment(index, first).is_none() {
            // The source has had memory there since after it said what can be read: so it was written after the scan, and comes
            // in the next round.
            self.fill.queue.done(run.len);
            return None;
        }
        Some(Piece { block: index, run, ticket: None, old })
    }

    /// Claims what is left of the folio around the newest fault.
    fn next_around(&mut self, most: u64) -> Option<Piece> {
        loop {
            let (block, range) = match self.around.take() {
                Some(around) => around,
                None => {
                    let (block, page) = self.fill.hints.pop()?;
                    (block, self.around_fault(block, page))
                }
            };
            let of = &self.fill.memory.blocks[block];
            let max_pages = (most / of.page_size.bytes()).max(1);
            let within = PageRun::new(PageIndex(range.start), range.end - range.start);
            if let Some(claimed) = read_parts::claim(of, within, max_pages) {
                let end = claimed.0.run().end().0;
                self.fill.memory.demand.reads_ahead(claimed.0.run().len);
                if end < range.end {
                    self.around = Some((block, end..range.end));
                }
                return Some(Piece::claimed(block, claimed));
            }
        }
    }

    /// What is read around a fault.
    fn around_fault(&self, block: usize, page: u64) -> std::ops::Range<u64> {
        let memory = &self.fill.memory;
        let folio = memory.blocks[block].folio(page);
        if memory.demand.is_active() { memory.demand.ahead(page, &folio) } else { folio }
    }

    /// Of a guest that visits: a page that it waits for, and whose ticket was dropped.
    fn next_wanted(&self) -> Option<Piece> {
        let memory = &self.fill.memory;
        if !memory.demand.take_dropped() {
            return None;
        }
        let mut blocks = memory.blocks.iter().enumerate();
        let (index, page) =
            blocks.find_map(|(index, block)| Some((index, block.table.find_wanted(block.table.all())?)))?;
        // There may be more; and somebody else may claim this one first.
        memory.demand.was_dropped();
        let claimed = read_parts::claim(&memory.blocks[index], PageRun::new(page, 1), 1)?;
        let _ = self.fill.hints.force_push((index, page.0));
        Some(Piece::claimed(index, claimed))
    }

    /// When everything has been named and something is missing nevertheless: pages whose ticket was dropped.
    fn next_dropped(&self, most: u64) -> Option<Piece> {
        if self.fill.memory.demand.is_active() {
            return self.next_wanted();
        }
        if !self.fill.all_named.load(Ordering::Acquire) || self.fill.memory.left() == 0 {
            return None;
        }
        self.fill.memory.blocks.iter().enumerate().find_map(|(index, block)| {
            let max_pages = (most / block.page_size.bytes()).max(1);
            Some(Piece::claimed(index, read_parts::claim(block, block.table.all(), max_pages)?))
        })
    }

    fn finish(&mut self) -> Result<(), FillEvent> {
        let mut done = std::mem::take(&mut self.done);
        let mut result = Ok(());
        for completion in done.drain() {
            if result.is_ok() {
                result = self.finish_one(&completion);
            }
        }
        self.done = done;
        result
    }

    fn finish_one(&mut self, completion: &Completion) -> Result<(), FillEvent> {
        let Some(mut left_out) = LeftOut::of(&completion.kind) else { return Ok(()) };
        if let Err(status) = &completion.status {
            return Err(PagesLost::of_read(*status).into());
        }
        let slot = usize::try_from(completion.wr.0).ok().filter(|s| *s < self.slots.len());
        let Some(slot) = slot else { return Ok(()) };
        let mut pieces = std::mem::take(&mut self.slots[slot].pieces);
        self.in_flight -= 1;
        if let Some(window) = &mut self.window {
            window.came(self.slots[slot].posted, self.slots[slot].bytes, Mono::now());
        }
        self.note_compared(slot, &pieces, &completion.kind, left_out);
        let mut result = Ok(());
        for piece in pieces.drain(..) {
            if result.is_ok() {
                result = self.piece_landed(piece, left_out).map(|rest| left_out = rest);
            }
        }
        self.slots[slot].pieces = pieces;
        result
    }

    /// Takes note of what did not cross of a read that was compared: others may go in its place.
    fn note_compared(&self, slot: usize, pieces: &[Piece], kind: &CompletionKind, left_out: LeftOut) {
        if !self.slots[slot].compared {
            return;
        }
        let memory = &self.fill.memory;
        let parts = pieces
            .iter()
            .flat_map(|piece| read_parts::parts(&memory.blocks[piece.block], piece.run, piece.old));
        let (mut count, mut stayed) = (0, 0);
        for (index, range) in parts.enumerate() {
            count += 1;
            stayed += if left_out.has(index) { range.len.0 } else { 0 };
        }
        memory.comparing.note(kind, count);
        self.fill.throttle.give_back(stayed);
    }

    /// `left_out` begins with the piece's parts; returns what it says of the next piece's.
    fn piece_landed(&self, piece: Piece, left_out: LeftOut) -> Result<LeftOut, FillEvent> {
        let memory = &self.fill.memory;
        let block = &memory.blocks[piece.block];
        let rest = read_parts::complete(block, (piece.run, piece.old), left_out, &memory.landed_bytes)?;
        let Some(ticket) = piece.ticket else {
            block.table.mark_landed(piece.run);
            self.fill.queue.done(piece.run.len);
            return Ok(rest);
        };
        let mut result = Ok(());
        ticket.landed(|page, landing| {
            if let Err(e) = memory.landed(piece.block, page, landing, &mut ReadElsewhere::of(memory)) {
                result = Err(e);
            }
        });
        result?;
        if memory.demand.is_active() {
            return Ok(rest);
        }
        let pages = piece.run.start.0..piece.run.end().0;
        memory.map_folios(piece.block, pages, &mut ReadElsewhere::of(memory))?;
        Ok(rest)
    }
}
