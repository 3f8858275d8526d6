//! The way back: the guest goes on at the source as if nothing had been asked.

use std::time::Duration;

use serde_json::Value;
use tokio::time::{sleep, timeout};
use vmove_qmp::Client;
use vmove_qmp::switchover::Source;

use super::session::{Session, Stop};
use crate::destination::chain;
use crate::journal::{Journal, SourceRecord};
use crate::node::Node;
use crate::ownership::{SourceEvent, SourceState};
use crate::progress::GuestPlace;
use crate::proto::channel::Channel;
use crate::proto::hello::{Hello, HelloError, LinkKind, PROTOCOL_VERSION};
use crate::proto::message::{SourceStand, ToDestination, ToSource};

/// QEMU answers within milliseconds unless its main loop hangs.
const BACK: Duration = Duration::from_secs(10);
/// Longest pause between attempts to tell a destination that holds the device state that it will not get the guest.
const TELL_EVERY: Duration = Duration::from_secs(10);

impl Session {
    /// Ends the session before the hand-over.
    pub(super) async fn give_up(mut self, stop: Stop) {
        let stopped = self.state() == SourceState::Stopped;
        if let Err(error) = self.advance(SourceEvent::GiveUp) {
            return self.end_badly(error, GuestPlace::PausedAtSource, false);
        }
        // The guest first: it may be waiting.
        let back = self.bring_back().await;
        let stop = self.last_words(stop).await;
        let why = match &stop {
            Stop::Refused(_) => "refused".to_owned(),
            Stop::Cancelled => "cancelled by the operator".to_owned(),
            Stop::Failed(why) => why.clone(),
        };
        self.tell_aborted(&why, stopped).await;
        match (back, stop) {
            (Err(error), _) => {
                let error = format!("{why}; and the guest did not resume: {error}");
                self.end_badly(error, GuestPlace::PausedAtSource, false);
            }
            (Ok(()), Stop::Refused(blockers)) => self.refused(blockers),
            (Ok(()), Stop::Cancelled) => {
                self.end_badly("Cancelled: the guest goes on at the source", GuestPlace::Source, true);
            }
            (Ok(()), Stop::Failed(why)) => self.end_badly(why, GuestPlace::Source, false),
        }
    }

    /// The commit came too late: the destination's QEMU had ended without ever running the guest, which goes on here.
    pub(super) async fn take_back(mut self) {
        if let Err(error) = self.advance(SourceEvent::PeerGone) {
            return self.end_badly(error, GuestPlace::PausedAtSource, false);
        }
        // An earlier life of the daemon may have stopped it.
        if self.qmp.is_none() {
            let was_running = self.journal.record().was_running;
            let found = async {
                let client =
                    self.node.config.monitors.client(&self.vm.qmp_socket).await.map_err(|e| chain(&e))?;
                Source::attach(&client, was_running).await.map_err(|e| chain(&e))
            };
            match found.await {
                Ok(source) => self.qmp = Some(std::sync::Arc::new(source)),
                Err(error) => return self.end_badly(error, GuestPlace::PausedAtSource, false),
            }
        }
        let back = self.bring_back().await;
        let why = match self.last_words(Stop::Failed(self.gave_back())).await {
            Stop::Failed(why) => why,
            _ => self.gave_back(),
        };
        self.channel = None;
        self.end_pages();
        match back {
            Ok(()) => self.end_badly(why, GuestPlace::Source, false),
            Err(error) => {
                let error = format!("{why}; and the guest did not resume: {error}");
                self.end_badly(error, GuestPlace::PausedAtSource, false);
            }
        }
    }

    pub(super) fn gave_back(&self) -> String {
        format!("{} lost the guest's QEMU before the guest ran there; it goes on at the source", self.to)
    }

    /// A connection that broke may have left the destination's reason unread.
    async fn last_words(&mut self, stop: Stop) -> Stop {
        let (Stop::Failed(_), Some(channel)) = (&stop, &mut self.channel) else { return stop };
        let unread = async {
            loop {
                match channel.receive().await {
                    Ok(message @ (ToSource::Failed(_) | ToSource::Refused(_))) => return Some(message),
                    Ok(_) => {}
                    Err(_) => return None,
                }
            }
        };
        match timeout(Duration::from_millis(500), unread).await {
            Ok(Some(message)) => self.unexpected(&message),
            _ => stop,
        }
    }

    async fn bring_back(&mut self) -> Result<(), String> {
        let back = self.run_guest_again().await;
        if let Some(Err(error)) = self.memory.as_ref().map(|memory| memory.disarm()) {
            tracing::warn!(error, "writes are still being tracked; that ends with this daemon");
        }
        back
    }

