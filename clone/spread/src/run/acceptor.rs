//! Connections that others open.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vmove_fabric::{Fabric, FabricError, Incoming};

use crate::error::SpreadError;

/// Takes connections as long as it exists.
#[derive(Debug)]
pub(super) struct Acceptor {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Acceptor {
    /// Takes connections of `fabric` and hands them to `take`.
    pub(super) fn start(
        fabric: Arc<dyn Fabric>,
        take: impl Fn(Incoming) + Send + 'static,
    ) -> Result<Self, SpreadError> {
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
