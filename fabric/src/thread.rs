//! Names, priorities and processors of threads that move bytes.

use std::io;

use crate::sys;

/// How a thread is scheduled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sched {
    /// Time sharing. `nice` from -20 (first) to 19 (last).
    Normal {
        /// Nice value, -20..=19.
        nice: i8,
    },
    /// `SCHED_FIFO`: runs before every time-shared thread. For threads that somebody waits for and that sleep
    /// nearly always.
    Fifo {
        /// Real-time priority, 1..=99.
        prio: u8,
    },
}

/// How to run a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadOptions {
    /// Name of the thread; the kernel keeps the first 15 bytes.
    pub name: String,
    /// Scheduling.
    pub sched: Sched,
    /// The one processor to run on, counted from 0; `None`: any.
    pub cpu: Option<usize>,
}

/// What [`ThreadOptions::apply`] achieved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedOutcome {
    /// As asked.
    AsAsked,
    /// Real-time scheduling was refused (no `CAP_SYS_NICE`, `RLIMIT_RTPRIO`, or the cgroup forbids it); the
    /// thread runs with this nice value instead.
    NiceInstead {
        /// Nice value in force, -20..=19.
        nice: i8,
    },
}

impl ThreadOptions {
    /// Time sharing with nice 0 on any processor.
    #[must_use]
    pub fn normal(name: impl Into<String>) -> Self {
        Self { name: name.into(), sched: Sched::Normal { nice: 0 }, cpu: None }
    }

    /// For threads that answer urgent requests.
    #[must_use]
    pub fn urgent(name: impl Into<String>) -> Self {
        Self { name: name.into(), sched: Sched::Fifo { prio: 10 }, cpu: None }
    }

    /// For threads that move bulk: they give way to everything else.
    #[must_use]
    pub fn bulk(name: impl Into<String>) -> Self {
        Self { name: name.into(), sched: Sched::Normal { nice: 10 }, cpu: None }
    }

    /// Applies scheduling, processor and name to the calling thread.
    ///
    /// A refused [`Sched::Fifo`] is not an error: the lowest nice value that is permitted is taken, a warning
    /// is logged, and the outcome says so. So is a nice value that is lower than permitted.
    ///
    /// # Errors
    /// The processor does not exist or is not permitted.
    pub fn apply(&self) -> io::Result<SchedOutcome> {
        sys::sched::set_name(&self.name);
        if let Some(cpu) = self.cpu {
            sys::sched::set_cpu(cpu)?;
        }
        let outcome = match self.sched {
            Sched::Normal { nice } => set_nice(nice),
            Sched::Fifo { prio } => match sys::sched::set_fifo(prio) {
                Ok(()) => SchedOutcome::AsAsked,
                Err(error) => {
                    let outcome = match set_nice(-20) {
                        SchedOutcome::AsAsked => SchedOutcome::NiceInstead { nice: -20 },
                        lower => lower,
                    };
                    tracing::warn!(thread = %self.name, prio, %error, ?outcome,
                        "SCHED_FIFO refused; urgent requests will wait behind other work (CAP_SYS_NICE or RLIMIT_RTPRIO would allow it)");
                    outcome
                }
            },
        };
        Ok(outcome)
    }

    /// Spawns a thread that applies these options before it runs `body`.
    ///
    /// # Errors
    /// The thread could not be created.
    pub fn spawn<T, F>(self, body: F) -> io::Result<std::thread::JoinHandle<T>>
    where
        T: Send + 'static,
        F: FnOnce(io::Result<SchedOutcome>) -> T + Send + 'static,
    {
        std::thread::Builder::new().name(self.name.clone()).spawn(move || body(self.apply()))
    }
}

/// The clock of processor time of a thread of this process, which any thread may read: the thread itself need do nothing for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadClock(i32);

impl ThreadClock {
    /// That of the calling thread.
    #[must_use]
    pub fn of_this_thread() -> Self {
        Self(sys::sched::thread_id())
    }

    /// What the thread has used so far, in nanoseconds. `None`: it has ended.
    #[must_use]
    pub fn used_ns(self) -> Option<u64> {
        sys::sched::thread_time(self.0)
    }
}

/// Keeps the processors of this host out of sleep states that take long to wake from, as long as it exists.
///
/// An idle processor takes 20 to 100 us to wake, longer than a page takes to come, and every hop of an urgent request
/// wakes one. The price is power, so hold this only while somebody waits for pages. (`/dev/cpu_dma_latency`, needs
/// root or write access to it.)
#[derive(Debug)]
pub struct StayAwake {
    /// The request holds as long as the file is open.
    _request: std::fs::File,
}

impl StayAwake {
    /// Asks for it.
    ///
    /// # Errors
    /// The kernel has no such device, or this process may not open it: latencies will be longer, nothing else.
    pub fn new() -> io::Result<Self> {
        let mut request = std::fs::File::options().write(true).open("/dev/cpu_dma_latency")?;
        // Longest latency to be tolerated, in microseconds.
        io::Write::write_all(&mut request, &0_i32.to_ne_bytes())?;
        Ok(Self { _request: request })
    }
}

/// Nice as asked, or the nearest that is permitted.
fn set_nice(nice: i8) -> SchedOutcome {
    if sys::sched::set_nice(nice).is_ok() {
        return SchedOutcome::AsAsked;
    }
    SchedOutcome::NiceInstead { nice: sys::sched::nice() }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn another_threads_clock_tells_its_work_and_not_its_sleep() {
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let clock = ThreadClock::of_this_thread();
            std::thread::sleep(Duration::from_millis(50));
            tell.send(clock).unwrap();
            while clock.used_ns().unwrap() < 20_000_000 {
                std::hint::spin_loop();
            }
            tell.send(clock).unwrap();
            let _ = ended.recv();
        });
        let slept = told.recv().unwrap().used_ns().unwrap();
        assert!(slept < 10_000_000, "{slept} ns");
        let worked = told.recv().unwrap().used_ns().unwrap();
        assert!((20_000_000..30_000_000).contains(&worked), "{worked} ns");
        drop(end);
        thread.join().unwrap();
    }

    #[test]
    fn a_thread_that_has_ended_has_no_clock() {
        let clock = std::thread::spawn(ThreadClock::of_this_thread).join().unwrap();
        let begun = Instant::now();
        // Joined, and perhaps not quite gone.
        while clock.used_ns().is_some() {
            assert!(begun.elapsed() < Duration::from_secs(5));
            std::thread::yield_now();
        }
    }
}
