//! Which thread of the target to stop.

use std::fs;
use std::path::Path;

use crate::error::{MemoryError, Result};
use crate::process::{Process, field};

/// How well a thread is suited, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fitness {
    /// Sleeps in a system call that the kernel restarts exactly, with the remaining time.
    SleepsWell,
    /// Runs. A sequence that must not be interrupted (rseq) might be under way, which an injected call ends.
    Runs,
    /// Sleeps in a system call that may answer an interruption with EINTR, as it may for any stopped process.
    SleepsBadly,
}

/// `PF_IO_WORKER` and `PF_USER_WORKER` of the kernel's `sched.h`: a thread that the kernel runs for a process and that is listed among its
/// threads. On kernels before 5.12 the bits mean something else that passes, so at worst another thread is taken.
const KERNEL_WORKER: u64 = 0x10 | 0x4000;

/// The threads of a process, the best suited first.
///
/// Left out are those that the kernel runs for the process: the worker of vhost-net (`vhost-PID`, Linux 6.4), and those of `io_uring`. They
/// let themselves be stopped, but never return to the program, so a call injected there would never be made.
///
/// Any thread can make the calls, since they concern the address space. Preferred is one that sleeps in a call which
/// survives the interruption unseen; QEMU always has one: its RCU thread waits for a futex. Among equals the main
/// thread comes last, because it does the most important work, and because other code of *this* program may be
/// waiting for QEMU as its child by pid, and would be notified of every stop of that thread as if QEMU had ended.
pub(super) fn candidates(process: &Process) -> Result<Vec<u32>> {
    let path = process.path("task");
    let entries = match fs::read_dir(&path) {
        Ok(entries) => entries,
        Err(source) if process.alive() => return Err(MemoryError::Proc { path, source }),
        Err(_) => return Err(MemoryError::ProcessGone { pid: process.pid() }),
    };
    let tids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let tids = tids.filter(|tid: &u32| !runs_in_the_kernel_only(&path.join(tid.to_string())));
    let mut ranked: Vec<(Fitness, bool, u32)> =
        tids.map(|tid: u32| (fitness(&path.join(tid.to_string())), tid == process.pid(), tid)).collect();
    ranked.sort_unstable();
    Ok(ranked.into_iter().map(|(_, _, tid)| tid).collect())
}

fn fitness(task: &Path) -> Fitness {
    fs::read_to_string(task.join("syscall")).map_or(Fitness::SleepsBadly, |text| judge(&text))
}

fn runs_in_the_kernel_only(task: &Path) -> bool {
    fs::read(task.join("stat")).is_ok_and(|stat| flags(&stat) & KERNEL_WORKER != 0)
}

/// Of `/proc/PID/task/TID/stat`; 0 if they cannot be read.
fn flags(stat: &[u8]) -> u64 {
    field(stat, 9).and_then(|flags| flags.parse().ok()).unwrap_or(0)
}

/// `/proc/PID/task/TID/syscall`: `running`, or the number of the call (-1: blocked outside of one) and more.
fn judge(text: &str) -> Fitness {
    let number = text.split_ascii_whitespace().next().unwrap_or_default();
    if number == "running" {
        return Fitness::Runs;
    }
    match number.parse() {
        Ok(
            libc::SYS_futex
            | libc::SYS_futex_waitv
            | libc::SYS_poll
            | libc::SYS_ppoll
            | libc::SYS_select
            | libc::SYS_pselect6
            | libc::SYS_nanosleep
            | libc::SYS_clock_nanosleep
            | libc::SYS_restart_syscall
            | libc::SYS_wait4
            | libc::SYS_waitid
            | libc::SYS_pause
            | libc::SYS_rt_sigsuspend,
        ) => Fitness::SleepsWell,
        _ => Fitness::SleepsBadly,
    }
}

/// The process tracing this thread, if there is one.
pub(super) fn tracer_of(tid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?;
    line.trim().parse().ok().filter(|&pid| pid != 0)
}

/// True if the thread has a shadow stack, on which a hand-made return would fail.
pub(super) fn has_shadow_stack(tid: u32) -> bool {
    fs::read_to_string(format!("/proc/{tid}/status")).is_ok_and(|status| {
        status.lines().any(|l| l.starts_with("x86_Thread_features:") && l.contains("shstk"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleepers_in_restartable_calls_are_preferred() {
        assert_eq!(judge("202 0x7f 0x80 0x0 0x0 0x0 0x0 0x7ffd 0x7f15\n"), Fitness::SleepsWell);
        assert_eq!(judge("running\n"), Fitness::Runs);
        assert_eq!(judge("232 0x3 0x7ffd 0x1 0xffffffff\n"), Fitness::SleepsBadly); // epoll_wait
        assert_eq!(judge("-1 0x7ffd 0x7f15\n"), Fitness::SleepsBadly);
        assert!(Fitness::SleepsWell < Fitness::Runs && Fitness::Runs < Fitness::SleepsBadly);
    }

    #[test]
    fn flags_are_read_whatever_the_name_is() {
        assert_eq!(flags(b"7 (a) b) S 1 7 7 0 -1 4194368 71 0"), 4_194_368);
        assert_eq!(flags(b"7 (vhost-6) S 1 7 7 0 -1 16448 0 0") & KERNEL_WORKER, 0x4000);
        assert_eq!(flags(b""), 0);
    }

    /// As the worker of vhost-net is a thread of QEMU: here that of an `io_uring`, which every kernel has.
    #[test]
    fn threads_that_the_kernel_runs_are_left_out() {
        let ring = match io_uring::IoUring::<io_uring::squeue::Entry, io_uring::cqueue::Entry>::builder()
            .setup_sqpoll(10_000)
            .build(1)
        {
            Ok(ring) => ring,
            Err(error) => return vmove_skip::skip!("no io_uring with a thread of its own: {error}"),
        };
        let us = Process::open(std::process::id()).expect("ourselves");
        let named = |tid: &u32| fs::read_to_string(us.path("task").join(tid.to_string()).join("comm"));
        let find = || {
            let tasks = fs::read_dir(us.path("task")).expect("our threads");
            let mut tids = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse::<u32>().ok());
            tids.find(|tid| named(tid).is_ok_and(|name| name.starts_with("iou-sqp")))
        };
        // It names itself once it runs.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let worker = loop {
            match find() {
                Some(worker) => break worker,
                None => assert!(
                    std::time::Instant::now() < deadline,
                    "the kernel never lists its thread among ours"
                ),
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        };
        let found = candidates(&us).expect("our threads");
        assert!(!found.is_empty() && !found.contains(&worker), "{worker} in {found:?}");
        drop(ring);
    }

    #[test]
    fn the_main_thread_comes_after_its_equals() {
        let us = Process::open(std::process::id()).expect("ourselves");
        let (stop, wait) = std::sync::mpsc::channel::<()>();
        let sleeper = std::thread::spawn(move || wait.recv().is_err());
        std::thread::sleep(std::time::Duration::from_millis(20));
        let order = candidates(&us).expect("our threads");
        assert!(order.len() >= 2);
        assert_ne!(order[0], us.pid(), "a sleeping helper thread was available: {order:?}");
        drop(stop);
        sleeper.join().expect("sleeper");
    }
}
