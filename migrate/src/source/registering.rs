//! Guest memory is registered in order, while the first of it is being read already.
//!
//! ```text
//! registrar   registers pieces ... says how far it has come
//! session                            tells the destination, opens the gate so far
//! naming                                                                names pages up to there
//! ```
//!
//! Messages stay in order, so the destination hears how a page is read before it hears that it shall read it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::exposure::{
    ExposeError, Exposure, FIRST_STEP, MOST_IN_A_STEP, Place, THE_END, lock, register_next,
};

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

/// A registrar at work.
#[derive(Debug)]
pub(super) struct Registering {
    steps: mpsc::UnboundedReceiver<Place>,
    task: JoinHandle<Result<(), ExposeError>>,
    stop: Arc<AtomicBool>,
    gate: Arc<Gate>,
}

impl Drop for Registering {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Nobody waits for what does not come any more: what is named now is of no account, or is read another way.
        self.gate.open_to(THE_END);
    }
}

impl Registering {
    /// Registers what is left.
    pub(super) fn start(exposure: Arc<Mutex<Exposure>>, gate: Arc<Gate>) -> Self {
        let (sender, steps) = mpsc::unbounded_channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let task = tokio::task::spawn_blocking(move || {
            let mut bytes = FIRST_STEP;
            let frontier = || lock(&exposure).frontier();
            while !stopping.load(Ordering::Relaxed) && frontier() != THE_END {
                register_next(&exposure, bytes)?;
                bytes = (bytes * 2).min(MOST_IN_A_STEP);
                if sender.send(frontier()).is_err() {
                    break;
                }
            }
            Ok(())
        });
        Self { steps, task, stop, gate }
    }

    /// How far it has come, each time that it has come further; `None` at its end. Cancel-safe.
    pub(super) async fn step(&mut self) -> Option<Place> {
        self.steps.recv().await
    }

    /// How it ended, after [`Registering::step`] has given `None`.
    pub(super) async fn end(mut self) -> Result<(), ExposeError> {
        (&mut self.task).await.unwrap_or_else(|error| Err(ExposeError::Memory(error.to_string())))
    }
}

#[cfg(test)]
mod tests {
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
