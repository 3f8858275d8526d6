//! The pages of the stopped guest whose copy at the destination is not current: named, and for `--verify` hashed.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use vmove_memory::PageIndex;

use super::classify::Classified;
use super::error::NamingError;
use super::memory::SourceMemory;
use super::page_service::PageService;
use crate::page_hash::{ZERO_PAGE, page_hash};
use crate::pending::PageSet;
use crate::proto::message::{Hashes, ToDestination, WireRun};
use vmove_node::blocking::spawn_blocking;
use vmove_types::problem::chain;

/// Hashes sent at once: 64 KiB, so that also over a slow link a message arrives before silence is taken for death.
const HASHES_AT_ONCE: usize = 8 << 10;

/// The final set, and how far the destination has been told of it.
#[derive(Debug)]
pub(super) struct FinalPages {
    sets: Arc<Vec<PageSet>>,
    naming: Option<Naming>,
    hashes: Option<mpsc::Receiver<Hashes>>,
    /// What they were found to be, when all have been named.
    named: Option<Classified>,
}

/// Pages being named.
#[derive(Debug)]
struct Naming {
    batches: mpsc::Receiver<Vec<WireRun>>,
    task: JoinHandle<Result<Classified, NamingError>>,
}

impl FinalPages {
    pub(super) fn new(sets: Vec<PageSet>) -> Self {
        Self { sets: Arc::new(sets), naming: None, hashes: None, named: None }
    }

    /// Every page: of a guest of which nobody knows any more what has crossed. The destination takes what it lacks.
    pub(super) fn all(memory: &SourceMemory) -> Self {
        Self::new(memory.blocks.iter().map(|b| PageSet::full(b.file.pages())).collect())
    }

    /// Begins to name the pages; [`FinalPages::next`] gives what is to be said.
    pub(super) fn name(&mut self, pages: &PageService) {
        let (batches, task) = pages.memory.name_pages(Arc::clone(&self.sets), Arc::clone(&pages.gate));
        self.naming = Some(Naming { batches, task });
    }

    /// Begins to hash every page for `--verify`.
    pub(super) fn hash(&mut self, pages: &PageService) {
        self.hashes = Some(hash_all(&pages.memory));
    }

    /// What has been named is named anew, when there are page connections again.
    pub(super) fn stop_naming(&mut self) {
        self.naming = None;
    }

    /// The connection is lost: everything is told anew over the next one.
    pub(super) fn stop(&mut self) {
        self.naming = None;
        self.hashes = None;
    }

    /// What the destination is to be told next. Never ends if that is nothing. Cancel-safe but for the end of the naming, which is
    /// told all the same.
    pub(super) async fn next(&mut self) -> ToDestination {
        tokio::select! {
            biased;
            batch = next_of(self.naming.as_mut().map(|naming| &mut naming.batches)) => match batch {
                Some(batch) => ToDestination::Runs(batch),
                None => {
                    self.note_result().await;
                    ToDestination::FinalEnd
                }
            },
            hashes = next_of(self.hashes.as_mut()) => match hashes {
                Some(hashes) => ToDestination::Hashes(hashes),
                None => {
                    self.hashes = None;
                    ToDestination::HashesEnd
                }
            },
        }
    }

    /// All pages have been named, or naming has failed.
    async fn note_result(&mut self) {
        let Some(naming) = &mut self.naming else { return };
        let error = match (&mut naming.task).await {
            Ok(Ok(found)) => {
                self.named = Some(found);
                None
            }
            Ok(Err(error)) => Some(chain(&error)),
            Err(error) => Some(error.to_string()),
        };
        if let Some(error) = error {
            tracing::warn!(error, "naming the final pages failed; the destination reads them all");
        }
        self.naming = None;
    }

    /// What the pages were found to be, once after all have been named.
    pub(super) const fn take_named(&mut self) -> Option<Classified> {
        self.named.take()
    }
}

async fn next_of<T>(receiver: Option<&mut mpsc::Receiver<T>>) -> Option<T> {
    match receiver {
        Some(receiver) => receiver.recv().await,
        None => std::future::pending().await,
    }
}

/// Hashes every page of the stopped guest, from a thread of its own.
fn hash_all(memory: &Arc<SourceMemory>) -> mpsc::Receiver<Hashes> {
    let (sender, receiver) = mpsc::channel(4);
    let memory = Arc::clone(memory);
    drop(spawn_blocking(move || {
        let mut booking = memory.cpu.booking();
        for (number, block) in (0u16..).zip(&memory.blocks) {
            let extents = block.file.data_extents().unwrap_or_default();
            let page_bytes = block.file.page_size().bytes();
            let pages = block.file.pages();
            let mut start = 0;
            while start < pages {
                let end = (start + HASHES_AT_ONCE as u64).min(pages);
                let hash = |page: u64| {
                    let at = page * page_bytes;
                    let next = extents.partition_point(|e| e.end().0 <= at);
                    // Looking at a hole would fill it.
                    let in_hole = extents.get(next).is_none_or(|e| e.start.0 >= at + page_bytes);
                    if in_hole { ZERO_PAGE } else { page_hash(&block.mapping, PageIndex(page)) }
                };
                booking.book();
                memory.cpu.rest_until_free(|| sender.is_closed());
                let hashes = Hashes { block: number, start, hashes: (start..end).map(hash).collect() };
                if sender.blocking_send(hashes).is_err() {
                    return;
                }
                start = end;
            }
        }
    }));
    receiver
}
