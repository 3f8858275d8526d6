//! Dirty tracking of a real child.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{DirtyTracker, HoleWatch, OrphanWatch, Precision};
use crate::testing::ram::{Dir, Guest, on_both, peek};
use crate::{Backing, ByteLen, ByteRange, Dropped, FileOffset, MemoryError, PageSize, huge_mapped};

const FOLIO: u64 = 2 << 20;

fn scan(tracker: &mut DirtyTracker, file: usize) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    let stats = tracker.scan_and_rearm(file, |run| pages.extend(run.pages().map(|p| p.0))).expect("scan");
    // A page that is written during the scan may be told of twice.
    assert!(stats.pages >= pages.len() as u64);
    pages
}

fn set(pages: impl IntoIterator<Item = u64>) -> BTreeSet<u64> {
    pages.into_iter().collect()
}

/// A child with one file of so many MiB, all of it written.
fn full_guest(dir: &Dir, mib: u64) -> Guest {
    let mut guest = Guest::start(vec![dir.file("ram", mib)]);
    std::fs::remove_file(guest.files[0].path()).expect("the mapping keeps it");
    let page = guest.page().bytes();
    guest.target.ask(&format!("touch-all 0 {page}"));
    guest
}

fn thp(mib: u64, test: impl Fn(&Dir)) {
    match Dir::new(Backing::Thp, mib) {
        Ok(dir) => test(&dir),
        Err(why) => vmove_skip::skip!("{why}"),
    }
}

#[test]
fn every_written_page_is_told_of_once() {
    on_both(32, |dir| {
        let mut guest = full_guest(dir, 32);
        let page = guest.page();
        let mut tracker = DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Page).expect("arm");
        assert_eq!(scan(&mut tracker, 0), set([]), "nothing was written since");
        let written: Vec<u64> =
            [0, 1, 5, 7, 15].into_iter().map(|i| i * 13 % guest.files[0].pages()).collect();
        for round in 0..3 {
            for at in &written {
                guest.writes(at * page.bytes(), round);
                guest.reads((at + 1) % guest.files[0].pages() * page.bytes());
            }
            assert_eq!(scan(&mut tracker, 0), set(written.iter().copied()), "{page:?}, round {round}");
            assert_eq!(scan(&mut tracker, 0), set([]));
        }
        guest.target.ask(&format!("touch-all 0 {}", page.bytes()));
        assert_eq!(scan(&mut tracker, 0).len() as u64, guest.files[0].pages());
        tracker.disarm().expect("disarm");
        guest.writes(0, 1);
        let again = DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Page);
        assert_eq!(scan(&mut again.expect("arm again"), 0), set([]));
    });
}

/// Why a guest with direct I/O is stopped and drained for each scan.
#[test]
fn memory_pinned_before_a_scan_is_written_unseen() {
    on_both(8, |dir| {
        let mut guest = full_guest(dir, 8);
        let page = guest.page().bytes();
        let at = 3 * page;
        let pinned = guest.target.ask(&format!("pin 0 {at} 4096"));
        if pinned != "ok" {
            return vmove_skip::skip!("no io_uring: {pinned}");
        }
        let mut tracker = DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Page).expect("arm");
        assert_eq!(scan(&mut tracker, 0), set([]), "nothing was written since");
        // The request ends: its bytes go where it began, whatever the page table says by now.
        assert_eq!(guest.target.ask(&format!("write-pinned 0 {at} 4711")), "8");
        assert_eq!(guest.target.ask(&format!("read 0 {at}")), "4711");
        let told = scan(&mut tracker, 0);
        if told != set([]) {
            eprintln!("NOTE: this kernel tells of writes to memory that was pinned before: {told:?}");
        }
        // A request that begins after the scan asks for the page to be written, and is told of.
        guest.target.ask("unpin");
        assert_eq!(guest.target.ask(&format!("pin 0 {at} 4096")), "ok");
        assert_eq!(guest.target.ask(&format!("write-pinned 0 {at} 4712")), "8");
        assert_eq!(guest.target.ask(&format!("read 0 {at}")), "4712");
        assert_eq!(scan(&mut tracker, 0), set([3]));
    });
}

