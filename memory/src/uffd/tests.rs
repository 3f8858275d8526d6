//! Faults of a real child process.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use userfaultfd::RegisterMode;

use super::{EventBatch, FaultContext, FaultKind, Outcome, UffdEvent, UffdFeatures};
use crate::attach::{Keep, close_in_qemu, create_uffd, discard_in_qemu, reopen_uffd};
use crate::testing::command;
use crate::testing::counting::allocations;
use crate::testing::ram::{Dir, Guest, on_both, peek, poke};
use crate::testing::server::{Served, event_waits, source_word};
use crate::{
    Backing, ByteLen, ByteRange, FileOffset, MemoryError, PageIndex, PageRun, PageState, PageTable, Process,
    QemuMapping, RamFile, find_mappings,
};

const MIB: u64 = 1 << 20;
/// Long enough for a fault that is served; short enough to wait for one that is not.
const STUCK_TIMEOUT: Duration = Duration::from_millis(300);

fn watch(guest: &Guest, keep: Keep) -> FaultContext {
    let context = FaultContext::new(create_uffd(&guest.process, UffdFeatures::Faults, keep).expect("create"));
    context.register(&guest.mappings).expect("register");
    context
}

fn next_events(context: &FaultContext, batch: &mut EventBatch) -> Vec<UffdEvent> {
    let deadline = Instant::now() + Duration::from_secs(5);
    while context.read_events(batch).expect("read") == 0 {
        assert!(Instant::now() < deadline, "no event came");
        std::thread::sleep(Duration::from_micros(200));
    }
    batch.events().to_vec()
}

fn done(guest: &Guest) -> String {
    guest.target.reply_within(Duration::from_secs(5)).expect("the access ends")
}

#[test]
fn missing_and_minor_faults_are_served() {
    on_both(16, |dir| {
        let mut guest = Guest::start(vec![dir.file("ram", 16)]);
        let page = guest.page();
        let map = guest.files[0].map().expect("map");
        let context = watch(&guest, Keep::InQemu);
        let mut batch = EventBatch::new(8);
        let hva = guest.mappings[0].hva;
        let len = ByteLen(page.bytes());
        assert_eq!(context.read_events(&mut batch).expect("read"), 0, "does not wait");

        // A hole.
        guest.target.ask("later-write 0 0 5");
        let events = next_events(&context, &mut batch);
        assert!(
            matches!(events[..], [UffdEvent::Fault { hva: at, kind: FaultKind::Missing, write: true, thread }]
                if at == hva && thread != 0),
            "{events:?}"
        );
        assert_eq!(context.continue_range(hva, len, page).expect("hole"), Outcome::Hole { done: ByteLen(0) });
        map.populate(PageRun::new(PageIndex(0), 1)).expect("memory");
        assert_eq!(context.continue_range(hva, len, page).expect("map"), Outcome::Mapped(len));
        assert_eq!(done(&guest), "done 0 5");
        assert_eq!(peek(&map, 0), 5, "we see what the guest wrote");
        assert_eq!(context.continue_range(hva, len, page).expect("again"), Outcome::AlreadyMapped);

        // Bytes that the file has, read by the kernel on behalf of the guest.
        let second = page.bytes() + 8;
        poke(&map, second, 66);
        guest.target.ask(&format!("later-sysread 0 {second}"));
        let events = next_events(&context, &mut batch);
        assert!(
            matches!(events[..], [UffdEvent::Fault { hva: at, kind: FaultKind::Minor, write: false, .. }]
                if at == hva.add(len)),
            "{events:?}"
        );
        // A range: the mapped page is skipped.
        map.populate(PageRun::new(PageIndex(0), 4)).expect("memory");
        let four = ByteLen(4 * len.0);
        assert_eq!(
            context.continue_range(hva, four, page).expect("map"),
            Outcome::Mapped(ByteLen(3 * len.0))
        );
        assert_eq!(done(&guest), format!("done {second} 66"));

        guest.target.child.kill().expect("our child");
        guest.target.child.wait().expect("our child");
        assert_eq!(context.continue_range(hva, len, page).expect("no error"), Outcome::Gone);
        context.unregister(&guest.mappings).expect("nothing left to unregister");
    });
}

