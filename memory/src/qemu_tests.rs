//! The whole crate against a real QEMU, under TCG and, where there is one, under KVM.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::testing::qemu::{Accel, Qemu, Start, with_each};
use crate::testing::ram::{Dir, on_both, peek};
use crate::testing::server::{Served, source_word};
use crate::{
    ByteLen, ByteRange, Collapsed, DirtyTracker, FaultContext, FileOffset, Injector, Keep, MappingHints,
    MemoryError, PageIndex, PageRun, PageSize, PageState, Precision, Replacement, Sharing, UffdFeatures,
    create_uffd, descriptors_of, discard_in_qemu, huge_mapped, is_shared_whole, map_folio, own_pages_in_qemu,
    replace_in_qemu, touched_in_qemu,
};

const MIB: u64 = 1 << 20;
/// The guest's mailbox lies in this 4 KiB page.
const MAILBOX_PAGE: u64 = 8;

fn start(binary: &PathBuf, accel: Accel, start: Start, dir: &Dir, mib: &[u64]) -> Option<Qemu> {
    start_with(binary, accel, start, dir, mib, "")
}

fn start_with(
    binary: &PathBuf,
    accel: Accel,
    start: Start,
    dir: &Dir,
    mib: &[u64],
    options: &str,
) -> Option<Qemu> {
    let files = mib.iter().enumerate().map(|(i, &mib)| dir.file(&format!("ram{i}"), mib)).collect();
    let qemu = Qemu::start(binary, accel, start, options, files)
        .inspect_err(|why| {
            vmove_skip::skip!(part = format_args!("with {} under {accel:?}", binary.display()), "{why}");
        })
        .ok();
    for i in 0..mib.len() {
        let _ = std::fs::remove_file(dir.path().join(format!("ram{i}")));
    }
    qemu
}

#[test]
fn a_running_qemu_does_not_notice_hundreds_of_attaches() {
    with_each(Accel::Tcg, |binary| {
        on_both(64, |dir| {
            let Some(mut qemu) = start(binary, Accel::Tcg, Start::Running, dir, &[64]) else {
                return;
            };
            qemu.guest_writes(16 * MIB, 1, 4096);
            let mut times = Vec::new();
            for i in 0..200 {
                qemu.order(16 * MIB, 1000, 4096);
                let begin = Instant::now();
                let mut injector = Injector::attach(&qemu.process).expect("attach");
                let pid = injector.syscall(libc::SYS_getpid, [0; 6]).expect("getpid");
                injector.release().expect("release");
                times.push(begin.elapsed());
                assert_eq!(pid, u64::from(qemu.process.pid()));
                if i % 20 == 0 {
                    assert!(qemu.qmp("query-status").contains("running"));
                }
            }
            times.sort_unstable();
            eprintln!("attach to a running QEMU: p50 {:?}, p99 {:?}", times[100], times[198]);
            // Typically below 1 ms. Other work on the machine makes some longer, never all of them shorter.
            assert!(times[0] < Duration::from_millis(5), "{times:?}");
            qemu.guest_writes(16 * MIB, 1, 4096);
        });
    });
}

#[test]
fn several_backends_are_found() {
    with_each(Accel::Tcg, |binary| {
        on_both(64, |dir| {
            let Some(qemu) = start(binary, Accel::Tcg, Start::Paused, dir, &[32, 32]) else { return };
            let found: BTreeSet<_> =
                qemu.mappings.iter().map(|m| (m.file_index, m.file_offset.0, m.len.0, m.shared)).collect();
            assert_eq!(found, BTreeSet::from([(0, 0, 32 * MIB, true), (1, 0, 32 * MIB, true)]));
        });
    });
}

fn written_pages_are_told_exactly(accel: Accel) {
    with_each(accel, |binary| {
        // Mapped by 4 KiB pages, mapped by 2 MiB pages, and hugetlbfs.
        for options in ["", ",align=2M"] {
            on_both(128, |dir| exactly(binary, accel, dir, options));
        }
    });
}

