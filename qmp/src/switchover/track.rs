//! What the event stream of one QEMU has told about its migration, kept where any number of waiters can look.

use std::{sync::Arc, time::Duration};
use vmove_types::time::Mono;

use tokio::sync::watch;

use super::{MigrationStatus, SwitchoverError, query_migration};
use crate::{
    Client, Event, QemuTime,
    client::{
        COMMAND_TIMEOUT,
        hooks::{HookId, Keep},
    },
};

/// When something happened: read here, and made there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    pub(super) at: Mono,
    pub(super) qemu: QemuTime,
}

/// What is known.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// The latest STOP.
    pub(super) stop: Option<Stamp>,
    /// The latest RESUME.
    pub(super) resume: Option<Stamp>,
    pub(super) status: MigrationStatus,
    /// When each status was first entered, in order.
    pub(super) history: Vec<(MigrationStatus, Stamp)>,
}

impl Known {
    pub(super) fn entered(&self, status: &MigrationStatus) -> Option<Stamp> {
        self.history.iter().find(|(other, _)| other == status).map(|(_, stamp)| *stamp)
    }
}

/// Follows the events of one QEMU from its creation to its drop.
#[derive(Debug)]
pub(super) struct Track {
    client: Client,
    hook: HookId,
    known: watch::Receiver<Known>,
}

/// Run by the reader for each event, before any waiter wakes.
pub(super) type Callback = Box<dyn FnMut(&Event) + Send>;

impl Track {
    pub(super) fn begin(client: &Client, status: MigrationStatus, mut callback: Option<Callback>) -> Self {
        let start = Known { stop: None, resume: None, status, history: Vec::new() };
        let (sender, known) = watch::channel(start);
        let hook = client.shared().hooks.add(move |event| {
            if let Some(callback) = &mut callback {
                callback(event);
            }
            note(&sender, event);
            Keep::Yes
        });
        Self { client: client.clone(), hook, known }
    }

    pub(super) fn now(&self) -> Known {
        self.known.borrow().clone()
    }

    /// Waits until `done` gives something. A migration that ends otherwise, a lost QEMU and the deadline are errors.
    pub(super) async fn wait<T>(
        &self,
        waiting_for: &'static str,
        deadline: Duration,
        mut done: impl FnMut(&Known) -> Option<T>,
    ) -> Result<T, SwitchoverError> {
        let mut known = self.known.clone();
        let ended =
            |known: &Known| matches!(known.status, MigrationStatus::Failed | MigrationStatus::Cancelled);
        let wait = async {
            let seen = known.wait_for(|known| done(known).is_some() || ended(known)).await;
            seen.map(|known| known.clone())
        };
        let seen = match tokio::time::timeout(deadline, wait).await {
            Ok(Ok(seen)) => seen,
            Ok(Err(_)) => return Err(SwitchoverError::Gone { waiting_for }),
            Err(_) => {
                let status = self.now().status;
                return Err(SwitchoverError::Timeout { waiting_for, waited: deadline, status });
            }
        };
        match done(&seen) {
            Some(found) => Ok(found),
            None => Err(self.failure(waiting_for, seen.status).await),
        }
    }

    async fn failure(&self, waiting_for: &'static str, status: MigrationStatus) -> SwitchoverError {
        let words = match query_migration(&self.client, COMMAND_TIMEOUT).await {
            Ok(info) => info.error,
            Err(_) => return SwitchoverError::Gone { waiting_for },
        };
        let reason = words.unwrap_or_else(|| "QEMU gave no reason, its log may".to_owned());
        SwitchoverError::Failed { status, waiting_for, reason }
    }
}

impl Drop for Track {
    fn drop(&mut self) {
        self.client.shared().hooks.remove(self.hook);
    }
}

fn note(sender: &watch::Sender<Known>, event: &Arc<Event>) {
    let stamp = Stamp { at: event.at, qemu: event.qemu_time };
    match event.name.as_str() {
        "STOP" => sender.send_modify(|known| known.stop = Some(stamp)),
        "RESUME" => sender.send_modify(|known| known.resume = Some(stamp)),
        "MIGRATION" => {
            let status = MigrationStatus::from(event.text("status").unwrap_or_default().to_owned());
            sender.send_modify(|known| {
                known.status = status.clone();
                known.history.push((status, stamp));
            });
        }
        _ => {}
    }
}
