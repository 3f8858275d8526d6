//! Scheduling of the calling thread, and the processor time of threads.
//!
//! Rules:
//! 1. Every call concerns the calling thread only, so no other thread's state is raced with. The clock of another one is only read.
//! 2. Pointers given to the kernel are to locals that live across the call and have the size stated.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;

/// Names the calling thread, as far as 15 bytes go. Best effort: a name is for people.
pub(crate) fn set_name(name: &str) {
    let bytes: Vec<u8> = name.bytes().filter(|byte| *byte != 0).take(15).collect();
    let Ok(name) = CString::new(bytes) else { return };
    // SAFETY: rule 1 and 2: a terminated string that lives across the call.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// Binds the calling thread to one processor.
pub(crate) fn set_cpu(cpu: usize) -> io::Result<()> {
    let mut words = [0_u64; 16];
    let Some(word) = words.get_mut(cpu / 64) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("no processor {cpu}; expected 0..1024"),
        ));
    };
    *word = 1 << (cpu % 64);
    // SAFETY: rule 1 and 2: the size is that of the array.
    check(unsafe { libc::sched_setaffinity(0, size_of_val(&words), words.as_ptr().cast()) })
}

/// `SCHED_FIFO` for the calling thread, not inherited by its children.
pub(crate) fn set_fifo(prio: u8) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: i32::from(prio) };
    // SAFETY: rule 1 and 2.
    check(unsafe {
        libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const param)
    })
}

/// Sets the nice value of the calling thread.
pub(crate) fn set_nice(nice: i8) -> io::Result<()> {
    // SAFETY: rule 1: "who" 0 with PRIO_PROCESS is the calling thread on Linux.
    check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, i32::from(nice)) })
}

/// The nice value of the calling thread.
pub(crate) fn nice() -> i8 {
    // SAFETY: rule 1.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    i8::try_from(nice).unwrap_or(0)
}

/// The calling thread's number.
pub(crate) fn thread_id() -> libc::pid_t {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Processor time that a thread of this process has used, in nanoseconds; `None` if there is no such thread any more.
pub(crate) fn thread_time(id: libc::pid_t) -> Option<u64> {
    // The kernel's number of such a clock, as in `clock_getcpuclockid(3)`: that of a thread (4), of the scheduler (2).
    let clock = !id << 3 | 6;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: rule 1 and 2: a local of the type that the call writes.
    check(unsafe { libc::clock_gettime(clock, &raw mut time) }).ok()?;
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec).ok()?, u64::try_from(time.tv_nsec).ok()?);
    Some(seconds * 1_000_000_000 + nanoseconds)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
