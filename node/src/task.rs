//! Tasks of the daemon.

use std::future::Future;

use tokio::task::JoinHandle;

/// As [`tokio::spawn`]. In a simulation the task belongs to the same process as whoever starts it, and ends when that is killed.
pub fn spawn<F>(work: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    #[cfg(feature = "simulation")]
    if let Some(process) = crate::simulation::current() {
        return process.spawn(work);
    }
    tokio::spawn(work)
}
