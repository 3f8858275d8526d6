//! Work that blocks, on a thread of its own, within the span of whoever asks for it.

use tokio::task::JoinHandle;
use tracing::Span;

/// A task that did not come to its end.
#[derive(Debug, thiserror::Error)]
#[error("A task of vmoved failed ({0}): see its log")]
pub struct TaskFailed(#[from] tokio::task::JoinError);

/// As [`tokio::task::spawn_blocking`]; what the work logs says which migration or fork it is for.
pub fn spawn_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let span = Span::current();
    #[cfg(feature = "simulation")]
    if let Some(process) = crate::simulation::current() {
        // In turn with all other tasks: nothing may depend on threads.
        return process.spawn(async move { span.in_scope(work) });
    }
    tokio::task::spawn_blocking(move || span.in_scope(work))
}

/// Runs what blocks (files, forks, mounts) on a thread of its own.
///
/// # Errors
/// [`TaskFailed`] if it panics, or if this process is about to end.
pub async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, TaskFailed> {
    Ok(spawn_blocking(work).await?)
}
