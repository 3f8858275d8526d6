//! Memory of a real process that writes while it is copied.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::{KeepFailure, Keeper, PIECE};
use crate::testing::ram::{Dir, Guest, own_mounts};
use crate::{Backing, ByteLen, ByteRange, FileOffset, Hva, MemoryError, RamFile, find_mappings, huge_mapped};

/// Long enough for a writer that is let go; short enough to wait for one that is not.
const STUCK_TIMEOUT: Duration = Duration::from_millis(300);
const TIMEOUT: Duration = Duration::from_secs(5);
const MIB: u64 = 1 << 20;

/// The file for the copy, and the thread that answers writers.
struct Stage {
    store: RamFile,
    keeper: Arc<Keeper>,
    server: Option<std::thread::JoinHandle<()>>,
}

impl Stage {
    fn new(guest: &Guest, store: RamFile, limit: Option<ByteLen>) -> Self {
        let stores = std::slice::from_ref(&store);
        let keeper = Keeper::new(&guest.process, &guest.mappings, &guest.files, stores, limit);
        let keeper = Arc::new(keeper.expect("this kernel can"));
        let serving = Arc::clone(&keeper);
        let server = Some(std::thread::spawn(move || serving.serve()));
        Self { store, keeper, server }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.keeper.end();
        let _ = self.server.take().map(std::thread::JoinHandle::join);
    }
}

fn dir(mib: u64) -> Result<Dir, String> {
    Dir::new(Backing::Thp, mib)
}

fn reply(guest: &Guest) -> String {
    guest.target.reply_within(TIMEOUT).expect("the writer goes on")
}

fn content(file: &RamFile) -> Vec<u8> {
    let mut bytes = vec![0; file.len().as_usize()];
    fs::File::from(file.fd().try_clone_to_owned().expect("fd")).read_exact_at(&mut bytes, 0).expect("read");
    bytes
}

fn word(bytes: &[u8], at: u64) -> u64 {
    let at = usize::try_from(at).expect("small");
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight"))
}

/// First difference, in pages.
fn differences(a: &[u8], b: &[u8]) -> usize {
    a.chunks(4096).zip(b.chunks(4096)).filter(|(a, b)| a != b).count()
}

/// A guest with 32 MiB, of which the last 8 are a hole, and some pages between.
fn guest_with_holes(dir: &Dir, map: &str) -> Guest {
    let mut guest = Guest::start_with(map, vec![dir.file(&format!("ram-{map}"), 32)]);
    guest.target.ask("touch-all 0 4096");
    for (start, len) in [(24 * MIB, 8 * MIB), (5 * MIB, 4096), (MIB, 3 * 4096), (10 * MIB, 2 * MIB)] {
        guest.files[0].punch(ByteRange::new(FileOffset(start), ByteLen(len))).expect("punch");
    }
    guest
}

