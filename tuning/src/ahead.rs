//! A thread runs before others for a while.

use std::io;

use crate::sys::{Scheduling, scheduling, set_scheduling};

/// The lowest priority that real-time threads have: enough to run before all that share time.
const PRIORITY: i32 = 1;
/// What such a thread starts is as all others.
const AHEAD: Scheduling =
    Scheduling { policy: libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, priority: PRIORITY };

/// A thread that runs before all threads that share time (`SCHED_FIFO`), until this is dropped.
#[derive(Debug)]
pub struct Ahead {
    thread: u32,
    before: Scheduling,
}

impl Ahead {
    /// Puts a thread ahead. None if it is a real-time thread already: whoever made it one knows better.
    ///
    /// # Errors
    /// There is no such thread, or this process lacks `CAP_SYS_NICE`.
    pub fn put(thread: u32) -> io::Result<Option<Self>> {
        let before = scheduling(thread)?;
        let policy = before.policy & !libc::SCHED_RESET_ON_FORK;
        if matches!(policy, libc::SCHED_FIFO | libc::SCHED_RR | libc::SCHED_DEADLINE) {
            return Ok(None);
        }
        set_scheduling(thread, AHEAD)?;
        Ok(Some(Self { thread, before }))
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        // It has ended with its process, or somebody has given it another policy meanwhile.
        if scheduling(self.thread).is_ok_and(|now| now == AHEAD) {
            let _ = set_scheduling(self.thread, self.before);
        }
    }
}

/// Puts a thread back that a process left ahead when it was killed.
///
/// # Errors
/// As [`Ahead::put`].
pub fn put_back(thread: u32) -> io::Result<()> {
    if scheduling(thread)? == AHEAD {
        set_scheduling(thread, Scheduling { policy: libc::SCHED_OTHER, priority: 0 })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn on_a_thread(check: impl FnOnce(u32)) {
        let (tell, told) = channel();
        let (end, ended) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let _ = tell.send(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs());
                let _ = ended.recv();
            });
            check(told.recv().unwrap());
            drop(end);
        });
    }

    #[test]
    fn a_thread_is_ahead_until_it_is_put_back() {
        on_a_thread(|thread| {
            let before = scheduling(thread).unwrap();
            // It needs CAP_SYS_NICE.
            let ahead = vmove_skip::need!(Ahead::put(thread));
            assert!(ahead.is_some());
            assert_eq!(scheduling(thread).unwrap(), AHEAD);
            // A second one leaves it to the first.
            assert!(Ahead::put(thread).unwrap().is_none());
            drop(ahead);
            assert_eq!(scheduling(thread).unwrap(), before);
            // Of a process that was killed.
            std::mem::forget(Ahead::put(thread).unwrap());
            put_back(thread).unwrap();
            assert_eq!(scheduling(thread).unwrap().policy, libc::SCHED_OTHER);
        });
    }

    #[test]
    fn a_thread_that_is_not_there_is_told() {
        Ahead::put(i32::MAX.unsigned_abs()).unwrap_err();
    }
}
