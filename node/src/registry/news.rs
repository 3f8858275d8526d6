//! Which VMs begin and end, for whoever wants to know.

use tokio::sync::broadcast;

use super::Registry;
use crate::record::VmRecord;

/// News that somebody slow has not read yet.
const BACKLOG: usize = 1024;

/// A VM has begun or ended.
#[derive(Debug, Clone)]
pub enum News {
    /// Started, adopted, or made as a child. Not one that a migration brings, nor one of an earlier daemon.
    Started(VmRecord),
    /// Its QEMU has ended. Not one that has moved away, nor one that was let go of.
    Ended {
        /// What it was.
        record: VmRecord,
        /// By whom: `on request`, or why it ended by itself.
        why: String,
    },
}

#[derive(Debug)]
pub(super) struct Tell(broadcast::Sender<News>);

impl Default for Tell {
    fn default() -> Self {
        Self(broadcast::channel(BACKLOG).0)
    }
}

impl Tell {
    pub(super) fn tell(&self, news: News) {
        // Nobody listening is fine.
        let _ = self.0.send(news);
    }
}

impl Registry {
    /// News from now on.
    #[must_use]
    pub fn news(&self) -> broadcast::Receiver<News> {
        self.news.0.subscribe()
    }
}