#[test]
fn touching_a_poisoned_page_kills() {
    match Dir::new(Backing::Thp, 4) {
        Err(why) => vmove_skip::skip!("{why}"),
        Ok(dir) => {
            let mut guest = Guest::start(vec![dir.file("ram", 4)]);
            let (page, hva) = (guest.page(), guest.mappings[0].hva);
            let context = watch(&guest, Keep::InQemu);
            match context.poison(hva.add(ByteLen(MIB)), ByteLen(4096), page) {
                Ok(outcome) => assert_eq!(outcome, Outcome::Mapped(ByteLen(4096))),
                Err(error) => return vmove_skip::skip!("this kernel does not poison: {error}"),
            }
            guest.target.send(&format!("later-read 0 {MIB}"));
            let status = guest.target.child.wait().expect("our child");
            use std::os::unix::process::ExitStatusExt;
            assert_eq!(status.signal(), Some(libc::SIGBUS));
        }
    }
}

/// Hazard: memory QEMU touched before it was watched never faults, and shows bytes that have not arrived.
#[test]
fn stale_mappings_are_discarded() {
    on_both(16, |dir| {
        for remedy in [false, true] {
            let mut guest = Guest::start(vec![dir.file(&format!("ram{remedy}"), 8)]);
            guest.writes(0, 1);
            let context = watch(&guest, Keep::InQemu);
            if remedy {
                discard_in_qemu(&guest.process, &guest.mappings, Some(&context)).expect("discard");
            }
            let map = guest.files[0].map().expect("map");
            guest.target.ask("later-read 0 0");
            if remedy {
                assert_eq!(guest.target.reply_within(STUCK_TIMEOUT), None, "it waits for the page");
                poke(&map, 0, 2);
                let page = guest.page();
                let outcome = context.continue_range(guest.mappings[0].hva, ByteLen(page.bytes()), page);
                assert_eq!(outcome.expect("map"), Outcome::Mapped(ByteLen(page.bytes())));
                assert_eq!(done(&guest), "done 0 2");
            } else {
                assert_eq!(done(&guest), "done 0 1", "old bytes, and nobody was asked");
            }
            fs::remove_file(guest.files[0].path()).expect("file");
        }
    });
}

/// The discard is an event itself, for which the kernel makes the caller wait until we read it.
#[test]
fn faults_during_a_discard_are_not_lost() {
    match Dir::new(Backing::Thp, 4) {
        Err(why) => vmove_skip::skip!("{why}"),
        Ok(dir) => {
            let mut guest = Guest::start(vec![dir.file("ram", 4)]);
            guest.target.ask("touch-all 0 4096");
            let context = watch(&guest, Keep::InQemu);
            // Faults already, and its event is read and dropped by the discard.
            guest.files[0].punch(ByteRange::new(FileOffset(0), ByteLen::mib(2))).expect("punch");
            guest.target.ask("later-read 0 0");
            event_waits(&context);
            discard_in_qemu(&guest.process, &guest.mappings, Some(&context)).expect("discard");
            let mut batch = EventBatch::new(8);
            let events = next_events(&context, &mut batch);
            assert!(matches!(events[..], [UffdEvent::Fault { .. }]), "it faults again: {events:?}");
        }
    }
}

/// Hazard: after a discard, a fault on a page that had landed means zero, not "fetch again".
#[test]
fn discarded_pages_become_zero() {
    match Dir::new(Backing::Thp, 8) {
        Err(why) => vmove_skip::skip!("{why}"),
        Ok(dir) => {
            for fetch_again in [true, false] {
                let mut guest = Guest::start(vec![dir.file(&format!("ram{fetch_again}"), 4)]);
                let served = Served::new(&guest, watch(&guest, Keep::InQemu), fetch_again);
                let thread = served.start();
                guest.target.ask("later-read 0 8192");
                assert_eq!(done(&guest), format!("done 8192 {}", source_word(PageIndex(2))));
                assert_eq!(guest.target.ask("remove 0 8192 4096"), "ok");
                guest.target.ask("later-read 0 8192");
                let expected = if fetch_again { source_word(PageIndex(2)) } else { 0 };
                assert_eq!(done(&guest), format!("done 8192 {expected}"));
                // One that had not been fetched yet.
                assert_eq!(guest.target.ask("remove 0 40960 4096"), "ok");
                guest.target.ask("later-read 0 40960");
                assert_eq!(done(&guest), "done 40960 0");
                served.stop(thread);
            }
        }
    }
}

