use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use super::*;

const PAGE: usize = 4096;

/// A mapping of a file, unmapped when dropped.
struct Mapped {
    file: File,
    base: *mut u8,
    len: usize,
}

impl Mapped {
    /// Pages of ones.
    fn new(pages: usize) -> Self {
        let file = tempfile::tempfile().unwrap();
        let len = pages * PAGE;
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; len], 0).unwrap();
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, prot, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(base, libc::MAP_FAILED);
        base.expose_provenance();
        Self { file, base: base.cast(), len }
    }

    fn guard(&self) -> Guard {
        // SAFETY: rule 2: mapped until after the test drops the guard; no references are made.
        unsafe { Guard::new(self.base, self.len, PAGE) }.unwrap()
    }

    fn read(&self, at: usize) -> u8 {
        assert!(at < self.len);
        // SAFETY: inside the mapping.
        let place = unsafe { self.base.add(at) };
        // SAFETY: as above; others may write to it.
        unsafe { place.read_volatile() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

#[test]
fn a_file_that_is_shortened_breaks_its_mapping_and_no_other() {
    let (mapped, other) = (Mapped::new(8), Mapped::new(8));
    let (guard, other_guard) = (mapped.guard(), other.guard());
    assert_eq!((mapped.read(5 * PAGE + 7), guard.is_broken()), (1, false));
    mapped.file.set_len(4 * PAGE as u64).unwrap();
    assert_eq!((mapped.read(3 * PAGE), guard.is_broken()), (1, false), "what is left can be read");
    assert_eq!((mapped.read(5 * PAGE + 7), guard.is_broken()), (0, true));
    let broken = |mapped: &Mapped, at: usize| is_broken(mapped.base.addr() + at, 1);
    assert!(broken(&mapped, 0) && broken(&mapped, 8 * PAGE - 1) && !broken(&mapped, 8 * PAGE));
    assert_eq!(other.read(5 * PAGE), 1);
    assert!(!other_guard.is_broken() && !broken(&other, 0));
    // The place of a mapping that is gone is good again.
    drop(guard);
    assert!(!broken(&mapped, 0));
}

#[test]
fn threads_that_meet_the_end_at_once_all_see_the_mark() {
    for _ in 0..50 {
        let mapped = Mapped::new(64);
        let guard = mapped.guard();
        mapped.file.set_len(0).unwrap();
        let base = mapped.base.expose_provenance();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    for page in (0..64).map(|page| (page + thread) % 64) {
                        let place = ptr::with_exposed_provenance::<u8>(base + page * PAGE);
                        // SAFETY: inside the mapping, which outlives the scope.
                        let byte = unsafe { place.read_volatile() };
                        assert!(byte == 0 && is_broken(base, 1));
                    }
                });
            }
        });
        assert!(guard.is_broken());
    }
}

#[test]
fn a_slot_is_used_again() {
    let mapped = Mapped::new(1);
    for _ in 0..2 * MOST {
        drop(mapped.guard());
    }
}

/// Runs a test of this program that is to die, and gives the signal by which it did.
fn death(test: &str) -> Option<i32> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--test-threads=1"]);
    command.output().unwrap().status.signal()
}

#[test]
fn outside_of_guarded_mappings_it_kills_as_before() {
    assert_eq!(death("tests::touches_a_mapping_without_guard"), Some(libc::SIGBUS));
    assert_eq!(death("tests::touches_a_mapping_whose_guard_is_gone"), Some(libc::SIGBUS));
}

/// Runs a test of this program that changes what SIGBUS does, and says whether it went well.
fn alone(test: &str) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--test-threads=1"]);
    command.status().unwrap().success()
}

#[test]
fn a_handler_of_before_gets_what_is_not_ours() {
    assert!(alone("tests::has_a_handler_of_its_own"));
    assert!(alone("tests::ignores_the_signal"));
    assert_eq!(death("tests::is_sent_the_signal"), Some(libc::SIGBUS));
}