#[test]
fn precision_of_huge_mappings_can_be_chosen_and_refined() {
    thp(16, |dir| {
        let mut guest = full_guest(dir, 16);
        let mapping = guest.mappings[0];
        let huge = |guest: &Guest| huge_mapped(&guest.process, mapping.hva, mapping.len).expect("pagemap");
        if huge(&guest) != mapping.len {
            return vmove_skip::skip!("no huge pages to be had");
        }
        let mut tracker = DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Folio).expect("arm");
        assert_eq!(huge(&guest), mapping.len, "still huge");
        guest.writes(3 * FOLIO + 4096, 1);
        let whole_folio = set(3 * 512..4 * 512);
        assert_eq!(scan(&mut tracker, 0), whole_folio);
        guest.writes(3 * FOLIO + 4096, 2);
        tracker.set_precision(Precision::Page);
        assert_eq!(scan(&mut tracker, 0), whole_folio, "what was noted before is still coarse");
        guest.writes(3 * FOLIO + 4096, 3);
        guest.writes(5 * FOLIO, 3);
        let mut expected = set(5 * 512..6 * 512);
        expected.insert(3 * 512 + 1);
        assert_eq!(scan(&mut tracker, 0), expected, "the second folio is told of for the first time");
        guest.writes(3 * FOLIO + 4096, 3);
        guest.writes(5 * FOLIO, 3);
        assert_eq!(scan(&mut tracker, 0), set([3 * 512 + 1, 5 * 512]));
        tracker.disarm().expect("disarm");
        assert_eq!(
            crate::collapse(&guest.process, mapping.hva, mapping.len).expect("collapse"),
            crate::Collapsed::Done
        );
        assert_eq!(huge(&guest), mapping.len);
        assert_eq!(guest.reads(3 * FOLIO + 4096), 3);
    });
}

#[test]
fn several_blocks_and_more_than_4_gib() {
    on_both(16, |dir| {
        let mut files = vec![dir.file("numa0", 8), dir.file("numa1", 8)];
        if files[0].page_size() == PageSize::Base4K {
            match dir.file("sparse", 6 << 10) {
                file if file.len() == ByteLen(6 << 30) => files.push(file),
                _ => unreachable!("it has the length asked for"),
            }
        }
        let mut guest = Guest::start(files);
        let page = guest.page().bytes();
        let mut tracker = DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Page).expect("arm");
        guest.target.ask(&format!("write 1 {} 7", 2 * page));
        if guest.files.len() == 3 {
            guest.target.ask(&format!("write 2 {} 8", 5_u64 << 30));
            guest.target.ask(&format!("write 2 {} 9", 4096));
            assert_eq!(scan(&mut tracker, 2), set([1, 5 << 18]));
            assert_eq!(guest.files[2].data_extents().expect("extents").len(), 2);
        }
        assert_eq!(scan(&mut tracker, 0), set([]));
        assert_eq!(scan(&mut tracker, 1), set([2]));
        let map = guest.files[1].map().expect("map");
        assert_eq!(peek(&map, 2 * page), 7);
    });
}

#[test]
fn memory_that_comes_to_be_is_told_of_and_holes_cost_no_page_tables() {
    thp(16, |dir| {
        const FRESH: u64 = (2 << 30) + 5 * 4096;
        let mut guest = Guest::start(vec![dir.file("sparse", 4 << 10)]);
        guest.target.ask("write 0 4096 7");
        let held = guest.files[0].data_extents().expect("extents");
        let parts = |_| Some(held.clone());
        let mut tracker =
            DirtyTracker::arm_where(&guest.process, &guest.mappings, Precision::Page, parts).expect("arm");
        let mut scan = |guest: &Guest| {
            let held = guest.files[0].data_extents().expect("extents");
            let mut pages = BTreeSet::new();
            tracker.scan_held(0, &held, |run| pages.extend(run.pages().map(|p| p.0))).expect("scan");
            pages
        };
        assert_eq!(scan(&guest), set([]), "nothing was written since");
        guest.target.ask(&format!("write 0 {FRESH} 8"));
        assert!(scan(&guest).contains(&(FRESH >> 12)), "it was never protected");
        assert_eq!(scan(&guest), set([]), "now it is");
        guest.target.ask(&format!("write 0 {FRESH} 9"));
        assert!(scan(&guest).contains(&(FRESH >> 12)), "perhaps with all of its 2 MiB");
        guest.target.ask(&format!("write 0 {FRESH} 10"));
        guest.target.ask("write 0 4096 8");
        assert_eq!(scan(&guest), set([1, FRESH >> 12]), "each page for itself");
        let status = std::fs::read_to_string(guest.process.path("status")).expect("it lives");
        let tables = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).expect("VmPTE");
        let kib: u64 = tables.trim().trim_end_matches(" kB").parse().expect("a number");
        // 4 GiB of protected holes would have 8 MiB of page tables.
        assert!(kib < 2048, "{kib} KiB of page tables");
    });
}