fn exactly(binary: &PathBuf, accel: Accel, dir: &Dir, options: &str) {
    let started = start_with(binary, accel, Start::Running, dir, &[128], options);
    let Some(mut qemu) = started else { return };
    let page = qemu.files[0].page_size();
    qemu.guest_writes(16 * MIB, 112 * MIB / 4096, 4096);
    let mut tracker = DirtyTracker::arm(&qemu.process, &qemu.mappings, Precision::Page).expect("arm");
    for (base, count, stride) in [(20 * MIB, 1000, 8192), (16 * MIB, 7, 5 * MIB), (16 * MIB, 28_672, 4096)] {
        tracker.scan_and_rearm(0, |_| ()).expect("scan");
        let pass = qemu.guest_writes(base, count, stride);
        let mut told = BTreeSet::new();
        let stats = tracker.scan_and_rearm(0, |run| told.extend(run.pages().map(|p| p.0))).expect("scan");
        let written = |i: u64| page.index_of(FileOffset(base + i * stride)).0;
        let mut expected: BTreeSet<u64> = (0..count).map(written).collect();
        expected.insert(MAILBOX_PAGE * 4096 / page.bytes());
        assert_eq!(told, expected, "{accel:?}, {page:?}");
        eprintln!(
            "{accel:?}, {page:?}: {} pages written, {} told, in {:?}",
            expected.len(),
            told.len(),
            stats.took
        );
        let last = base + (count - 1) * stride;
        assert_eq!(peek(&qemu.map, last) & 0xffff_ffff, u64::from(pass));
    }
    tracker.disarm().expect("disarm");
    qemu.guest_writes(16 * MIB, 10, 4096);
}

#[test]
fn written_pages_are_told_exactly_under_tcg() {
    written_pages_are_told_exactly(Accel::Tcg);
}

#[test]
fn written_pages_are_told_exactly_under_kvm() {
    written_pages_are_told_exactly(Accel::Kvm);
}

fn serve(qemu: &Qemu) -> Arc<Served> {
    let context =
        FaultContext::new(create_uffd(&qemu.process, UffdFeatures::Faults, Keep::InQemu).expect("create"));
    context.register(&qemu.mappings).expect("register");
    discard_in_qemu(&qemu.process, &qemu.mappings, Some(&context)).expect("discard");
    let served = Served::from_parts(context, &qemu.files[0], Arc::clone(&qemu.map), qemu.mappings[0]);
    // Ours to write to.
    let page = qemu.files[0].page_size();
    served.table.mark_landed(PageRun::new(page.index_of(FileOffset(MAILBOX_PAGE * 4096)), 1));
    served
}

fn faults_are_served_and_memory_becomes_huge(accel: Accel) {
    with_each(accel, |binary| {
        on_both(64, |dir| {
            let started = start_with(binary, accel, Start::Paused, dir, &[64], ",align=2M");
            let Some(mut qemu) = started else { return };
            assert!(qemu.mappings[0].fits_huge_pages());
            let page = qemu.files[0].page_size();
            let served = serve(&qemu);
            let thread = served.start();
            assert!(qemu.qmp("cont").contains("return"));
            // Behind the first word of each page, which comes from the source.
            let (base, count) = (16 * MIB, 32 * MIB / page.bytes());
            let begin = Instant::now();
            let pass = qemu.guest_writes(base + 8, count, page.bytes());
            let took = begin.elapsed();
            let faults = served.faults.load(Ordering::Relaxed);
            eprintln!("{accel:?}, {page:?}: {faults} faults served in {took:?}");
            assert!(faults >= count);
            for i in 0..count {
                let at = page.index_of(FileOffset(base + i * page.bytes()));
                let offset = page.offset_of(at).0;
                assert_eq!(peek(&qemu.map, offset), source_word(at), "bytes of the source");
                assert_eq!(peek(&qemu.map, offset + 8) & 0xffff_ffff, u64::from(pass), "bytes of the guest");
                // The guest goes on a moment before the server notes so.
                let deadline = Instant::now() + Duration::from_secs(5);
                while served.table.state(at) != PageState::Mapped {
                    assert!(Instant::now() < deadline, "{:?}", served.table.state(at));
                }
            }
            if page == PageSize::Base4K {
                all_landed_becomes_huge(&qemu, &served);
            }
            let faults = served.faults.load(Ordering::Relaxed);
            qemu.guest_writes(base + 8, count, page.bytes());
            assert_eq!(served.faults.load(Ordering::Relaxed), faults, "no fault any more");
            served.stop(thread);
        });
    });
}

