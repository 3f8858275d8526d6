//! The priority of threads that measure.
//!
//! Rule that the `unsafe` block below rests on: the pointer passed to the kernel points to a local variable that
//! outlives the call.
#![allow(unsafe_code)]

/// Gives the calling thread real-time priority. It measures, and sleeps nearly always. Without the right to do so (CAP_SYS_NICE) it
/// stays an ordinary thread; its samples may then be late, but not wrong.
pub fn be_punctual() {
    let lowest_of_real_time = libc::sched_param { sched_priority: 1 };
    // SAFETY: the module's rule; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const lowest_of_real_time) };
}