/// Writes everywhere while the copy is made, first by faults only, then with the copier at work. Returns how many pages of the copy
/// are not as they were, and how many of what was written are not in memory.
fn copied_under_load(guest: &mut Guest, stage: &Stage) -> (usize, usize) {
    let before = content(&guest.files[0]);
    stage.keeper.protect().expect("protected");
    assert_eq!(guest.target.ask("writer 0 4096"), "ok");
    std::thread::sleep(Duration::from_millis(40));
    let kept = stage.keeper.copy_rest().expect("whole");
    assert_eq!(kept.by_faults + kept.by_copy, kept.pages, "each page once: {kept:?}");
    assert!(kept.by_faults > 0, "somebody wrote meanwhile: {kept:?}");
    let deadline = Instant::now() + TIMEOUT;
    while guest.target.ask("writer-done") != "true" {
        assert!(Instant::now() < deadline, "the writer hangs: {kept:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let written = guest.target.ask("writer-end");
    let after = content(&guest.files[0]);
    let lost = written.split(' ').filter(|entry| {
        let (at, value) = entry.split_once(':').expect("two numbers");
        word(&after, at.parse().expect("number")) != value.parse::<u64>().expect("number")
    });
    (differences(&before, &content(&stage.store)), lost.count())
}

/// Also seen to fail: bytes that are copied after their protection was lifted are those of the writer.
#[test]
fn the_copy_is_memory_as_it_was() {
    let dir = vmove_skip::need!(dir(128));
    for map in ["map", "map-small"] {
        for lift_first in [false, true] {
            let mut guest = guest_with_holes(&dir, map);
            let mapping = guest.mappings[0];
            if map == "map" {
                let huge = huge_mapped(&guest.process, mapping.hva, mapping.len).expect("pagemap");
                eprintln!("{} of {} bytes are mapped by huge pages", huge.0, mapping.len.0);
            }
            let stage = Stage::new(&guest, dir.file("store", 32), None);
            stage.keeper.lift_first.store(lift_first, Ordering::Relaxed);
            let (wrong, lost) = copied_under_load(&mut guest, &stage);
            assert_eq!(lost, 0, "{map}: what the process writes is in its memory");
            assert_eq!(wrong > 0, lift_first, "{map}: {wrong} pages of the copy are not as they were");
            for file in [&guest.files[0], &stage.store] {
                fs::remove_file(file.path()).expect("file");
            }
        }
    }
}

#[test]
fn a_writer_waits_for_its_page_in_a_hole_too_and_in_the_kernel() {
    let dir = vmove_skip::need!(dir(32));
    let mut guest = Guest::start(vec![dir.file("ram", 4)]);
    let mut stage = Stage::new(&guest, dir.file("store", 4), None);
    guest.writes(2 * MIB, 11);
    stage.keeper.protect().expect("protected");
    // The thread that answers is gone: nothing but it lets writers go on.
    rustix::io::write(&stage.keeper.bell, &1_u64.to_ne_bytes()).expect("bell");
    stage.server.take().expect("thread").join().expect("it ends");
    for (command, at) in
        [("later-write", 4096), ("later-syswrite", 2 * MIB), ("later-syswrite", 2 * PIECE as u64)]
    {
        guest.target.ask(&format!("{command} 0 {at} 5"));
        assert_eq!(guest.target.reply_within(STUCK_TIMEOUT), None, "{command} at {at} waits");
        assert_eq!(word(&content(&guest.files[0]), at), if at == 2 * MIB { 11 } else { 0 });
    }
    // Reading does not wait, and what was read is still protected.
    assert_eq!(guest.reads(MIB), 0);
    guest.target.ask(&format!("later-write 0 {MIB} 5"));
    assert_eq!(guest.target.reply_within(STUCK_TIMEOUT), None, "a write after a read waits");
    let kept = stage.keeper.copy_rest().expect("whole");
    assert_eq!((kept.by_copy, kept.stored.0), (1024, 4096), "{kept:?}");
    for _ in 0..4 {
        assert!(reply(&guest).starts_with("done"));
    }
    let (memory, copy) = (content(&guest.files[0]), content(&stage.store));
    for at in [4096, 2 * MIB, 2 * PIECE as u64, MIB] {
        assert_eq!(word(&memory, at), 5);
        assert_eq!(word(&copy, at), if at == 2 * MIB { 11 } else { 0 });
    }
    assert_eq!(stage.store.allocated_bytes().expect("stat"), ByteLen(4096), "zeros take nothing");
}

/// Waking in time, under all the races of two threads that lift: a lost one would leave the writer waiting.
#[test]
fn no_writer_is_forgotten() {
    let dir = vmove_skip::need!(dir(32));
    let mut guest = Guest::start(vec![dir.file("ram", 4)]);
    for round in 0..40 {
        let stage = Stage::new(&guest, dir.file(&format!("store-{round}"), 4), None);
        let before = content(&guest.files[0]);
        stage.keeper.protect().expect("protected");
        for at in 0..8 {
            guest.target.send(&format!("later-write 0 {} {round}", 8 + at * 4096));
        }
        stage.keeper.copy_rest().expect("whole");
        let replies: Vec<String> = (0..16).map(|_| reply(&guest)).collect();
        assert_eq!(replies.iter().filter(|reply| reply.starts_with("done")).count(), 8, "round {round}");
        assert_eq!(differences(&before, &content(&stage.store)), 0, "round {round}");
        assert_eq!(guest.target.ask("touch-all 0 4096"), "ok", "nothing is protected");
        fs::remove_file(stage.store.path()).expect("file");
    }
}

/// A tmpfs that takes so many bytes.
fn small_tmpfs(path: &Path, bytes: u64) {
    own_mounts().expect("mounts");
    let options = std::ffi::CString::new(format!("size={bytes},mode=0700")).expect("no zero");
    mount("test", path, "tmpfs", MountFlags::empty(), options.as_c_str()).expect("a tmpfs");
}

#[test]
fn when_the_copy_has_no_room_the_process_goes_on_unharmed() {
    let dir = vmove_skip::need!(dir(64));
    let folder = tempfile::tempdir().expect("a folder");
    small_tmpfs(folder.path(), 8 * MIB);
    for limit in [None, Some(ByteLen::mib(4))] {
        let mut guest = guest_with_holes(&dir, "map");
        let path = folder.path().join("store");
        fs::File::create(&path).and_then(|file| file.set_len(32 * MIB)).expect("a file");
        let stage = Stage::new(&guest, RamFile::open(&path).expect("on tmpfs"), limit);
        stage.keeper.protect().expect("protected");
        assert_eq!(guest.target.ask("writer 0 4096"), "ok");
        std::thread::sleep(Duration::from_millis(10));
        let why = stage.keeper.copy_rest().expect_err("there is no room");
        assert_eq!(why, limit.map_or(KeepFailure::Full, KeepFailure::Limit));
        let kept = stage.keeper.kept();
        assert!(kept.by_faults + kept.by_copy > 0 && kept.by_faults + kept.by_copy < kept.pages, "{kept:?}");
        let deadline = Instant::now() + TIMEOUT;
        while guest.target.ask("writer-done") != "true" {
            assert!(Instant::now() < deadline, "the writer hangs: {kept:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        let written = guest.target.ask("writer-end");
        assert_eq!(written.split(' ').count(), 8192);
        let memory = content(&guest.files[0]);
        for entry in written.split(' ') {
            let (at, value) = entry.split_once(':').expect("two numbers");
            assert_eq!(word(&memory, at.parse().expect("number")), value.parse::<u64>().expect("number"));
        }
        for file in [guest.files[0].path(), &path] {
            fs::remove_file(file).expect("file");
        }
    }
    unmount(folder.path(), UnmountFlags::DETACH).expect("ours");
}

#[test]
fn memory_that_is_discarded_meanwhile_ends_the_copy() {
    let dir = vmove_skip::need!(dir(32));
    let mut guest = Guest::start(vec![dir.file("ram", 4)]);
    guest.target.ask("touch-all 0 4096");
    let stage = Stage::new(&guest, dir.file("store", 4), None);
    let hva = guest.mappings[0].hva;
    stage.keeper.protect().expect("protected");
    assert_eq!(guest.target.ask("remove 0 8192 4096"), "ok");
    let why = stage.keeper.copy_rest().expect_err("bytes are missing");
    assert_eq!(why, KeepFailure::Discarded(Hva(hva.0 + 8192)));
    guest.writes(MIB, 3);
    assert_eq!(guest.reads(MIB), 3);
}

/// If we die, the descriptor is closed: QEMU must not hold another.
#[test]
fn nobody_but_us_keeps_memory_protected() {
    let dir = vmove_skip::need!(dir(32));
    let mut guest = Guest::start(vec![dir.file("ram", 4)]);
    let store = dir.file("store", 4);
    let (files, stores) = (&guest.files, std::slice::from_ref(&store));
    let keeper = Keeper::new(&guest.process, &guest.mappings, files, stores, None).expect("this kernel can");
    let held: Vec<_> = fs::read_dir(guest.process.path("fd"))
        .expect("its descriptors")
        .flatten()
        .filter_map(|fd| fs::read_link(fd.path()).ok())
        .filter(|link| link.to_string_lossy().contains("userfaultfd"))
        .collect();
    assert!(held.is_empty(), "{held:?}");
    keeper.protect().expect("protected");
    guest.target.ask("later-write 0 0 9");
    assert_eq!(guest.target.reply_within(STUCK_TIMEOUT), None, "nobody answers");
    drop(keeper);
    assert_eq!(guest.target.reply_within(TIMEOUT).as_deref(), Some("done 0 9"));
}

#[test]
fn huge_pages_of_hugetlbfs_are_refused() {
    match Dir::new(Backing::Hugetlb2M, 8) {
        Err(why) => vmove_skip::skip!("{why}"),
        Ok(dir) => {
            let guest = Guest::start(vec![dir.file("ram", 4)]);
            let stores = [dir.file("store", 4)];
            let refused = Keeper::new(&guest.process, &guest.mappings, &guest.files, &stores, None);
            assert!(matches!(refused, Err(MemoryError::Unsupported { .. })), "{refused:?}");
            find_mappings(&guest.process, &[&guest.files[0]]).expect("still mapped");
        }
    }
}
