//! Memory of a real process that writes while its memory is moved to a file of its own.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pieces::PieceSize;
use super::standby::stand_by;
use super::{Mover, OwnFile, PrivatePart, Standing, unmap_strays};
use crate::attach::map_aside;
use crate::testing::ram::{Dir, Guest, on_both};
use crate::{
    ByteLen, ByteRange, FileOffset, Hva, Injector, MappingHints, Process, QemuMapping, RamFile, Replacement,
    Sharing, descriptors_of, is_shared_whole, replace_in_qemu,
};

const MIB: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(20);

/// A process whose memory is private since a moment ago: its file does not change any more.
struct Stage {
    guest: Guest,
    process: Arc<Process>,
    home: RamFile,
    private: Vec<QemuMapping>,
}

fn content(file: &RamFile) -> Vec<u8> {
    let mapping = file.map().expect("map");
    let mut bytes = vec![0; file.len().as_usize()];
    for extent in file.data_extents().expect("extents") {
        let part = &mut bytes[ByteLen(extent.start.0).as_usize()..][..extent.len.as_usize()];
        mapping.copy_out(extent.start, part).expect("in range");
    }
    bytes
}

fn word(bytes: &[u8], at: u64) -> u64 {
    let at = ByteLen(at).as_usize();
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight"))
}

impl Stage {
    /// 32 MiB, of which the last 8 are a hole.
    fn new(dir: &Dir, map: &str) -> Self {
        let (ram, home) = (dir.file(&format!("ram-{map}"), 32), dir.file(&format!("home-{map}"), 32));
        let mut guest = Guest::start_with(map, vec![ram]);
        guest.target.ask("touch-all 0 4096");
        let hole = ByteRange::new(FileOffset(24 * MIB), ByteLen(8 * MIB));
        guest.files[0].punch(hole).expect("punch");
        // So that the process has a descriptor of it.
        guest.target.ask(&format!("map-small {}", home.path().display()));
        let process = Arc::new(Process::open(guest.target.pid()).expect("it runs"));
        let fd_in_qemu = descriptors_of(&process, guest.files[0].identity()).expect("fds")[0];
        let freeze = |at: &QemuMapping| Replacement {
            at: *at,
            fd_in_qemu,
            sharing: Sharing::Private,
            hints: MappingHints::read(&process, at.hva).expect("smaps"),
        };
        let all: Vec<_> = guest.mappings.iter().map(freeze).collect();
        replace_in_qemu(&process, &all, &[]).expect("private");
        let private = guest.mappings.iter().map(|at| QemuMapping { shared: false, ..*at }).collect();
        Self { guest, process, home, private }
    }

    fn fill(&self) {
        let (from, to) = (self.guest.files[0].map().expect("map"), self.home.map().expect("map"));
        for extent in self.guest.files[0].data_extents().expect("extents") {
            let mut bytes = vec![0; extent.len.as_usize()];
            from.copy_out(extent.start, &mut bytes).expect("in range");
            to.copy_in(extent.start, &bytes).expect("in range");
        }
    }

    fn mover(&self, parts: &[QemuMapping], strays: &[(Hva, ByteLen)]) -> Mover {
        self.mover_in(parts, strays, PieceSize::allowed())
    }

    fn mover_in(&self, parts: &[QemuMapping], strays: &[(Hva, ByteLen)], size: PieceSize) -> Mover {
        let fd_in_qemu = descriptors_of(&self.process, self.home.identity()).expect("fds")[0];
        let file = RamFile::open(self.home.path()).expect("home");
        let own = OwnFile { mapping: file.map().expect("map"), file, fd_in_qemu };
        let part = |at: &QemuMapping| PrivatePart { at: *at, hints: MappingHints::default(), filled: true };
        let parts: Vec<_> = parts.iter().map(part).collect();
        Mover::in_pieces(Arc::clone(&self.process), &parts, vec![own], strays, size).expect("this kernel can")
    }

    /// What of the guest's memory lies where it did and is still private.
    fn standing(&self) -> Standing {
        let home = RamFile::open(self.home.path()).expect("home");
        Standing::read(&self.process, &self.private, &[home]).expect("mapped")
    }

