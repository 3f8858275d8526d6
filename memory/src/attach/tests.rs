//! Attaching to a real child process, hundreds of times, in every state a thread can be in.
#![allow(unsafe_code)]

use std::path::Path;
use std::process::Stdio;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{Injector, Keep, create_uffd};
use crate::error::MemoryError;
use crate::process::Process;
use crate::testing::ram::{Dir, Guest, poke};
use crate::testing::{Target, Word, command};
use crate::{Backing, ByteLen, EventBatch, FaultContext, Outcome, UffdEvent, UffdFeatures};

/// In a tracer process of the tests below: dies at the checkpoint the test chose.
pub(super) fn checkpoint(number: u32) {
    static DIE_AT: OnceLock<Option<u32>> = OnceLock::new();
    let die_at = DIE_AT.get_or_init(|| std::env::var("VMOVE_TEST_DIE_AT").ok()?.parse().ok());
    if *die_at == Some(number) {
        let _ = kill_process(rustix::process::getpid(), Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}

/// False in a tracer that does without the remedy.
pub(super) fn frames_allowed() -> bool {
    std::env::var_os("VMOVE_TEST_NO_FRAME").is_none()
}

/// To the thread under test.
fn signal_thread(pid: u32, tid: u32, signal: libc::c_int) {
    // SAFETY: signals a thread of our child.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, signal) };
    assert_eq!(result, 0, "tgkill");
}

/// To the whole process.
fn signal(target: &Target, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(target.pid()).expect("a pid")).expect("a pid");
    kill_process(pid, signal).expect("our child");
}

fn inject_getpid(process: &Process, tid: u32) {
    let mut injector = Injector::attach_to(process, &[tid]).expect("attach");
    assert!(injector.survives_our_death(), "glibc has the code for it");
    for _ in 0..2 {
        let result = injector.syscall(libc::SYS_getpid, [0; 6]).expect("getpid");
        assert_eq!(result, u64::from(process.pid()));
    }
    injector.release().expect("release");
}

fn assert_unharmed(target: &Target) {
    for word in [Word::WrongEintr, Word::Corrupted, Word::Wrong] {
        assert_eq!(target.word(word), 0, "{word:?}");
    }
}

/// Attaches `times` times, at odd intervals.
fn attach_often(role: &str, times: u32, pause: Duration) -> Target {
    let target = Target::start(role);
    let process = Process::open(target.pid()).expect("child");
    for i in 0..times {
        inject_getpid(&process, target.tid());
        std::thread::sleep(pause + Duration::from_micros(u64::from(i * 37 % 500)));
    }
    assert_unharmed(&target);
    target
}

/// Waits until a status word has a value; this machine may be busy.
fn reaches(target: &Target, word: Word, value: u64) -> bool {
    let deadline = Instant::now() + Duration::from_secs(5);
    while target.word(word) != value && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    target.word(word) == value
}

fn goes_on(target: &Target) -> bool {
    goes_on_within(target, Duration::from_secs(10))
}

fn goes_on_within(target: &Target, timeout: Duration) -> bool {
    let (before, deadline) = (target.word(Word::Rounds), Instant::now() + timeout);
    while Instant::now() < deadline {
        if target.word(Word::Rounds) > before + 1 {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

#[test]
fn user_mode_keeps_every_register() {
    let target = attach_often("spin", 400, Duration::from_micros(100));
    assert!(goes_on(&target));
    assert_unharmed(&target);
    assert!(target.finish());
}

#[test]
fn read_is_restarted() {
    let mut target = attach_often("read", 300, Duration::from_micros(100));
    assert_eq!(target.word(Word::Rounds), 0, "it waited all the time");
    target.feed(b"abc");
    assert!(reaches(&target, Word::Rounds, 3));
    assert_unharmed(&target);
}

/// An attach every 2 ms: a call that started over with its full time would never end.
fn timed_call_goes_on_with_the_remaining_time(role: &str) {
    let begin = Instant::now();
    let target = attach_often(role, 300, Duration::from_millis(1));
    let (rounds, took) = (target.word(Word::Rounds), begin.elapsed());
    assert!(rounds >= 3, "{rounds} waits of 60 ms ended in {took:?}");
    eprintln!("{role}: {rounds} waits in {took:?}, the longest {} us", target.word(Word::LongestMicros));
    assert!(goes_on(&target));
    assert_unharmed(&target);
}

#[test]
fn ppoll_goes_on_with_the_remaining_time() {
    timed_call_goes_on_with_the_remaining_time("ppoll");
}

#[test]
fn poll_goes_on_with_the_remaining_time() {
    timed_call_goes_on_with_the_remaining_time("poll");
}

#[test]
fn nanosleep_goes_on_with_the_remaining_time() {
    timed_call_goes_on_with_the_remaining_time("nanosleep");
}

#[test]
fn futex_wait_goes_on_with_the_remaining_time() {
    timed_call_goes_on_with_the_remaining_time("futex");
}

#[test]
fn endless_waits_are_not_disturbed() {
    for role in ["ppoll-forever", "futex-forever", "epoll-forever"] {
        let target = attach_often(role, 200, Duration::from_micros(100));
        assert_eq!(target.word(Word::Rounds), 0, "{role} waited all the time");
        signal_thread(target.pid(), target.tid(), libc::SIGUSR1);
        assert!(reaches(&target, Word::RightEintr, 1) && reaches(&target, Word::Signals, 1), "{role}");
        assert_unharmed(&target);
    }
}

/// A signal with a handler must end `ppoll` with EINTR, also when it comes while an injected call is made.
#[test]
fn no_signal_is_lost() {
    let target = Target::start("ppoll-forever");
    let process = Process::open(target.pid()).expect("child");
    let (pid, tid) = (target.pid(), target.tid());
    let sent = 300;
    let sender = std::thread::spawn(move || {
        for i in 0..sent {
            // Real-time signals are queued, each of them.
            signal_thread(pid, tid, libc::SIGRTMIN());
            std::thread::sleep(Duration::from_micros(i * 53 % 900));
        }
    });
    while !sender.is_finished() {
        inject_getpid(&process, target.tid());
    }
    sender.join().expect("sender");
    assert!(reaches(&target, Word::Signals, sent), "{} of {sent}", target.word(Word::Signals));
    assert!(target.word(Word::RightEintr) > 0);
    assert_unharmed(&target);
}

/// True once the process is stopped, which may take it a moment.
fn is_stopped(target: &Target) -> bool {
    let deadline = Instant::now() + Duration::from_secs(5);
    let path = format!("/proc/{}/stat", target.pid());
    let state = || std::fs::read_to_string(&path).ok()?.rsplit_once(')')?.1.trim().chars().next();
    while state() != Some('T') && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    state() == Some('T')
}

#[test]
fn a_stopped_process_stays_stopped() {
    for role in ["spin", "ppoll"] {
        let target = Target::start(role);
        let process = Process::open(target.pid()).expect("child");
        signal(&target, Signal::STOP);
        assert!(is_stopped(&target));
        for _ in 0..20 {
            inject_getpid(&process, target.tid());
        }
        assert!(is_stopped(&target), "{role}");
        signal(&target, Signal::CONT);
        assert!(goes_on(&target), "{role}");
        assert_unharmed(&target);
    }
}

#[test]
fn stop_and_continue_may_come_at_any_time() {
    let target = Target::start("ppoll");
    let process = Process::open(target.pid()).expect("child");
    let pid = i32::try_from(target.pid()).expect("a pid");
    let sender = std::thread::spawn(move || {
        for i in 0..300 {
            for signal in [libc::SIGSTOP, libc::SIGCONT] {
                // SAFETY: stops and continues our child.
                unsafe { libc::kill(pid, signal) };
                std::thread::sleep(Duration::from_micros(i * 29 % 400));
            }
        }
    });
    while !sender.is_finished() {
        inject_getpid(&process, target.tid());
    }
    sender.join().expect("sender");
    assert!(goes_on(&target));
    assert_unharmed(&target);
}

#[test]
fn threads_may_end_while_we_attach() {
    let target = Target::start("threads");
    let process = Process::open(target.pid()).expect("child");
    for _ in 0..200 {
        let mut injector = Injector::attach(&process).expect("attach");
        let result = injector.syscall(libc::SYS_getpid, [0; 6]).expect("getpid");
        assert_eq!(result, u64::from(process.pid()));
    }
    assert!(goes_on(&target));
    assert!(target.finish());
}

#[test]
fn a_process_may_be_attached_to_while_it_starts() {
    for _ in 0..30 {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("spawn");
        let process = Process::open(child.id()).expect("child");
        let result = Injector::attach(&process).and_then(|mut i| i.syscall(libc::SYS_getpid, [0; 6]));
        child.kill().expect("our child");
        child.wait().expect("our child");
        assert_eq!(result.expect("attach"), u64::from(process.pid()));
    }
}

#[test]
fn errors_of_the_call_and_of_the_attach_are_told_apart() {
    let mut target = Target::start("ppoll");
    let process = Process::open(target.pid()).expect("child");
    let mut injector = Injector::attach(&process).expect("attach");
    let error = injector.syscall(libc::SYS_close, [9999, 0, 0, 0, 0, 0]).expect_err("not open there");
    assert!(
        matches!(&error, MemoryError::Remote { what: "close", source, .. } if source.raw_os_error() == Some(libc::EBADF)),
        "{error}"
    );
    let error = Injector::attach_to(&process, &[injector.thread()]).expect_err("one tracer at a time");
    assert!(matches!(error, MemoryError::AlreadyTraced { .. }), "{error}");
    drop(injector);
    assert!(goes_on(&target));
    assert_unharmed(&target);

    let mut injector = Injector::attach(&process).expect("attach");
    target.child.kill().expect("our child");
    target.child.wait().expect("our child");
    let error = injector.syscall(libc::SYS_getpid, [0; 6]).expect_err("it is dead");
    assert!(error.is_process_gone(), "{error}");
    let error = Injector::attach(&process).expect_err("it is dead");
    assert!(error.is_process_gone(), "{error}");
}

/// A call that waits until we have done something, as madvise does until a discard event is read.
#[test]
fn a_call_may_wait_for_us() {
    let mut target = Target::start("ppoll");
    let process = Process::open(target.pid()).expect("child");
    let mut injector = Injector::attach(&process).expect("attach");
    let mut rounds = 0;
    let result = injector.syscall_while(libc::SYS_pause, [0; 6], || {
        rounds += 1;
        if rounds == 20 {
            target.child.kill().expect("our child");
        }
        Ok(())
    });
    assert!(rounds >= 20, "the closure ran while the call waited");
    assert!(result.expect_err("it was killed").is_process_gone());
}

/// Other code of this program that waits for the target as its child is given the news of our stops.
#[test]
fn stops_are_found_though_somebody_else_took_the_news() {
    let target = Target::start("ppoll");
    let process = Process::open(target.pid()).expect("child");
    let pid = i32::try_from(target.pid()).expect("a pid");
    let stop = AtomicBool::new(false);
    let stolen = std::thread::scope(|scope| {
        let thief = scope.spawn(|| {
            let mut stolen = 0;
            while !stop.load(Ordering::Relaxed) {
                let mut status = 0;
                // SAFETY: writes one int.
                stolen += u32::from(unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == pid);
            }
            stolen
        });
        let (process, main_thread) = (&process, target.pid());
        let attaches = scope.spawn(move || {
            for _ in 0..100 {
                // The main thread, which is the one a parent waits for.
                inject_getpid(process, main_thread);
            }
        });
        let result = attaches.join();
        stop.store(true, Ordering::Relaxed);
        result.expect("attaches");
        thief.join().expect("the thief")
    });
    assert!(stolen > 0, "nothing was put to the test");
    assert!(goes_on(&target));
    assert_unharmed(&target);
}

/// A thread that waits for a page nobody serves cannot be stopped: another one is used, and it is let go unharmed.
#[test]
fn a_thread_stuck_in_a_fault_is_passed_over() {
    let dir = vmove_skip::need!(Dir::new(Backing::Thp, 4));
    let mut guest = Guest::start(vec![dir.file("ram", 4)]);
    let remote = create_uffd(&guest.process, UffdFeatures::Faults, Keep::InQemu).expect("create");
    let context = FaultContext::new(remote);
    context.register(&guest.mappings).expect("register");
    guest.target.ask("later-sysread 0 8");
    let mut batch = EventBatch::new(4);
    let stuck = loop {
        context.read_events(&mut batch).expect("events");
        if let [UffdEvent::Fault { thread, .. }] = batch.events() {
            break *thread;
        }
    };
    for _ in 0..5 {
        let begin = Instant::now();
        let mut injector = Injector::attach_to(&guest.process, &[stuck, guest.target.tid()]).expect("attach");
        assert_eq!(injector.thread(), guest.target.tid());
        assert!(begin.elapsed() < Duration::from_millis(500));
        injector.syscall(libc::SYS_getpid, [0; 6]).expect("getpid");
    }
    poke(&guest.files[0].map().expect("map"), 8, 31);
    let outcome =
        context.continue_range(guest.mappings[0].hva, ByteLen(4096), guest.page()).expect("continue");
    assert_eq!(outcome, Outcome::Mapped(ByteLen(4096)));
    assert_eq!(guest.target.reply_within(Duration::from_secs(5)).as_deref(), Some("done 8 31"));
}

/// Starts a tracer process that dies at a checkpoint, and waits for its death.
fn let_a_tracer_die(target: &Target, at: u32, with_frame: bool) {
    let mut command = command("attach::tests::tracer_main", "tracer", Path::new("/dev/null"));
    command.env("VMOVE_TEST_DIE_AT", at.to_string()).env("VMOVE_TEST_TID", target.tid().to_string());
    command.env("VMOVE_TEST_PID", target.pid().to_string()).stdout(Stdio::null());
    if !with_frame {
        command.env("VMOVE_TEST_NO_FRAME", "1");
    }
    let status = command.status().expect("tracer");
    assert!(!status.success(), "it was killed at checkpoint {at}");
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn tracer_main() {
    let number = |name| std::env::var(name).ok().and_then(|v| v.parse::<u32>().ok());
    let (Some(pid), Some(tid)) = (number("VMOVE_TEST_PID"), number("VMOVE_TEST_TID")) else { return };
    let process = Process::open(pid).expect("target");
    let mut injector = Injector::attach_to(&process, &[tid]).expect("attach");
    injector.syscall(libc::SYS_getpid, [0; 6]).expect("getpid");
    injector.release().expect("release");
}

/// Killed at any point between attach and detach, we leave the thread as it was.
#[test]
fn our_death_leaves_the_thread_unharmed() {
    for role in ["spin", "ppoll", "nanosleep", "futex", "read"] {
        for at in 1..=8 {
            let mut target = Target::start(role);
            let_a_tracer_die(&target, at, true);
            if role == "read" {
                target.feed(b"abc");
                assert!(reaches(&target, Word::Rounds, 3), "checkpoint {at}");
            } else {
                assert!(goes_on(&target), "{role}, checkpoint {at}");
            }
            assert_eq!(target.word(Word::Corrupted), 0, "{role}, checkpoint {at}");
            assert_eq!(target.word(Word::Wrong), 0, "{role}, checkpoint {at}");
            // A restart block does not survive the signal return: one EINTR is allowed then.
            let allowed = u64::from(matches!(role, "nanosleep" | "futex"));
            assert!(target.word(Word::WrongEintr) <= allowed, "{role}, checkpoint {at}");
            signal_thread(target.pid(), target.tid(), libc::SIGUSR1);
            let takes_signals = reaches(&target, Word::Signals, 1);
            assert!(takes_signals, "{role}, checkpoint {at}");
        }
    }
}

/// The test above, without the remedy.
#[test]
fn without_the_frame_our_death_kills() {
    let mut harmed = 0;
    for at in [2, 3, 4] {
        let mut target = Target::start("spin");
        let_a_tracer_die(&target, at, false);
        let dead = !goes_on_within(&target, Duration::from_secs(1))
            || target.child.try_wait().expect("our child").is_some();
        harmed += u32::from(dead || target.word(Word::Corrupted) > 0);
    }
    assert_eq!(harmed, 3, "expected the thread to be lost each time");
}
