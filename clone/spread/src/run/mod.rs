//! Root and hosts for real: threads, connections, multicast.

mod acceptor;
mod control;
mod host;
mod inbox;
mod root;

pub use host::{Host, HostOptions, HostStatus, Target, Wants};
pub use root::{HostState, Root, RootOptions, RootStatus};

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmove_fabric::{Sched, ThreadOptions};

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
