//! Clock, sleep and placement of threads: three system calls without a wrapper in `std`.
//!
//! Rule that the `unsafe` blocks below rest on: pointers passed to the kernel point to initialised local variables that
//! outlive the call.
#![allow(unsafe_code)]

/// CLOCK_MONOTONIC in nanoseconds: the guest's time, which stands still while its machine is stopped.
#[inline]
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the module's rule.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Sleeps until `until`, in nanoseconds of [`now`]. May return early on a signal.
pub fn sleep_until(until: u64) {
    let time = libc::timespec {
        tv_sec: i64::try_from(until / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(until % 1_000_000_000).unwrap_or(0),
    };
    // SAFETY: the module's rule; no remaining time is asked for.
    unsafe {
        libc::clock_nanosleep(
            libc::CLOCK_MONOTONIC,
            libc::TIMER_ABSTIME,
            &raw const time,
            std::ptr::null_mut(),
        )
    };
}

/// Keeps the calling thread on virtual CPU `cpu`, where there is one.
pub fn stay_on_cpu(cpu: usize) {
    // SAFETY: all zeroes is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `cpu` is below the number of threads, far below the size of the set.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the module's rule. Failure (no such CPU) leaves the scheduler free to choose.
    unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
}
