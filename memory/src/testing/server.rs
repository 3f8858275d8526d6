//! A small page server, as a migration's destination has one, whose source is a function.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ram::{Guest, poke};
use crate::{
    ByteLen, EventBatch, FaultContext, Landing, Mapping, Outcome, PageIndex, PageRun, PageTable, QemuMapping,
    RamFile, UffdEvent, Want,
};

/// Waits until an event can be read.
pub fn event_waits(context: &FaultContext) {
    let wait = Timespec { tv_sec: 10, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(&context.as_fd(), PollFlags::IN)], Some(&wait)).expect("poll");
    assert_eq!(ready, 1, "no event came");
}

/// What the server serves. Clone-able by `Arc`.
pub struct Served {
    pub context: FaultContext,
    pub table: Arc<PageTable>,
    pub map: Arc<Mapping>,
    pub mapping: QemuMapping,
    /// Fetch a page again when it faults after it was mapped: the mistake that brings discarded memory back.
    pub fetch_again: bool,
    pub faults: AtomicU64,
    pub fetched: AtomicU64,
    stop: AtomicBool,
}

/// First word of a page at the source.
pub const fn source_word(page: PageIndex) -> u64 {
    page.0 * 1000 + 77
}

impl Served {
    pub fn new(guest: &Guest, context: FaultContext, fetch_again: bool) -> Arc<Self> {
        let map = guest.files[0].map().expect("map");
        let mut served = Self::from_parts(context, &guest.files[0], map, guest.mappings[0]);
        Arc::get_mut(&mut served).expect("not shared yet").fetch_again = fetch_again;
        served
    }

    pub fn from_parts(
        context: FaultContext,
        file: &RamFile,
        map: Arc<Mapping>,
        mapping: QemuMapping,
    ) -> Arc<Self> {
        Arc::new(Self {
            context,
            table: PageTable::anonymous(file.pages()).expect("table"),
            map,
            mapping,
            fetch_again: false,
            faults: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        })
    }

    /// Serves from a thread of its own until [`Self::stop`].
    pub fn start(self: &Arc<Self>) -> JoinHandle<()> {
        let served = Arc::clone(self);
        std::thread::spawn(move || {
            let mut events = EventBatch::new(16);
            while !served.stop.load(Ordering::Relaxed) {
                served.serve_once(&mut events, Duration::from_millis(5));
            }
        })
    }

    pub fn stop(&self, thread: JoinHandle<()>) {
        self.stop.store(true, Ordering::Relaxed);
        thread.join().expect("the server");
    }

    pub fn serve_once(&self, events: &mut EventBatch, timeout: Duration) {
        let fd = self.context.as_fd();
        let tv_sec = i64::try_from(timeout.as_secs()).expect("short");
        let wait = Timespec { tv_sec, tv_nsec: timeout.subsec_nanos().into() };
        let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait));
        self.context.read_events(events).expect("events");
        for event in events.events() {
            match *event {
                UffdEvent::Fault { hva, .. } => {
                    self.faults.fetch_add(1, Ordering::Relaxed);
                    let offset = self.mapping.to_file(hva).expect("ours");
                    self.fault(self.mapping.page_size.index_of(offset));
                }
                UffdEvent::Remove { hva, len } => {
                    let offset = self.mapping.to_file(hva).expect("ours");
                    let run = self.mapping.page_size.run_of(crate::ByteRange::new(offset, len));
                    self.table.mark_discarded(run);
                }
            }
        }
    }

    fn fault(&self, page: PageIndex) {
        match self.table.want(page) {
            Want::Fetch(ticket) => {
                self.fetch(page);
                match ticket.landed() {
                    Landing::Ready { .. } => self.map_page(page),
                    other => panic!("nobody else works on it: {other:?}"),
                }
            }
            Want::MapAgain if self.fetch_again => {
                self.fetch(page);
                self.map_page(page);
            }
            Want::MapNow | Want::ZeroNow | Want::MapAgain => self.map_page(page),
            Want::OnItsWay | Want::Poisoned => panic!("not in these tests"),
        }
    }

    fn fetch(&self, page: PageIndex) {
        self.fetched.fetch_add(1, Ordering::Relaxed);
        let run = PageRun::new(page, 1);
        self.map.populate(run).expect("memory");
        poke(&self.map, self.map.page_size().offset_of(page).0, source_word(page));
    }

    /// Maps one page, giving it memory if it is a hole and reading events if some wait.
    pub fn map_page(&self, page: PageIndex) {
        let page_size = self.mapping.page_size;
        let hva = self.mapping.to_hva(page_size.offset_of(page)).expect("mapped");
        let run = PageRun::new(page, 1);
        loop {
            match self.context.continue_range(hva, ByteLen(page_size.bytes()), page_size).expect("continue") {
                Outcome::Mapped(_) | Outcome::AlreadyMapped => break,
                Outcome::Hole { .. } => self.map.populate(run).expect("memory"),
                // Only discards, in these tests: their state is set when the fault that follows is served.
                Outcome::Retry { .. } => {
                    let mut events = EventBatch::new(4);
                    self.context.read_events(&mut events).expect("events");
                }
                Outcome::Gone => return,
            }
        }
        self.table.mark_mapped(run);
    }
}