    /// Writes to every other page while `work` is done. Returns what was written, by offset.
    fn written_during<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> (HashMap<u64, u64>, T) {
        assert_eq!(self.guest.target.ask("writer 0 8192"), "ok");
        let done = work(self);
        let deadline = Instant::now() + TIMEOUT;
        while self.guest.target.ask("writer-done") != "true" {
            assert!(Instant::now() < deadline, "the writer hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
        let pair = |entry: &str| {
            let (at, value) = entry.split_once(':')?;
            Some((at.parse().ok()?, value.parse().ok()?))
        };
        let written = self.guest.target.ask("writer-end");
        (written.split(' ').filter_map(pair).collect(), done)
    }

    /// Pages of which `bytes` has not what the process wrote there, or what was there before.
    fn wrong(&self, bytes: &[u8], written: &HashMap<u64, u64>) -> usize {
        let before = |at| if at < 24 * MIB { at + 1 } else { 0 };
        let pages = (0..32 * MIB).step_by(4096);
        pages.filter(|at| word(bytes, *at) != written.get(at).copied().unwrap_or_else(|| before(*at))).count()
    }
}

/// Moves memory that a process writes to meanwhile. Gives the number of pages that are wrong afterwards.
fn wrong_after_a_move(dir: &Dir, map: &str, unprotected: bool, piece: u64) -> usize {
    let mut stage = Stage::new(dir, map);
    stage.fill();
    let (written, moved) = stage.written_during(|stage| {
        let mut mover = stage.mover_in(&stage.private, &[], PieceSize::Bytes(piece));
        mover.unprotected = unprotected;
        while mover.step().expect("moved") {}
        mover.moved()
    });
    eprintln!("{map}: {moved:?}");
    assert!(stage.standing().is_shared(), "all of it is the file");
    // The memory need not begin where a piece does.
    let pieces = 32 * MIB / piece;
    assert!(moved.pieces == pieces || piece > 2 * MIB && moved.pieces == pieces + 1, "{moved:?}");
    assert!(moved.longest > Duration::ZERO && moved.waited <= moved.longest * 32, "{moved:?}");
    // What it wrote before was no page of the file's: only that was copied from it.
    assert!(moved.own.0 > 0 && moved.own.0 <= 32 * MIB, "{moved:?}");
    let wrong = stage.wrong(&content(&stage.home), &written);
    // The template is as it was.
    let before = content(&stage.guest.files[0]);
    assert_eq!(stage.wrong(&before, &HashMap::new()), 0);
    for file in [stage.guest.files[0].path(), stage.home.path()] {
        std::fs::remove_file(file).expect("file");
    }
    wrong
}

/// Also seen to fail: what is written to a piece that is not protected while it is copied is lost. The process writes for 100 ms, and on a
/// busy machine it may be done before the first piece is moved: then it is tried again.
#[test]
fn nothing_is_lost_of_what_a_process_writes_while_its_memory_is_moved() {
    on_both(128, |dir| {
        for map in ["map", "map-small"] {
            // The larger ones are those of guests with very many huge pages.
            for piece in [2 * MIB, 8 * MIB] {
                let wrong = wrong_after_a_move(dir, map, false, piece);
                assert_eq!(wrong, 0, "{map}, pieces of {piece} bytes: pages are not as they should be");
            }
            let lost = (0..20).any(|_| wrong_after_a_move(dir, map, true, 2 * MIB) > 0);
            assert!(lost, "{map}: nothing is lost without the protection");
        }
    });
}

/// A page is copied from the process only if it is its own, also where it was never mapped or is a hole.
#[test]
fn only_pages_of_ones_own_are_copied_from_the_process() {
    let dir = vmove_skip::need!(Dir::new(crate::Backing::Thp, 128));
    let mut stage = Stage::new(&dir, "map");
    stage.fill();
    for at in [0, 5 * MIB + 4096, 30 * MIB] {
        stage.guest.writes(at, 7);
    }
    assert_eq!(stage.guest.reads(8 * MIB), 8 * MIB + 1);
    let mut mover = stage.mover(&stage.private, &[]);
    while mover.step().expect("moved") {}
    assert_eq!(mover.moved().own, ByteLen(3 * 4096), "{:?}", mover.moved());
    let written = [0, 5 * MIB + 4096, 30 * MIB].map(|at| (at, 7)).into();
    assert_eq!(stage.wrong(&content(&stage.home), &written), 0);
    assert_eq!(stage.guest.reads(30 * MIB), 7);
}

/// As after the death of a daemon: what was moved is the file's, the rest private; and both are whole.
#[test]
fn a_move_that_is_cut_off_loses_nothing_and_is_taken_up() {
    on_both(128, |dir| {
        let mut stage = Stage::new(dir, "map");
        stage.fill();
        let (written, left) = stage.written_during(|stage| {
            let mut mover = stage.mover(&stage.private, &[]);
            assert!(mover.step().expect("moved"), "one batch of two");
            drop(mover);
            stage.standing().private
        });
        assert_eq!(left.iter().map(|part| part.len.0).sum::<u64>(), 16 * MIB, "{left:?}");
        // Counting would take the other mapping of the file for what is still private.
        assert!(is_shared_whole(&stage.process, &[&stage.home]).expect("maps"));
        for at in (0..32 * MIB).step_by(4096) {
            let before = if at < 24 * MIB { at + 1 } else { 0 };
            assert_eq!(stage.guest.reads(at), written.get(&at).copied().unwrap_or(before), "at {at}");
        }
        let strays = stage.standing().strays;
        assert_eq!(strays.iter().map(|stray| stray.1.0).sum::<u64>(), 32 * MIB, "{strays:?}");
        let mut mover = stage.mover(&left, &strays);
        while mover.step().expect("moved") {}
        assert_eq!(stage.standing(), Standing::default(), "what was left aside is gone");
        let bytes = content(&stage.home);
        assert_eq!(stage.wrong(&bytes, &written), 0);
        // It is the file's from now on.
        stage.guest.writes(3 * MIB, 99);
        let mut seen = [0; 8];
        if stage.home.page_size() == crate::PageSize::Base4K {
            File::open(stage.home.path()).expect("home").read_exact_at(&mut seen, 3 * MIB).expect("read");
            assert_eq!(u64::from_ne_bytes(seen), 99);
        }
    });
}

/// Nobody waits for ever for memory whose move has failed.
#[test]
fn a_move_that_fails_lets_writers_go_on() {
    let dir = vmove_skip::need!(Dir::new(crate::Backing::Thp, 128));
    let mut stage = Stage::new(&dir, "map");
    let (written, error) = stage.written_during(|stage| {
        let mut mover = stage.mover(&stage.private, &[]);
        // It cannot be mapped: there is no such descriptor.
        mover.files[0].fd_in_qemu = 1_000_000;
        mover.step().expect_err("no descriptor")
    });
    assert!(error.to_string().contains("mmap"), "{error}");
    assert_eq!(stage.standing().private.iter().map(|part| part.len.0).sum::<u64>(), 32 * MIB);
    for (at, value) in written {
        assert_eq!(stage.guest.reads(at), value);
    }
    // The same, in the middle of a batch: a file that cannot hold what is to be copied there.
    let (written, error) = stage.written_during(|stage| {
        let mut mover = stage.mover(&stage.private, &[]);
        let short = dir.file("short", 2);
        mover.files[0].mapping = short.map().expect("map");
        mover.step().expect_err("too short")
    });
    assert!(error.to_string().contains("guest RAM"), "{error}");
    // Its first piece was moved.
    for (at, value) in written.into_iter().filter(|(at, _)| *at >= 2 * MIB) {
        assert_eq!(stage.guest.reads(at), value);
    }
}

/// As after the death of a daemon in the middle of a fork: the frozen file is mapped aside, which would keep all of it for good.
#[test]
fn what_a_broken_off_fork_has_mapped_aside_is_taken_away() {
    on_both(128, |dir| {
        let mut stage = Stage::new(dir, "map");
        let template = stage.guest.files[0].identity();
        let left_aside = || {
            let one = Replacement {
                at: stage.private[0],
                fd_in_qemu: descriptors_of(&stage.process, template).expect("fds")[0],
                sharing: Sharing::Private,
                hints: MappingHints::default(),
            };
            let mut injector = Injector::attach(&stage.process).expect("attached");
            map_aside(&mut injector, &one).expect("mapped");
            injector.release().expect("released");
        };
        // The process had to map its new file to have a descriptor of it.
        assert_eq!(stage.standing().strays.len(), 1);
        left_aside();
        let strays = stage.standing().strays;
        assert_eq!(strays.len(), 2, "{strays:?}");
        drop(stage.mover(&stage.private, &strays));
        assert_eq!(stage.standing().strays, [], "before memory is moved");
        left_aside();
        assert_eq!(stage.standing().strays.len(), 1);
        unmap_strays(&stage.process, &[template], &stage.private).expect("unmapped");
        assert_eq!(stage.standing().strays, [], "when a fork is undone");
        assert_eq!(stage.guest.reads(5 * MIB), 5 * MIB + 1, "its own memory stays");
    });
}

#[test]
#[ignore = "a process of another test"]
fn stand_by_child() {
    let _ = stand_by();
}

/// A program that stands by: this test binary, which must not print to the userfaultfd.
fn standby_program(dir: &Path) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let (program, tests) = (dir.join("stand-by"), std::env::current_exe().expect("our binary"));
    let name = "own_file::tests::stand_by_child";
    let line = format!("exec {tests:?} {name} --exact --ignored --nocapture 3>&1 >/dev/null");
    std::fs::write(&program, format!("#!/bin/sh\n{line}\n")).expect("a script");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).expect("a program");
    program
}

