//! Root and hosts for real: threads, connections, multicast.

mod control;
mod host;
mod host_thread;
mod inbox;
mod join;
mod reader;
mod root;
mod wants;

pub use host::{Host, HostOptions, HostStatus, Target};
pub use root::{HostState, Root, RootOptions, RootStatus};
pub use wants::Wants;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmove_fabric::{Fabric, FabricError, Incoming, Sched, ThreadOptions};

use crate::error::SpreadError;

/// A thread that others wait for, and that has more to do than real-time scheduling is for: at every host children wait for what it
/// brings, while they take all processors.
fn prompt(name: &str) -> ThreadOptions {
    ThreadOptions { sched: Sched::Normal { nice: -10 }, ..ThreadOptions::normal(name) }
}

/// Waits until one of the descriptors has something, or for `timeout`.
fn wait(fds: &[(BorrowedFd<'_>, bool)], timeout: Duration) -> Result<(), SpreadError> {
    let mut polled: Vec<PollFd<'_>> = fds
        .iter()
        .map(|(fd, write)| {
            let events = if *write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            PollFd::from_borrowed_fd(*fd, events)
        })
        .collect();
    let time = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    match poll(&mut polled, Some(&time)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(SpreadError::io("wait for connections")(error.into())),
    }
}

/// Takes connections as long as it exists.
#[derive(Debug)]
struct Acceptor {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Acceptor {
    /// Takes connections of `fabric` and hands them to `take`.
    fn start(fabric: Arc<dyn Fabric>, take: impl Fn(Incoming) + Send + 'static) -> Result<Self, SpreadError> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let accept = move || {
            while !stopped.load(Ordering::Relaxed) {
                match fabric.accept(Duration::from_millis(100)) {
                    Ok(incoming) => take(incoming),
                    Err(FabricError::Timeout { .. }) => {}
                    Err(error) => {
                        tracing::warn!(%error, "no more connections are taken");
                        return;
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("vmove-spread-a".to_owned()).spawn(accept);
        Ok(Self { stop, thread: Some(thread.map_err(SpreadError::io("start a thread"))?) })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