/// What a destination does at the end: the rest lands, and each 2 MiB is mapped by one huge page.
fn all_landed_becomes_huge(qemu: &Qemu, served: &Served) {
    while let Some(ticket) = served.table.claim_run(served.table.all(), 512) {
        served.map.populate(ticket.run()).expect("memory");
        ticket.landed(|_, _| ());
    }
    for folio in 0..32 {
        let run = PageRun::new(PageIndex(folio * 512), 512);
        assert!(served.table.all_landed(run));
        let hva = qemu.mappings[0].hva.add(ByteLen(folio * 2 * MIB));
        assert_eq!(map_folio(&qemu.process, &served.context, hva).expect("collapse"), Collapsed::Done);
        served.table.mark_mapped(run);
    }
    let huge = huge_mapped(&qemu.process, qemu.mappings[0].hva, qemu.mappings[0].len).expect("pagemap");
    assert_eq!(huge, qemu.mappings[0].len);
}

#[test]
fn faults_are_served_and_memory_becomes_huge_under_tcg() {
    faults_are_served_and_memory_becomes_huge(Accel::Tcg);
}

#[test]
fn faults_are_served_and_memory_becomes_huge_under_kvm() {
    faults_are_served_and_memory_becomes_huge(Accel::Kvm);
}

/// Hazard: a QEMU with `prealloc=on` has mapped all its memory before anyone watches.
#[test]
fn preallocated_memory_is_discarded() {
    with_each(Accel::Tcg, |binary| {
        on_both(32, |dir| {
            let options = ",prealloc=on";
            let started = start_with(binary, Accel::Tcg, Start::Paused, dir, &[32], options);
            let Some(mut qemu) = started else { return };
            let context = FaultContext::new(
                create_uffd(&qemu.process, UffdFeatures::Faults, Keep::InQemu).expect("create"),
            );
            context.register(&qemu.mappings).expect("register");
            let mut touched = 0;
            touched_in_qemu(&qemu.process, &qemu.mappings, |_, run| touched += run.len).expect("pagemap");
            assert_eq!(touched, qemu.files[0].pages());
            let error = crate::attach::none_mapped(&qemu.process, &qemu.mappings).expect_err("all is mapped");
            assert!(
                matches!(error, MemoryError::StillMapped { pages, .. } if pages == 32 * MIB / 4096),
                "{error}"
            );
            discard_in_qemu(&qemu.process, &qemu.mappings, Some(&context)).expect("discard");
            crate::attach::none_mapped(&qemu.process, &qemu.mappings).expect("none is mapped");
            let mut touched = Vec::new();
            touched_in_qemu(&qemu.process, &qemu.mappings, |file, run| touched.push((file, run)))
                .expect("pagemap");
            assert_eq!(touched, []);
            assert!(qemu.qmp("query-status").contains("prelaunch"), "and QEMU is well");
        });
    });
}

/// The word at `offset` of guest RAM as the guest sees it.
fn seen_by_guest(qemu: &Qemu, offset: u64) -> u64 {
    use std::os::unix::fs::FileExt;
    let memory = std::fs::File::open(format!("/proc/{}/mem", qemu.process.pid())).expect("its memory");
    let mut word = [0; 8];
    let hva = qemu.mappings[0].to_hva(FileOffset(offset)).expect("mapped");
    memory.read_exact_at(&mut word, hva.0).expect("read");
    u64::from_ne_bytes(word) & 0xffff_ffff
}