    async fn run_guest_again(&mut self) -> Result<(), String> {
        if let Some(relay) = self.relay.take() {
            // QEMU's write fails if it still sends: that ends its migration sooner.
            relay.abort();
        }
        if let Some(qmp) = &self.qmp {
            return qmp.cancel(BACK).await.map(drop).map_err(|e| chain(&e));
        }
        // A scan with direct I/O may have been dropped while the guest was stopped for it.
        match (&self.client, self.direct_io && self.journal.record().was_running) {
            (Some(client), true) => run_again(client).await,
            _ => Ok(()),
        }
    }

    async fn tell_aborted(&mut self, why: &str, stopped: bool) {
        self.final_runs = None;
        self.hashes = None;
        let _ = timeout(Duration::from_secs(2), self.send(&ToDestination::Abort(why.to_owned()))).await;
        // Dropping the channel ends the conversation; a destination that had not loaded the state drops everything then.
        self.channel = None;
        self.serving.clear();
        if stopped {
            // It may hold the device state and wait for our word, which may have been lost with the connection.
            if let Err(error) = self.journal.update(|r| r.untold = true) {
                tracing::warn!(%error, "a daemon started anew would not tell the destination that the guest stays here");
            }
            tell_later(&self.node, self.journal.record().clone());
        }
    }
}

/// Tells the destination, in the background and until it has heard, that the guest stays here: until then it keeps a paused QEMU, and
/// the memory for it.
pub(crate) fn tell_later(node: &std::sync::Arc<Node>, record: SourceRecord) {
    let node = std::sync::Arc::clone(node);
    tokio::spawn(async move {
        let mut pause = Duration::from_millis(100);
        while let Err(why) = tell(&node, &record).await {
            tracing::debug!(session = %record.id, why, "destination not told yet");
            if pause < TELL_EVERY && pause * 2 >= TELL_EVERY {
                tracing::warn!(session = %record.id, to = %record.to, why, "the destination cannot be told that the guest stays here: it may hold a paused QEMU meanwhile");
            }
            sleep(pause).await;
            pause = (pause * 2).min(TELL_EVERY);
        }
        let path = node.session_dir(record.id).join("source.jsonl");
        let told =
            Journal::<SourceRecord>::open(&path).and_then(|mut journal| journal.update(|r| r.untold = false));
        if let Err(error) = told {
            tracing::debug!(%error, "the destination will be told once more after the next start");
        }
    });
}

async fn tell(node: &Node, record: &SourceRecord) -> Result<(), String> {
    let hello = Hello {
        version: PROTOCOL_VERSION,
        kind: LinkKind::Control,
        index: 0,
        session: record.id,
        rdma: false,
        token: record.token,
        node: node.config.node.clone(),
    };
    let stream = match node.config.dialer.stream(&record.to, &hello).await {
        Ok(stream) => stream,
        // It knows nothing of the session, and has looked: there is nothing to drop.
        Err(crate::link::LinkError::Hello { source: HelloError::Refused(_), .. }) => return Ok(()),
        Err(error) => return Err(chain(&error)),
    };
    let mut channel: Channel<ToSource> = Channel::new(stream);
    channel.send(&ToDestination::Resume(SourceStand::Aborted)).await.map_err(|e| e.to_string())?;
    match timeout(Duration::from_secs(10), channel.receive()).await {
        Ok(Ok(ToSource::Resume(_))) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// Puts back, in a new life of the daemon, what a session had done before the hand-over. Write tracking ended with the old one.
pub(crate) async fn put_back(
    node: std::sync::Arc<Node>,
    mut journal: Journal<SourceRecord>,
) -> Result<(), String> {
    let next = journal.record().state.step(SourceEvent::GiveUp).map_err(|e| e.to_string())?;
    let stopped = journal.record().state == SourceState::Stopped;
    journal
        .update(|r| {
            r.state = next;
            r.untold |= stopped;
        })
        .map_err(|e| format!("Could not write the journal: {e}"))?;
    let record = journal.record().clone();
    let client = node.config.monitors.client(&record.vm.qmp_socket).await.map_err(|e| chain(&e))?;
    let source = Source::attach(&client, record.was_running).await.map_err(|e| chain(&e))?;
    source.cancel(BACK).await.map_err(|e| chain(&e))?;
    if stopped {
        tell_later(&node, record);
    }
    Ok(())
}

/// `cont`, unless the guest runs.
async fn run_again(client: &Client) -> Result<(), String> {
    let status = client.execute_raw("query-status", Value::Null, BACK).await.map_err(|e| chain(&e))?;
    if status.get("status").and_then(Value::as_str) == Some("running") {
        return Ok(());
    }
    client.execute_raw("cont", Value::Null, BACK).await.map(drop).map_err(|e| chain(&e))
}
