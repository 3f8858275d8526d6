//! What happens to the device as a whole: it is removed, it fails, its port goes down.
//!
//! A thread sleeps until the device has such news. A device that is lost ends every connection of its fabric at once,
//! where a queue pair alone might wait for ever; a port that goes down is only logged, since it may come back before a
//! connection gives up.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::raw::{Domain, News};

/// What connections know of their device.
#[derive(Debug)]
pub(super) struct Health {
    lost: AtomicBool,
    /// Readable from when the device is lost.
    bell: OwnedFd,
}

impl Health {
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Readable from when the device is lost.
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn lose(&self) {
        self.lost.store(true, Ordering::Release);
        ring(&self.bell);
    }
}

/// Hears the news of a device, as long as it exists.
#[derive(Debug)]
pub(super) struct Watch {
    health: Arc<Health>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(domain: &Arc<Domain>, device: &str) -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC)?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let health = Arc::new(Health { lost: AtomicBool::new(false), bell });
        let (domain, heard, end, device) =
            (Arc::clone(domain), Arc::clone(&health), Arc::clone(&stop), device.to_owned());
        let thread = std::thread::Builder::new()
            .name("rdma-events".to_owned())
            .spawn(move || listen(&domain, &heard, &end, &device))?;
        Ok(Self { health, stop, thread: Some(thread) })
    }

    pub(super) fn health(&self) -> &Arc<Health> {
        &self.health
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        ring(&self.stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn ring(bell: &OwnedFd) {
    // The counter is far from full: this neither blocks nor fails.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

fn listen(domain: &Domain, health: &Health, stop: &OwnedFd, device: &str) {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(domain.device().events(), PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) if !fds[1].revents().is_empty() => return,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return tracing::error!(device, %error, "no longer hears of device failures"),
        }
        match domain.device().take_news() {
            Ok(Some(News::Lost)) => {
                tracing::error!(device, "the RDMA device was removed or has failed");
                health.lose();
            }
            Ok(Some(News::Port(what))) => tracing::warn!(device, what, "the RDMA port has changed"),
            Ok(Some(News::Other(number))) => tracing::debug!(device, number, "RDMA event"),
            Ok(None) => {}
            // The descriptor itself is dead: the device is gone.
            Err(error) => {
                tracing::error!(device, %error, "the RDMA device is gone");
                return health.lose();
            }
        }
    }
}