#[test]
fn of_a_stopped_guest_each_written_page_is_told_of_by_whichever_thread_finds_it() {
    // Enough for three threads, where there are so many processors.
    const MIB: u64 = 800;
    thp(MIB, |dir| {
        let mut guest = full_guest(dir, MIB);
        let mut tracker = DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Page).expect("arm");
        let held = guest.files[0].data_extents().expect("extents");
        let stopped = |tracker: &mut DirtyTracker| {
            let mut pages: Vec<u64> = Vec::new();
            let stats = tracker.scan_stopped(0, &held, |run| pages.extend(run.pages().map(|p| p.0)));
            assert_eq!(stats.expect("scan").pages, pages.len() as u64);
            pages
        };
        assert_eq!(stopped(&mut tracker), [0; 0], "nothing was written since");
        let end = guest.files[0].pages() - 1;
        let written: Vec<u64> = (0..=20).map(|twentieth| end * twentieth / 20).collect();
        for page in &written {
            guest.writes(page * 4096, 1);
        }
        assert_eq!(stopped(&mut tracker), written, "once, and in order");
        assert_eq!(stopped(&mut tracker), written, "nothing is protected again");
        assert_eq!(scan(&mut tracker, 0), set(written));
        assert_eq!(stopped(&mut tracker), [0; 0], "now it is");
    });
}

#[test]
fn a_range_has_one_watcher() {
    thp(4, |dir| {
        let guest = full_guest(dir, 4);
        let first = DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Folio).expect("arm");
        let error = DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Folio).expect_err("taken");
        assert!(matches!(error, MemoryError::RangeBusy { .. }), "{error}");
        drop(first);
        DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Folio)
            .expect("dropping frees the range");
    });
}

/// Copies memory in rounds while the child writes to each page once. With `scan_first`, each round scans and re-arms
/// before it reads; else it reads, then scans, and takes what was told of as read. Returns how many writes were missed.
fn copy_in_rounds(dir: &Dir, scan_first: bool) -> usize {
    let mut guest = full_guest(dir, 16);
    let page = guest.page();
    let map = guest.files[0].map().expect("map");
    let mut tracker = DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Page).expect("arm");
    let mut copy = BTreeMap::new();
    let read = |pages: &BTreeSet<u64>, copy: &mut BTreeMap<u64, u64>| {
        copy.extend(pages.iter().map(|&p| (p, peek(&map, p * page.bytes()))));
    };
    let all = set(0..guest.files[0].pages());
    read(&all, &mut copy);
    guest.target.ask(&format!("writer 0 {}", page.bytes()));
    while guest.target.ask("writer-done") == "false" {
        if scan_first {
            let dirty = scan(&mut tracker, 0);
            read(&dirty, &mut copy);
        } else {
            let mut early = BTreeMap::new();
            read(&all, &mut early);
            // Sending takes time.
            std::thread::sleep(std::time::Duration::from_millis(15));
            let dirty = scan(&mut tracker, 0);
            copy.extend(early.into_iter().filter(|(page, _)| dirty.contains(page)));
        }
    }
    let written: BTreeMap<u64, u64> = guest
        .target
        .ask("writer-end")
        .split_ascii_whitespace()
        .filter_map(|pair| {
            let (at, value) = pair.split_once(':')?;
            Some((at.parse::<u64>().ok()? / page.bytes(), value.parse().ok()?))
        })
        .collect();
    assert_eq!(written.len() as u64, guest.files[0].pages());
    let dirty = scan(&mut tracker, 0);
    read(&dirty, &mut copy);
    written.iter().filter(|(at, value)| copy[at] != **value).count()
}

#[test]
fn read_after_the_scan_never_before() {
    on_both(32, |dir| {
        assert_eq!(copy_in_rounds(dir, true), 0, "scan, then read: every write is seen");
        let missed = copy_in_rounds(dir, false);
        assert!(missed > 0, "read, then scan: writes in between are lost");
    });
}

/// The ranges as (first page, pages) of 4 KiB.
fn pages(ranges: &[ByteRange]) -> Vec<(u64, u64)> {
    ranges.iter().map(|r| (r.start.0 >> 12, r.len.0 >> 12)).collect()
}

