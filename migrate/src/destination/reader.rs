//! A bulk reader at work.

use vmove_fabric::CountersHandle;

/// A reader; a thread is joined when this is dropped (call [`Fill::stop`](super::fill::Fill::stop) first).
#[derive(Debug)]
pub(super) struct Reader {
    pub counters: CountersHandle,
    pub worker: Running,
}

/// What it runs as.
#[derive(Debug)]
pub(super) enum Running {
    Thread(Option<std::thread::JoinHandle<()>>),
    Task(tokio::task::AbortHandle),
}

impl Drop for Reader {
    fn drop(&mut self) {
        match &mut self.worker {
            Running::Thread(thread) => {
                if let Some(thread) = thread.take() {
                    // A panic there has printed its message; the session sees missing pages.
                    let _ = thread.join();
                }
            }
            Running::Task(task) => task.abort(),
        }
    }
}
