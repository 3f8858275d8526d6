//! What a child does.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Word;
use super::registers::{call, spin};

/// Status words, shared with the parent.
struct Status(*mut u64);

impl Status {
    fn open() -> Self {
        let path = std::env::var_os("VMOVE_TEST_STATUS").expect("set by the parent");
        let file = std::fs::File::options().read(true).write(true).open(path).expect("status file");
        // SAFETY: a new mapping of a page that nobody truncates.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        Self(base.cast())
    }

    fn word(&self, word: Word) -> &'static AtomicU64 {
        // SAFETY: inside the page.
        let at = unsafe { self.0.add(word as usize) };
        // SAFETY: mapped until the process ends, aligned, used as atomics by us and by pread and pwrite elsewhere.
        unsafe { AtomicU64::from_ptr(at) }
    }

    fn add(&self, word: Word) {
        self.word(word).fetch_add(1, Ordering::Relaxed);
    }

    fn running(&self) -> bool {
        self.word(Word::Stop).load(Ordering::Relaxed) == 0
    }
}

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_signal(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

fn handle(signal: libc::c_int) {
    // SAFETY: all-zero is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    // SAFETY: the handler only adds to an atomic. No SA_RESTART.
    unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn child_main() {
    let Ok(role) = std::env::var("VMOVE_TEST_CHILD") else { return };
    // Never survive a parent that was killed.
    // SAFETY: no memory is involved.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let status = Status::open();
    handle(libc::SIGUSR1);
    handle(libc::SIGRTMIN());
    // SAFETY: no memory is involved.
    let tid = unsafe { libc::gettid() };
    let begin = || status.word(Word::Tid).store(u64::try_from(tid).expect("positive"), Ordering::Release);
    match role.as_str() {
        "threads" => short_lived_threads(&status, begin),
        "obey" => {
            begin();
            super::obey::obey();
        }
        _ => {
            begin();
            rounds(&role, &status);
        }
    }
}

/// The same system call, or the same spin, over and over.
fn rounds(role: &str, status: &Status) {
    while status.running() {
        let handled = SIGNALS.load(Ordering::Relaxed);
        let begin = Instant::now();
        let (result, expected, limit, intact) = one_round(role);
        let took = begin.elapsed();
        let handler_ran = SIGNALS.load(Ordering::Relaxed) != handled;
        status.word(Word::Signals).store(SIGNALS.load(Ordering::Relaxed), Ordering::Relaxed);
        if !intact {
            status.add(Word::Corrupted);
        }
        if result == -i64::from(libc::EINTR) {
            status.add(if handler_ran { Word::RightEintr } else { Word::WrongEintr });
        } else if result != expected || limit.is_some_and(|limit| took < limit) {
            status.add(Word::Wrong);
        } else if limit.is_some() {
            let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
            status.word(Word::LongestMicros).fetch_max(micros, Ordering::Relaxed);
        }
        status.add(Word::Rounds);
    }
}

/// What a timed call waits for.
pub const SLEEP_TIMEOUT: Duration = Duration::from_millis(60);

/// Result, the right result, the shortest time it may take, whether all registers were kept.
fn one_round(role: &str) -> (i64, i64, Option<Duration>, bool) {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 60_000_000 };
    let time_at = std::ptr::from_mut(&mut time) as u64;
    let mut byte = 0_u8;
    let word = 0_u32;
    let futex = std::ptr::from_ref(&word) as u64;
    let timed_out = -i64::from(libc::ETIMEDOUT);
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    match role {
        "spin" => (0, 0, None, spin(200_000)),
        "read" => {
            let (result, intact) =
                call(libc::SYS_read, [0, std::ptr::from_mut(&mut byte) as u64, 1, 0, 0, 0]);
            // End of input at the end of the test.
            (if result == 0 { 1 } else { result }, 1, None, intact)
        }
        "ppoll" => timed(call(libc::SYS_ppoll, [0, 0, time_at, 0, 0, 0]), 0),
        "poll" => timed(call(libc::SYS_poll, [0, 0, 60, 0, 0, 0]), 0),
        "nanosleep" => timed(call(libc::SYS_nanosleep, [time_at, 0, 0, 0, 0, 0]), 0),
        // FUTEX_WAIT_PRIVATE
        "futex" => timed(call(libc::SYS_futex, [futex, 128, 0, time_at, 0, 0]), timed_out),
        "ppoll-forever" => {
            let (result, intact) = call(libc::SYS_ppoll, [0, 0, 0, 0, 0, 0]);
            (result, -i64::from(libc::EINTR), None, intact)
        }
        "futex-forever" => {
            let (result, intact) = call(libc::SYS_futex, [futex, 128, 0, 0, 0, 0]);
            (result, -i64::from(libc::EINTR), None, intact)
        }
        "epoll-forever" => {
            let (epfd, _) = call(libc::SYS_epoll_create1, [0; 6]);
            let epfd = u64::try_from(epfd).expect("an epoll");
            let event = std::ptr::from_mut(&mut event) as u64;
            let result = call(libc::SYS_epoll_wait, [epfd, event, 1, u64::from(u32::MAX), 0, 0]);
            call(libc::SYS_close, [epfd, 0, 0, 0, 0, 0]);
            (result.0, -i64::from(libc::EINTR), None, result.1)
        }
        _ => panic!("unknown role {role}"),
    }
}

const fn timed((result, intact): (i64, bool), expected: i64) -> (i64, i64, Option<Duration>, bool) {
    (result, expected, Some(SLEEP_TIMEOUT), intact)
}

/// Threads that come and go all the time.
fn short_lived_threads(status: &Status, begin: impl FnOnce()) {
    begin();
    while status.running() {
        let threads: Vec<_> = (0..4)
            .map(|i| std::thread::spawn(move || std::thread::sleep(Duration::from_micros(200 * i))))
            .collect();
        for thread in threads {
            thread.join().expect("it only sleeps");
        }
        status.add(Word::Rounds);
    }
}