/// What SIGBUS does until a guard is made.
fn before(action: usize, flags: c_int) {
    // SAFETY: all-zero is a valid `sigaction`.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    (before.sa_sigaction, before.sa_flags) = (action, flags);
    // SAFETY: a whole `sigaction`, whose handler has the signature that its flags ask for.
    assert_eq!(unsafe { libc::sigaction(libc::SIGBUS, &raw const before, ptr::null_mut()) }, 0);
}

fn send() {
    // SAFETY: sends a signal to this thread.
    unsafe { libc::raise(libc::SIGBUS) };
}

/// How often the handler of before was called.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Puts the file's length right, so that the access goes on.
static CUT: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);

extern "C" fn of_before(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    if CALLS.fetch_add(1, Ordering::Relaxed) > 8 {
        // It is not what would mend the fault.
        // SAFETY: ends the process.
        unsafe { libc::_exit(1) };
    }
    // SAFETY: a descriptor of the test, or none.
    unsafe { libc::ftruncate(CUT.load(Ordering::Relaxed), 8 * PAGE as i64) };
}

#[test]
#[ignore = "changes what SIGBUS does; run by another test"]
fn has_a_handler_of_its_own() {
    before(of_before as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize, libc::SA_SIGINFO);
    let (ours, other) = (Mapped::new(8), Mapped::new(8));
    let guard = ours.guard();
    CUT.store(other.file.as_raw_fd(), Ordering::Relaxed);
    for calls in [1, 2] {
        other.file.set_len(0).unwrap();
        assert_eq!((other.read(PAGE), CALLS.load(Ordering::Relaxed)), (0, calls));
    }
    send();
    assert_eq!((guard.is_broken(), CALLS.load(Ordering::Relaxed)), (false, 3));
    // Ours is still there.
    ours.file.set_len(0).unwrap();
    assert_eq!((ours.read(0), guard.is_broken(), CALLS.load(Ordering::Relaxed)), (0, true, 3));
}

#[test]
#[ignore = "changes what SIGBUS does; run by another test"]
fn ignores_the_signal() {
    before(libc::SIG_IGN, 0);
    let ours = Mapped::new(8);
    let guard = ours.guard();
    send();
    ours.file.set_len(0).unwrap();
    assert_eq!((ours.read(0), guard.is_broken()), (0, true));
}

#[test]
#[ignore = "dies; run by another test"]
fn is_sent_the_signal() {
    before(libc::SIG_DFL, 0);
    let ours = Mapped::new(8);
    let _guard = ours.guard();
    send();
}

/// Whatever comes and goes in a slot: what a handler reads of it is one mapping, not the beginning of one and the end of another.
#[test]
fn what_is_read_of_a_slot_belongs_together() {
    let mapped = Mapped::new(24);
    let stop = AtomicBool::new(false);
    let base = mapped.base.expose_provenance();
    // SAFETY: rule 2: mapped until after the threads have ended; no references are made.
    let guard = |page: usize| unsafe {
        Guard::new(ptr::with_exposed_provenance_mut(base + page * PAGE), 8 * PAGE, PAGE).unwrap()
    };
    let between = base + 12 * PAGE;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                drop(guard(0));
                drop(guard(16));
            }
        });
        let holds_it = |extent: Extent| (extent.start..extent.end).contains(&between);
        let found = (0..10_000_000).filter(|_| used().filter_map(Slot::extent).any(holds_it)).count();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(found, 0);
    });
}

#[test]
#[ignore = "dies; run by another test"]
fn touches_a_mapping_without_guard() {
    let (mapped, other) = (Mapped::new(2), Mapped::new(2));
    let _guard = other.guard();
    mapped.file.set_len(0).unwrap();
    mapped.read(0);
}

#[test]
#[ignore = "dies; run by another test"]
fn touches_a_mapping_whose_guard_is_gone() {
    let mapped = Mapped::new(2);
    drop(mapped.guard());
    mapped.file.set_len(0).unwrap();
    mapped.read(0);
}