/// A writer meets a protected piece, and whoever moves it is killed while the thread that it holds has yet to make its call. Gives how soon
/// the writer goes on, and whether that was before the thread had come to rest.
fn killed_in_a_move(dir: &Dir, map: &str, program: Option<&Path>) -> (Duration, bool) {
    let mut stage = Stage::new(dir, map);
    let mut mover = stage.mover(&stage.private, &[]);
    if let Some(program) = program {
        mover = mover.with_standby(program).expect("it starts");
    }
    let piece = QemuMapping { len: ByteLen(2 * MIB), ..stage.private[0] };
    mover.context.register_write_protection(&[piece]).expect("registered");
    let tid: u32 = stage.guest.target.ask("busy").parse().expect("a thread");
    let mut standby = mover.standby.take();
    if let Some(standby) = &mut standby {
        standby.holding(stage.process.pid(), tid).expect("it lives");
    }
    mover.context.protect(piece.hva, piece.len).expect("protected");
    assert_eq!(stage.guest.target.ask("later-write 0 4096 7"), "ok");
    assert_eq!(stage.guest.target.reply_within(Duration::from_millis(100)), None, "it waits");
    // As the kernel does it when we are killed.
    let killed = Instant::now();
    if let Some(standby) = &mut standby {
        standby.tell = None;
    }
    drop(mover);
    let early = stage.guest.target.reply_within(Duration::from_millis(300));
    assert_eq!(stage.guest.target.ask("rest"), "ok");
    let answer = early.clone().or_else(|| stage.guest.target.reply_within(TIMEOUT));
    assert_eq!(answer.as_deref(), Some("done 4096 7"));
    drop(standby);
    (killed.elapsed(), early.is_some())
}

/// The call that a held thread makes late must find the piece as it was protected, or what was written in between is lost.
#[test]
fn protection_outlives_whoever_moves_until_the_held_thread_rests() {
    let dir = vmove_skip::need!(Dir::new(crate::Backing::Thp, 128));
    let scripts = tempfile::tempdir().expect("a folder");
    let program = standby_program(scripts.path());
    let (after, early) = killed_in_a_move(&dir, "map", Some(&program));
    assert!(!early, "protection ended after {after:?}, before the thread had made its call");
    assert!(after < Duration::from_millis(1500), "by the thread, and not by patience: {after:?}");
    let (_, early) = killed_in_a_move(&dir, "map-private", None);
    assert!(early, "nothing keeps it up without the second process: then this test shows nothing");
    // It is not in the way of a move that comes to its end.
    let mut stage = Stage::new(&dir, "map-small");
    stage.fill();
    let (written, ()) = stage.written_during(|stage| {
        let mut mover = stage.mover(&stage.private, &[]).with_standby(&program).expect("it starts");
        while mover.step().expect("moved") {}
    });
    assert_eq!(stage.wrong(&content(&stage.home), &written), 0);
}
