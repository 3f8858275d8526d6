//! What other threads have for a thread that waits for descriptors.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::SpreadError;

/// A queue with a descriptor that is readable when something is in it.
#[derive(Debug)]
pub(super) struct Inbox<T> {
    items: Mutex<VecDeque<T>>,
    event: OwnedFd,
}

impl<T> Inbox<T> {
    pub(super) fn new() -> Result<Self, SpreadError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| SpreadError::io("make an event descriptor")(error.into()))?;
        Ok(Self { items: Mutex::default(), event })
    }

    pub(super) fn push(&self, item: T) {
        self.items.lock().unwrap_or_else(PoisonError::into_inner).push_back(item);
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    pub(super) fn take(&self) -> VecDeque<T> {
        let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        std::mem::take(&mut *self.items.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
