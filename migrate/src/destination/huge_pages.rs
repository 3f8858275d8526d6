//! What is said of a destination that may have failed for lack of huge pages. They were free when the guest was admitted; until QEMU has
//! mapped them, somebody else may take them.

use vmove_memory::{MemoryDir, PageSize};
use vmove_node::layout::memory_dir;

use super::error::{DestinationError, PagesLost, Shortage};
use super::session::{End, Session};

/// Adds how many huge pages the guest needs and how many there are, if that may be why this side failed.
pub(super) fn explained(session: &Session, end: End) -> End {
    use DestinationError::{Launch, Page, Populate, QemuEnded};
    let End::Failed(error) = end else { return end };
    let may_be_why = matches!(error, Launch(_) | Page(_) | Populate(_) | QemuEnded { .. });
    match shortage(session).filter(|_| may_be_why) {
        Some(shortage) => End::Failed(DestinationError::HugePages { shortage, source: Box::new(error) }),
        None => End::Failed(error),
    }
}

/// The same for page connections that have failed: what the source is told.
pub(super) fn told(session: &Session, lost: &PagesLost, why: String) -> String {
    match shortage(session).filter(|_| matches!(lost, PagesLost::NotTaken(_))) {
        Some(shortage) => format!("{why}. {shortage}"),
        None => why,
    }
}

/// Nothing if the guest has all that it needs.
fn shortage(session: &Session) -> Option<Shortage> {
    let blocks = &session.files.memory.blocks;
    if blocks.iter().all(|block| block.page_size == PageSize::Base4K) {
        return None;
    }
    let needed: u64 = blocks.iter().map(|block| block.file.len().0).sum();
    let here: u64 =
        blocks.iter().filter_map(|block| block.file.allocated_bytes().ok()).map(|bytes| bytes.0).sum();
    let backing = session.journal.record().prepare.backing;
    let dir = MemoryDir::prepare(&memory_dir(&session.node.config.memory_dir, backing), backing).ok()?;
    let free = dir.free().ok()?.0;
    (here < needed).then_some(Shortage { needed: needed >> 20, here: here >> 20, free: free >> 20 })
}