/// Hazard: requests fail while a discard event waits; the discarding thread waits until it was read.
#[test]
fn pending_discards_make_requests_retry() {
    match Dir::new(Backing::Thp, 8) {
        Err(why) => vmove_skip::skip!("{why}"),
        Ok(dir) => {
            let mut guest = Guest::start(vec![dir.file("ram", 8)]);
            let (page, mapping) = (guest.page(), guest.mappings[0]);
            let map = guest.files[0].map().expect("map");
            map.populate(PageRun::new(PageIndex(0), 2048)).expect("memory");
            let context = watch(&guest, Keep::InQemu);
            guest.target.ask(&format!("later-remove 0 {} 4096", 4 * MIB));
            event_waits(&context);
            let len = ByteLen(4096);
            let map_first = || context.continue_range(mapping.hva, len, page).expect("continue");
            assert_eq!(map_first(), Outcome::Retry { done: ByteLen(0) });
            let mut batch = EventBatch::new(8);
            let events = next_events(&context, &mut batch);
            assert_eq!(events, [UffdEvent::Remove { hva: mapping.hva.add(ByteLen(4 * MIB)), len }]);
            assert_eq!(done(&guest), format!("removed {} ok", 4 * MIB));
            assert_eq!(map_first(), Outcome::Mapped(len));
        }
    }
}

