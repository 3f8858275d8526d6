//! Keeps the naming of pages behind their registration.

use std::sync::{Condvar, Mutex, PoisonError};

/// A place in guest memory: number of the RAM block, and offset there.
pub(super) type Place = (usize, u64);
/// Behind all guest memory.
pub(super) const THE_END: Place = (usize::MAX, 0);

/// Keeps pages from being named before the destination knows how to read them.
#[derive(Debug)]
pub(super) struct Gate {
    open_to: Mutex<Place>,
    opened: Condvar,
}

impl Gate {
    pub(super) const fn new(open_to: Place) -> Self {
        Self { open_to: Mutex::new(open_to), opened: Condvar::new() }
    }

    pub(super) fn open_to(&self, place: Place) {
        *self.open_to.lock().unwrap_or_else(PoisonError::into_inner) = place;
        self.opened.notify_all();
    }

    /// Waits until everything before `place` may be named.
    pub(super) fn pass(&self, place: Place) {
        let open_to = self.open_to.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.opened.wait_while(open_to, |open_to| *open_to < place));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_gate_holds_what_lies_behind_and_lets_pass_what_lies_before() {
        let gate = Arc::new(Gate::new((1, 4096)));
        gate.pass((0, u64::MAX));
        gate.pass((1, 4096));
        let (sender, passed) = std::sync::mpsc::channel();
        let other = Arc::clone(&gate);
        let thread = std::thread::spawn(move || {
            other.pass((1, 8192));
            sender.send(()).unwrap();
        });
        gate.open_to((1, 8191));
        assert!(passed.recv_timeout(Duration::from_millis(50)).is_err());
        gate.open_to(THE_END);
        passed.recv().unwrap();
        thread.join().unwrap();
    }
}
