//! The network is told where a guest is now.

use std::sync::Arc;

use tokio::sync::watch;
use vmove_qmp::switchover::{Announce, Destination};
use vmove_types::problem::chain;
use vmove_types::time::Mono;

/// The announcements of a guest's new place, which QEMU repeats.
#[derive(Debug, Default)]
pub(super) struct Announcing(watch::Sender<First>);

/// The first of them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum First {
    #[default]
    NotYet,
    At(Mono),
    Failed,
}

impl Announcing {
    /// Has QEMU begin with them. In the background: nothing waits for it.
    pub(super) fn begin(&self, destination: Arc<Destination>) {
        let first = self.0.clone();
        tokio::spawn(async move {
            first.send_replace(match destination.announce(Announce::default()).await {
                Ok(()) => First::At(Mono::now()),
                Err(error) => {
                    let error = chain(&error);
                    tracing::warn!(error, "the guest's new place was not announced to the network");
                    First::Failed
                }
            });
        });
    }

    /// Waits for the first. `None` if QEMU cannot.
    pub(super) async fn first(&self) -> Option<Mono> {
        match *self.0.subscribe().wait_for(|first| *first != First::NotYet).await.ok()? {
            First::At(at) => Some(at),
            First::NotYet | First::Failed => None,
        }
    }
}