/// A daemon of its own: watches the target's memory, writes down what the next life needs, and waits to be killed.
#[test]
#[ignore = "run by other tests, in a process of its own"]
fn daemon_main() {
    let Ok(order) = std::env::var("VMOVE_TEST_DAEMON") else { return };
    let words: Vec<&str> = order.split(' ').collect();
    let process = Process::open(words[0].parse().expect("pid")).expect("target");
    let file = RamFile::open(Path::new(words[1])).expect("file");
    let keep = if words[2] == "keep" { Keep::InQemu } else { Keep::OursOnly };
    let mappings = find_mappings(&process, &[&file]).expect("mapped");
    let context = FaultContext::new(create_uffd(&process, UffdFeatures::Faults, keep).expect("create"));
    context.register(&mappings).expect("register");
    let table = PageTable::create(Path::new(&words[3]), file.pages()).expect("table");
    // One page arrived and was not mapped; one was on its way.
    let map = file.map().expect("map");
    poke(&map, 0, 1234);
    assert!(matches!(table.claim(PageIndex(0)).expect("free").landed(), crate::Landing::Ready { .. }));
    std::mem::forget(table.claim(PageIndex(1)));
    println!("@{}", context.fd_in_qemu().unwrap_or(-1));
    // Reads events, as a daemon would, without answering any more.
    let mut batch = EventBatch::new(4);
    loop {
        let _ = context.read_events(&mut batch);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Starts a daemon; the number of QEMU's descriptor.
fn daemon(guest: &Guest, keep: &str, table: &Path) -> (Child, i32) {
    let mut command = command("uffd::tests::daemon_main", "daemon", Path::new("/dev/null"));
    let (pid, file) = (guest.target.pid(), guest.files[0].path().display());
    command.env("VMOVE_TEST_DAEMON", format!("{pid} {file} {keep} {}", table.display()));
    let mut child = command.stdout(Stdio::piped()).spawn().expect("daemon");
    let stdout = std::io::BufReader::new(child.stdout.take().expect("piped"));
    let fd = std::io::BufRead::lines(stdout)
        .map_while(Result::ok)
        .find_map(|line| line.split_once('@')?.1.parse().ok())
        .expect("the daemon is ready");
    (child, fd)
}

/// Hazard: the daemon dies. With a descriptor left in QEMU the guest freezes and a new life goes on; without, the guest
/// reads what happens to be in the file.
#[test]
fn our_death_freezes_the_guest_and_a_new_life_goes_on() {
    match Dir::new(Backing::Thp, 8) {
        Err(why) => vmove_skip::skip!("{why}"),
        Ok(dir) => {
            for keep in ["close", "keep"] {
                let mut guest = Guest::start(vec![dir.file(keep, 4)]);
                let table_dir = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
                let table = table_dir.path().join("table");
                let (mut first_life, fd) = daemon(&guest, keep, &table);
                guest.target.ask("later-read 0 4096");
                assert_eq!(
                    guest.target.reply_within(STUCK_TIMEOUT),
                    None,
                    "its event is read, and not answered"
                );
                first_life.kill().expect("our child");
                first_life.wait().expect("our child");
                if keep == "close" {
                    assert_eq!(done(&guest), "done 4096 0", "bytes that never arrived");
                    continue;
                }
                assert_eq!(guest.target.reply_within(STUCK_TIMEOUT), None, "frozen");
                guest.target.ask("later-read 0 0");
                assert_eq!(guest.target.reply_within(STUCK_TIMEOUT), None, "frozen");

                let table = PageTable::open(&table).expect("left by the first life");
                assert_eq!(table.recover(), 1);
                assert_eq!(
                    (table.state(PageIndex(0)), table.state(PageIndex(1))),
                    (PageState::Landed, PageState::Stale)
                );
                let remote = reopen_uffd(&guest.process, fd).expect("still open there");
                let mut served = Served::new(&guest, FaultContext::new(remote), false);
                std::sync::Arc::get_mut(&mut served).expect("not shared yet").table = table;
                served.context.wake(guest.mappings[0].hva, guest.mappings[0].len).expect("wake");
                let thread = served.start();
                let mut replies = [done(&guest), done(&guest)];
                replies.sort();
                assert_eq!(
                    replies,
                    ["done 0 1234".to_owned(), format!("done 4096 {}", source_word(PageIndex(1)))]
                );
                assert_eq!(
                    served.fetched.load(Ordering::Relaxed),
                    1,
                    "the page that had landed is not fetched again"
                );
                served.stop(thread);
            }
        }
    }
}

#[test]
fn closing_in_the_process_ends_the_watch() {
    match Dir::new(Backing::Thp, 4) {
        Err(why) => vmove_skip::skip!("{why}"),
        Ok(dir) => {
            let mut guest = Guest::start(vec![dir.file("ram", 4)]);
            let context = watch(&guest, Keep::InQemu);
            let again = FaultContext::new(
                create_uffd(&guest.process, UffdFeatures::Faults, Keep::OursOnly).expect("create"),
            );
            let error = again.register(&guest.mappings).expect_err("one watcher per range");
            assert!(matches!(error, MemoryError::RangeBusy { .. }), "{error}");
            guest.target.ask("later-read 0 0");
            assert_eq!(guest.target.reply_within(STUCK_TIMEOUT), None);
            let fd = context.fd_in_qemu().expect("kept");
            let remote = context.to_remote().expect("descriptor");
            drop(context);
            close_in_qemu(&guest.process, remote).expect("close");
            assert_eq!(done(&guest), "done 0 0");
            let error = reopen_uffd(&guest.process, fd).expect_err("closed");
            assert!(matches!(error, MemoryError::NotUserfaultfd { .. }), "{error}");
            let error = reopen_uffd(&guest.process, 0).expect_err("standard input");
            assert!(matches!(error, MemoryError::NotUserfaultfd { .. }), "{error}");
            again.register(&guest.mappings).expect("free now");
        }
    }
}

/// A process without privileges may not make a userfaultfd for faults of the kernel by itself. It keeps nothing of what it was lent.
#[test]
fn an_unprivileged_process_is_served_through_the_device() {
    let dir = vmove_skip::need!(Dir::new(Backing::Thp, 4));
    let mut guest = Guest::start(vec![dir.file("ram", 4)]);
    if !Path::new("/dev/userfaultfd").exists() {
        return vmove_skip::skip!("no /dev/userfaultfd");
    }
    guest.target.ask("drop-privileges");
    let pid = guest.process.pid();
    let held = || fs::read_dir(format!("/proc/{pid}/fd")).expect("list").count();
    let (before, maps) = (held(), guest.process.maps().expect("maps").len());
    let remote = create_uffd(&guest.process, UffdFeatures::Faults, Keep::InQemu).expect("create");
    assert_eq!(held(), before + 1, "the userfaultfd, and nothing else");
    assert_eq!(guest.process.maps().expect("maps").len(), maps);
    let context = FaultContext::new(remote);
    context.register(&guest.mappings).expect("register");
    let served = Served::new(&guest, context, false);
    let thread = served.start();
    guest.target.ask("later-sysread 0 12288");
    assert_eq!(done(&guest), format!("done 12288 {}", source_word(PageIndex(3))), "a fault of the kernel");
    served.stop(thread);
}

#[test]
fn several_blocks_are_told_apart() {
    on_both(16, |dir| {
        let mut guest = Guest::start(vec![dir.file("a", 8), dir.file("b", 8)]);
        let context = watch(&guest, Keep::InQemu);
        let page = guest.page();
        guest.target.ask(&format!("later-read 1 {}", page.bytes()));
        let mut batch = EventBatch::new(8);
        let events = next_events(&context, &mut batch);
        let [UffdEvent::Fault { hva, .. }] = events[..] else { panic!("{events:?}") };
        let find = |m: &&QemuMapping| m.to_file(hva).is_some();
        let mapping = guest.mappings.iter().find(find).expect("in one of them");
        assert_eq!((mapping.file_index, mapping.to_file(hva)), (1, Some(FileOffset(page.bytes()))));
        let map = guest.files[1].map().expect("map");
        poke(&map, page.bytes(), 9);
        let outcome = context.continue_range(hva, ByteLen(page.bytes()), page).expect("map");
        assert_eq!(outcome, Outcome::Mapped(ByteLen(page.bytes())));
        assert_eq!(done(&guest), format!("done {} 9", page.bytes()));
    });
}

/// Hazard: the fault thread must never wait, not even for the allocator's lock.
#[test]
fn serving_a_fault_allocates_nothing() {
    assert!(allocations(|| drop(std::hint::black_box(vec![0_u8; 100]))) > 0, "the counter counts");
    on_both(16, |dir| {
        let mut guest = Guest::start(vec![dir.file("ram", 16)]);
        let served = Served::new(&guest, watch(&guest, Keep::InQemu), false);
        let mut events = EventBatch::new(16);
        let page = guest.page().bytes();
        for at in 0..4 {
            guest.target.ask(&format!("later-read 0 {}", at * page));
            let counted = allocations(|| served.serve_once(&mut events, Duration::from_secs(1)));
            assert_eq!(done(&guest), format!("done {} {}", at * page, source_word(PageIndex(at))));
            assert_eq!(counted, 0);
        }
        let run = || {
            let ticket = served.table.claim_run(served.table.all(), 4).expect("room");
            ticket.landed(|_, _| ());
        };
        assert_eq!(allocations(run), 0);
    });
}

/// Hazard: of a file that is being filled a private mapping shows what is there, half a page included, unless it is watched for minor
/// faults, too.
#[test]
fn a_private_mapping_must_be_watched_for_minor_faults() {
    let dir = vmove_skip::need!(Dir::new(Backing::Thp, 8));
    for remedy in [false, true] {
        let mut guest = Guest::start_with("map-private", vec![dir.file(&format!("ram{remedy}"), 4)]);
        let (map, hva) = (guest.files[0].map().expect("map"), guest.mappings[0].hva);
        let remote = create_uffd(&guest.process, UffdFeatures::Faults, Keep::InQemu).expect("create");
        let context = FaultContext::new(remote);
        let mode = if remedy { RegisterMode::MISSING | RegisterMode::MINOR } else { RegisterMode::MISSING };
        context.register_all(&guest.mappings, mode, 1 << 3).expect("register"); // COPY
        poke(&map, 8, 5); // half of it has arrived
        guest.target.ask("later-read 0 0");
        if !remedy {
            assert_eq!(done(&guest), "done 0 0", "half a page, and nobody was asked");
            continue;
        }
        assert_eq!(guest.target.reply_within(STUCK_TIMEOUT), None, "it waits for the page");
        poke(&map, 0, 4);
        let (page, len) = (guest.page(), ByteLen::mib(1));
        // This page and those behind it, up to one that is mapped.
        (1..4).for_each(|number| poke(&map, number * 4096, number));
        assert_eq!(
            context.continue_ahead(hva.add(ByteLen(8192)), ByteLen(4096), page).expect("map"),
            Outcome::Mapped(ByteLen(4096))
        );
        assert_eq!(context.continue_ahead(hva, len, page).expect("map"), Outcome::Mapped(ByteLen(8192)));
        assert_eq!(done(&guest), "done 0 4");
        assert_eq!(context.continue_ahead(hva, len, page).expect("again"), Outcome::AlreadyMapped);
        // What it writes is its own.
        guest.writes(4096, 77);
        assert_eq!((peek(&map, 4096), guest.reads(4096)), (1, 77));
        // A hole, written to: zeros, and the file stays a hole.
        let hole = 2 * MIB;
        guest.target.ask(&format!("later-write 0 {hole} 6"));
        let mut batch = EventBatch::new(8);
        let events = next_events(&context, &mut batch);
        assert!(matches!(events[..], [.., UffdEvent::Fault { kind: FaultKind::Missing, .. }]), "{events:?}");
        let at = hva.add(ByteLen(hole));
        assert_eq!(context.continue_ahead(at, len, page).expect("hole"), Outcome::Hole { done: ByteLen(0) });
        assert_eq!(context.zero_ahead(at, len, page).expect("zeros"), Outcome::Mapped(len));
        assert_eq!(done(&guest), format!("done {hole} 6"));
        assert_eq!((guest.reads(hole + 8), guest.reads(hole + 4096)), (0, 0));
        let range = ByteRange::new(FileOffset(hole), ByteLen::mib(2));
        assert!(guest.files[0].is_hole(range).expect("holes"));
        // The file is whole: unregistered, it is seen as it is.
        poke(&map, 3 * MIB, 9);
        context.unregister(&guest.mappings).expect("unregister");
        assert_eq!((guest.reads(3 * MIB), guest.reads(4096), guest.reads(hole)), (9, 77, 6));
        guest.process.kill().expect("it can be killed");
        guest.target.child.wait().expect("our child");
        guest.process.kill().expect("once is as good as twice");
        assert_eq!(context.zero_ahead(at, len, page).expect("no error"), Outcome::Gone);
    }
}