/// Hazard: a device goes on reading pages that the file has lost. Pinned memory has page-table entries in the mapping that it was
/// pinned through; what others do with the file, or we through another mapping, does not bring them back.
#[test]
fn punched_memory_is_an_orphan_until_it_is_pinned_again() {
    thp(32, |dir| {
        let mut guest = full_guest(dir, 32);
        let (pinned, ours) = (guest.files[0].map().expect("map"), guest.files[0].map().expect("map"));
        let all = guest.files[0].range();
        let pin = |range: ByteRange| pinned.populate_read(range).expect("pin");
        pin(all);
        let mut watch = OrphanWatch::new(&pinned).expect("watch");
        assert_eq!(watch.orphans(all).expect("look"), []);

        guest.target.ask(&format!("punch 0 {} {FOLIO}", 2 * FOLIO));
        guest.target.ask(&format!("punch 0 {} 4096", 6 * FOLIO + 8192));
        guest.target.ask(&format!("dontneed 0 {} {FOLIO}", 8 * FOLIO));
        // Both have it again, as other memory.
        assert_eq!(guest.reads(2 * FOLIO + 4096), 0);
        ours.populate_read(all).expect("populate");
        let orphans = watch.orphans(all).expect("look");
        let covers = |at: u64| orphans.iter().any(|range| range.start.0 <= at && at < range.end().0);
        assert!(covers(2 * FOLIO) && covers(3 * FOLIO - 4096), "{orphans:?}");
        assert!(covers(6 * FOLIO + 8192), "a single page: {orphans:?}");
        assert!(!covers(8 * FOLIO + 4096) && !covers(0), "nothing happened there: {orphans:?}");
        let elsewhere = ByteRange::new(FileOffset(8 * FOLIO), ByteLen(4 * FOLIO));
        assert_eq!(watch.orphans(elsewhere).expect("look"), []);
        pin(all);
        assert_eq!(watch.orphans(all).expect("look"), []);
    });
}

/// Hazard: a discarded 2 MiB range looks unchanged to the scan.
#[test]
fn discarded_memory_is_found() {
    thp(32, |dir| {
        let mut guest = full_guest(dir, 32);
        let map = guest.files[0].map().expect("map");
        let mut tracker = DirtyTracker::arm(&guest.process, &guest.mappings, Precision::Page).expect("arm");
        let mut watch = HoleWatch::new(&guest.files[0], &map).expect("watch");
        assert_eq!(watch.look(&guest.files[0]).expect("look"), Dropped::default());

        guest.target.ask(&format!("punch 0 {} {FOLIO}", 2 * FOLIO));
        guest.target.ask(&format!("punch 0 {} {FOLIO}", 4 * FOLIO));
        // Memory comes back by a touch, which does not tell that it is other memory.
        assert_eq!(guest.reads(4 * FOLIO + 4096), 0);
        guest.target.ask(&format!("punch 0 {} 4096", 6 * FOLIO + 8192));
        guest.target.ask(&format!("dontneed 0 {} {FOLIO}", 8 * FOLIO));

        let dirty = scan(&mut tracker, 0);
        if dirty.is_superset(&set(2 * 512..3 * 512)) {
            eprintln!(
                "NOTE: this kernel's PAGEMAP_SCAN reports 2 MiB holes as written; the hole watch is not needed for them"
            );
        } else {
            eprintln!(
                "NOTE: this kernel's PAGEMAP_SCAN reports {} of 512 pages of a 2 MiB hole",
                dirty.range(1024..1536).count()
            );
        }
        let dropped = watch.look(&guest.files[0]).expect("look");
        let found: Vec<_> = pages(&dropped.holes).into_iter().chain(pages(&dropped.replaced)).collect();
        let covers = |page: u64| found.iter().any(|(start, len)| (*start..start + len).contains(&page));
        assert!((1024..1536).all(covers), "the hole: {dropped:?}");
        assert!((2048..2560).all(covers), "punched and touched again: {dropped:?}");
        assert!(covers(3074), "a single page: {dropped:?}");
        assert!(
            !covers(8 * 512 + 1),
            "MADV_DONTNEED in the guest takes no memory from the file: {dropped:?}"
        );
        assert!(pages(&dropped.holes).contains(&(1024, 512)));
        assert_eq!(watch.look(&guest.files[0]).expect("look"), Dropped::default(), "told once");
    });
}

#[test]
fn discarded_huge_pages_are_found() {
    match Dir::new(Backing::Hugetlb2M, 16) {
        Err(why) => vmove_skip::skip!("{why}"),
        Ok(dir) => {
            let mut guest = full_guest(&dir, 16);
            let map: Arc<_> = guest.files[0].map().expect("map");
            let mut watch = HoleWatch::new(&guest.files[0], &map).expect("watch");
            guest.target.ask(&format!("punch 0 {} {FOLIO}", 2 * FOLIO));
            guest.target.ask(&format!("punch 0 {} {FOLIO}", 4 * FOLIO));
            guest.reads(4 * FOLIO);
            let dropped = watch.look(&guest.files[0]).expect("look");
            let range = |folio: u64| ByteRange::new(FileOffset(folio * FOLIO), ByteLen(FOLIO));
            assert_eq!(dropped, Dropped { holes: vec![range(2)], replaced: vec![range(4)] });
        }
    }
}
