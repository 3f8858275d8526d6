//! Every interleaving of a few threads, by loom: `RUSTFLAGS="--cfg loom" cargo test -p vmove-memory --release --lib loom`.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use loom::thread;

use super::{Landing, PageState, PageTable, Want};
use crate::units::{PageIndex, PageRun};

const PAGE: PageIndex = PageIndex(0);
const RUN: PageRun = PageRun::new(PAGE, 1);

/// A guest page, as loom sees it: relaxed accesses, ordered by the table alone.
struct World {
    table: Arc<PageTable>,
    bytes: AtomicU64,
    mapped_times: AtomicUsize,
}

impl World {
    fn new() -> Arc<Self> {
        let table = PageTable::anonymous(1).expect("memory");
        Arc::new(Self { table, bytes: AtomicU64::new(0), mapped_times: AtomicUsize::new(0) })
    }

    fn fetch(&self) {
        self.bytes.store(42, Ordering::Relaxed);
    }

    /// `UFFDIO_CONTINUE`: the guest sees the bytes from here on.
    fn map(&self) {
        assert_eq!(self.bytes.load(Ordering::Relaxed), 42, "mapped before its bytes were there");
        self.mapped_times.fetch_add(1, Ordering::Relaxed);
        self.table.mark_mapped(RUN);
    }

    /// The fault thread's answer to a fault.
    fn fault(&self) {
        match self.table.want(PAGE) {
            Want::Fetch(ticket) => {
                self.fetch();
                assert!(matches!(ticket.landed(), Landing::Ready { wanted: true }));
                self.map();
            }
            Want::OnItsWay => {}
            Want::MapNow | Want::MapAgain => self.map(),
            Want::ZeroNow | Want::Poisoned => panic!("never in this model"),
        }
    }

    /// The prefetcher's work: maps only what is wanted.
    fn prefetch(&self) {
        let Some(ticket) = self.table.claim(PAGE) else { return };
        self.fetch();
        if matches!(ticket.landed(), Landing::Ready { wanted: true }) {
            self.map();
        }
    }
}

#[test]
fn loom_one_claimer() {
    loom::model(|| {
        let table = PageTable::anonymous(1).expect("memory");
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || other.claim(PAGE).map(std::mem::forget).is_some());
        let mine = table.claim(PAGE).map(std::mem::forget).is_some();
        let theirs = thread.join().expect("it only claims");
        assert!(mine ^ theirs, "exactly one");
        assert_eq!(table.state(PAGE), PageState::Asked);
    });
}

/// A fault and a prefetch of the same page: in every order the page is mapped, and never before its bytes are there.
#[test]
fn loom_no_wake_is_lost() {
    loom::model(|| {
        let world = World::new();
        let other = Arc::clone(&world);
        let thread = thread::spawn(move || other.prefetch());
        world.fault();
        thread.join().expect("the prefetcher");
        assert_eq!(world.table.state(PAGE), PageState::Mapped);
        assert!(world.mapped_times.load(Ordering::Relaxed) >= 1);
    });
}

/// Two threads of the guest fault while a third party prefetches.
#[test]
fn loom_second_faulter_is_served() {
    // All interleavings of three threads would take minutes.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let world = World::new();
        let (a, b) = (Arc::clone(&world), Arc::clone(&world));
        let prefetcher = thread::spawn(move || a.prefetch());
        let faulter = thread::spawn(move || b.fault());
        world.fault();
        prefetcher.join().expect("the prefetcher");
        faulter.join().expect("the other fault");
        assert_eq!(world.table.state(PAGE), PageState::Mapped);
    });
}

/// The reader gives up while a guest thread begins to wait: either the wish is found, or the waiter gets the page.
#[test]
fn loom_dropped_ticket_keeps_the_wish() {
    loom::model(|| {
        let table = PageTable::anonymous(1).expect("memory");
        let ticket = table.claim(PAGE).expect("absent");
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || match other.want(PAGE) {
            Want::Fetch(ticket) => {
                assert!(matches!(ticket.landed(), Landing::Ready { wanted: true }));
                true
            }
            Want::OnItsWay => false,
            _ => panic!("never in this model"),
        });
        drop(ticket);
        let served = thread.join().expect("the fault");
        if !served {
            assert_eq!(table.find_wanted(RUN), Some(PAGE), "the wish is there for the next reader");
        }
    });
}

/// The source reports the page dirty again while it lands: it may land first or be superseded, but old bytes are never
/// final.
#[test]
fn loom_stale_news_wins() {
    loom::model(|| {
        let table = PageTable::anonymous(1).expect("memory");
        let ticket = table.claim(PAGE).expect("absent");
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || other.mark_stale(RUN));
        let landing = ticket.landed();
        thread.join().expect("the news");
        assert!(matches!(landing, Landing::Ready { .. } | Landing::Superseded { .. }));
        assert_eq!(table.state(PAGE), PageState::Stale);
        assert_eq!(table.missing(), 1);
    });
}

/// A discard while the page lands: it ends as zero, or the reader is told to make it so.
#[test]
fn loom_discard_wins() {
    loom::model(|| {
        let table = PageTable::anonymous(1).expect("memory");
        let ticket = table.claim(PAGE).expect("absent");
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || other.mark_discarded(RUN));
        if let Landing::Discarded(ticket) = ticket.landed() {
            assert!(matches!(ticket.zero(), Landing::Ready { .. }));
        }
        thread.join().expect("the discard");
        assert_eq!(table.state(PAGE), PageState::Zero);
        assert_eq!(table.missing(), 0);
    });
}