/// Numbers of the 4 KiB pages that QEMU has apart from the file.
fn own_pages(qemu: &Qemu) -> BTreeSet<u64> {
    let mut own = BTreeSet::new();
    let tell = |_, range: ByteRange| own.extend(range.start.0 / 4096..range.end().0 / 4096);
    own_pages_in_qemu(&qemu.process, &qemu.mappings, tell).expect("pagemap");
    own
}

#[test]
fn writes_through_a_private_mapping_stay_out_of_the_file() {
    with_each(Accel::Tcg, |binary| {
        // On hugetlbfs, the private mapping needs pages of its own.
        on_both(192, |dir| {
            let Some(mut qemu) = start(binary, Accel::Tcg, Start::Running, dir, &[64]) else {
                return;
            };
            let first = qemu.guest_writes(16 * MIB, 1000, 4096);
            assert!(qemu.qmp("stop").contains("return"));
            let fds = descriptors_of(&qemu.process, qemu.files[0].identity()).expect("descriptors");
            assert_eq!(fds.len(), 1, "QEMU keeps one descriptor of its RAM");
            let hints = MappingHints::read(&qemu.process, qemu.mappings[0].hva).expect("hints");
            assert_ne!(hints, MappingHints::default(), "QEMU asks not to copy RAM when it forks, at least");
            let mapped = |sharing| Replacement {
                at: qemu.mappings[0],
                fd_in_qemu: fds[0],
                sharing,
                hints: hints.clone(),
            };
            let (private, shared) = (mapped(Sharing::Private), mapped(Sharing::Shared));
            // Twice, as after a daemon that was killed in the middle.
            for _ in 0..2 {
                replace_in_qemu(&qemu.process, std::slice::from_ref(&private), &[]).expect("replace");
            }
            assert!(!is_shared_whole(&qemu.process, &[&qemu.files[0]]).expect("maps"));
            assert_eq!(MappingHints::read(&qemu.process, qemu.mappings[0].hva).expect("hints"), hints);
            assert_eq!(own_pages(&qemu), BTreeSet::new(), "nothing was written since");
            assert!(qemu.qmp("cont").contains("return"));

            // The mailbox is still the file's page until the guest writes to it.
            qemu.order(16 * MIB, 1000, 4096);
            let deadline = Instant::now() + Duration::from_secs(20);
            while seen_by_guest(&qemu, MAILBOX_PAGE * 4096 + 16) == u64::from(first) {
                assert!(Instant::now() < deadline, "the guest does not answer");
                std::thread::sleep(Duration::from_millis(1));
            }
            let second = seen_by_guest(&qemu, 16 * MIB);
            assert_eq!(second, u64::from(first) + 1);
            for page in 0..1000 {
                let at = 16 * MIB + page * 4096;
                assert_eq!(peek(&qemu.map, at) & 0xffff_ffff, u64::from(first), "page {page} of the file");
            }

            assert!(qemu.qmp("stop").contains("return"));
            if DirtyTracker::supported().is_ok() {
                let own = own_pages(&qemu);
                let first = 16 * MIB / 4096;
                let mut written = (first..first + 1000).chain([MAILBOX_PAGE]);
                assert!(written.all(|page| own.contains(&page)));
                // With huge pages more than was written, and still not all.
                assert!(own.len() < 6000, "{} of 16384 pages", own.len());
            }
            // Otherwise the guest would take the order for a new one.
            for at in [MAILBOX_PAGE * 4096, MAILBOX_PAGE * 4096 + 16] {
                let word = u32::try_from(second).expect("a word").to_le_bytes();
                qemu.map.copy_in(FileOffset(at), &word).expect("in range");
            }
            replace_in_qemu(&qemu.process, &[shared], &[]).expect("replace");
            assert!(is_shared_whole(&qemu.process, &[&qemu.files[0]]).expect("maps"));
            assert_eq!(own_pages(&qemu), BTreeSet::new(), "a shared mapping has the file's");
            assert!(qemu.qmp("cont").contains("return"));
            let third = qemu.guest_writes(16 * MIB, 1000, 4096);
            assert_eq!(peek(&qemu.map, 16 * MIB) & 0xffff_ffff, u64::from(third));
        });
    });
}
