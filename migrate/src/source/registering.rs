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
use std::sync::{Arc, Mutex};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::exposure::{ExposeError, Exposure, FIRST_STEP, MOST_IN_A_STEP, lock, register_next};
use super::gate::{Gate, Place, THE_END};
use vmove_node::blocking::spawn_blocking;

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
        let task = spawn_blocking(move || {
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
        (&mut self.task).await.unwrap_or_else(|error| Err(error.into()))
    }
}
