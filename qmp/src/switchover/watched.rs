//! A migration that somebody else drives (libvirt), seen through a monitor of our own.
//!
//! What is set here is one capability, `x-ignore-shared`, without which QEMU would send guest memory itself. It must not outlast the
//! migration: with it a later save to a file leaves guest memory out, and the guest is lost. So whoever sets it has it cleared on every way
//! out, by the drop of [`SkipsShared`] at the latest.

use std::time::Duration;

use serde_json::Value;
use vmove_types::time::Mono;

use super::settings::{current_capabilities, set_capabilities};
use super::source::past_hold;
use super::track::{Known, Stamp, Track};
use super::{MigrationStatus, StoppedAt, SwitchoverError, query_migration};
use crate::client::COMMAND_TIMEOUT;
use crate::{Client, QmpError};

const SKIP_SHARED: &str = "x-ignore-shared";
/// QEMU refuses to change capabilities while a migration is under way.
const CLEAR_INTERVAL: Duration = Duration::from_millis(20);
/// For a migration that is taken up to end by itself: device state alone takes less.
const ENDS_BY_ITSELF: Duration = Duration::from_secs(1);
/// For a migration that was called off to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Where a migration of somebody else's has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The guest stays here, running or paused as its driver wishes.
    Stays,
    /// All was sent: the guest is the destination's, unless its driver has it run here again.
    Sent,
}

/// Follows a migration that somebody else drives, on either side.
#[derive(Debug)]
pub struct Watched {
    client: Client,
    track: Track,
    /// Everything was sent before this was made.
    sent_before: bool,
}

/// `x-ignore-shared` is set; it is cleared as soon as QEMU allows it once this is dropped.
#[derive(Debug)]
pub struct SkipsShared(Option<Client>);

impl SkipsShared {
    /// Of a QEMU in which an earlier process may have set it.
    #[must_use]
    pub fn taken_up(client: &Client) -> Self {
        Self(Some(client.clone()))
    }

    /// Clears it. If that takes longer, it goes on in the background.
    ///
    /// # Errors
    /// [`SwitchoverError::Timeout`].
    pub async fn clear(mut self, deadline: Duration) -> Result<(), SwitchoverError> {
        let Some(client) = self.0.take() else { return Ok(()) };
        let clearing = tokio::spawn(cleared(client.clone()));
        match tokio::time::timeout(deadline, clearing).await {
            Ok(_) => Ok(()),
            Err(_) => {
                let waiting_for = "end of the migration, after which x-ignore-shared can be cleared";
                let status = query_migration(&client, COMMAND_TIMEOUT).await?.status;
                Err(SwitchoverError::Timeout { waiting_for, waited: deadline, status })
            }
        }
    }
}

impl Drop for SkipsShared {
    fn drop(&mut self) {
        if let Some(client) = self.0.take() {
            drop(tokio::spawn(cleared(client)));
        }
    }
}

async fn cleared(client: Client) {
    while let Err(error) = set_skip_shared(&client, false).await {
        if client.is_closed() {
            return;
        }
        tracing::debug!(%error, "x-ignore-shared is still set");
        tokio::time::sleep(CLEAR_INTERVAL).await;
    }
}

async fn set_skip_shared(client: &Client, on: bool) -> Result<(), SwitchoverError> {
    let now = current_capabilities(client).await?;
    if !now.contains_key(SKIP_SHARED) {
        let version = client.version().to_string();
        return Err(SwitchoverError::NoCapability { capability: SKIP_SHARED, version });
    }
    set_capabilities(client, &now, &[(SKIP_SHARED.to_owned(), on)].into()).await
}

/// Clears `x-ignore-shared` where an earlier process may have left it. Returns whether it was set.
///
/// # Errors
/// [`SwitchoverError::Qmp`], also while a migration is under way.
pub async fn clear_skip_shared(client: &Client) -> Result<bool, SwitchoverError> {
    let was = current_capabilities(client).await?.get(SKIP_SHARED).copied().unwrap_or(false);
    if was {
        set_skip_shared(client, false).await?;
    }
    Ok(was)
}

impl Watched {
    /// Begins to follow. What was before does not count.
    #[must_use]
    pub fn begin(client: &Client) -> Self {
        let track = Track::begin(client, MigrationStatus::None, None);
        Self { client: client.clone(), track, sent_before: false }
    }

    /// Takes up one that an earlier process followed to the stop of the guest: waits until it has ended, and says how. One that does not end by itself is
    /// called off: the QEMU that loads may wait for a page of which only the caller can tell, who waits for us, and the guest stands still on both sides.
    ///
    /// # Errors
    /// [`SwitchoverError::Qmp`].
    pub async fn take_up(client: &Client) -> Result<(Self, Verdict), SwitchoverError> {
        let mut watched = Self::begin(client);
        let mut call_off_at = tokio::time::Instant::now() + ENDS_BY_ITSELF;
        while !query_migration(client, COMMAND_TIMEOUT).await?.status.is_final() {
            if tokio::time::Instant::now() > call_off_at {
                watched.cancel().await;
                call_off_at = tokio::time::Instant::now() + ENDS_BY_ITSELF;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        let state = watched.run_state().await.map_err(SwitchoverError::at("asking for the run state"))?;
        // A guest that only came here by a migration, or whose migration has failed, is in another state.
        watched.sent_before = state == "postmigrate";
        let verdict = if watched.sent_before { Verdict::Sent } else { Verdict::Stays };
        Ok((watched, verdict))
    }

    /// Has QEMU leave shared guest memory to us, until what is returned is dropped.
    ///
    /// # Errors
    /// [`SwitchoverError::NoCapability`], [`SwitchoverError::Qmp`].
    pub async fn skip_shared(&self) -> Result<SkipsShared, SwitchoverError> {
        // Made first: what was set is cleared even if the answer is lost.
        let guard = SkipsShared::taken_up(&self.client);
        set_skip_shared(&self.client, true).await?;
        Ok(guard)
    }

    /// Waits until the guest is stopped and drained for the migration. A guest that was paused before stopped at that moment.
    ///
    /// # Errors
    /// [`SwitchoverError::Failed`], [`SwitchoverError::Gone`], [`SwitchoverError::Timeout`].
    pub async fn drained(&self, deadline: Duration) -> Result<StoppedAt, SwitchoverError> {
        let found = self.track.wait("the stop of the guest", deadline, |known| {
            let drained = past_hold(known)?;
            // STOP comes before; one that is followed by RESUME was another's.
            let stop = known.stop.filter(|stop| known.resume.is_none_or(|resume| resume.at < stop.at));
            Some((stop.unwrap_or(drained), stop.is_some()))
        });
        let (stamp, was_running) = found.await?;
        Ok(StoppedAt { at: stamp.at, qemu_time: stamp.qemu, was_running })
    }

    /// Waits until everything was sent, or loaded.
    ///
    /// # Errors
    /// As [`Watched::drained`].
    pub async fn completed(&self, deadline: Duration) -> Result<(), SwitchoverError> {
        let done = |known: &Known| known.entered(&MigrationStatus::Completed);
        self.track.wait("the end of the migration", deadline, done).await.map(drop)
    }

    /// Whether everything was sent, or loaded.
    #[must_use]
    pub fn has_completed(&self) -> bool {
        self.track.now().entered(&MigrationStatus::Completed).is_some()
    }

    /// Waits, however long, for the guest to run after everything was sent or loaded. When it began to.
    ///
    /// # Errors
    /// [`SwitchoverError::Gone`], or that the migration failed.
    pub async fn resumed(&self) -> Result<Mono, SwitchoverError> {
        let sent_before = self.sent_before;
        let resumed = move |known: &Known| match known.entered(&MigrationStatus::Completed) {
            Some(completed) => known.resume.filter(|resume| resume.at >= completed.at),
            None => known.resume.filter(|_| sent_before),
        };
        let ever = Duration::from_secs(u64::from(u32::MAX));
        Ok(self.track.wait("the guest to run", ever, resumed).await?.at)
    }

    /// Calls the migration off if it can be, and waits for its end.
    ///
    /// # Errors
    /// [`SwitchoverError::Timeout`]. A QEMU that has ended is no error.
    pub async fn call_off(&self, deadline: Duration) -> Result<Verdict, SwitchoverError> {
        let begun = tokio::time::Instant::now();
        let mut told = false;
        loop {
            let status = match query_migration(&self.client, COMMAND_TIMEOUT).await {
                Ok(info) => info.status,
                Err(_) if self.client.is_closed() => return Ok(self.by_events()),
                Err(error) => return Err(error),
            };
            match status {
                // Also of an earlier one, or of the one that brought the guest here.
                MigrationStatus::Completed => return Ok(self.by_events()),
                status if status.is_final() => return Ok(Verdict::Stays),
                _ if !told => {
                    told = true;
                    self.cancel().await;
                }
                status if begun.elapsed() > deadline => {
                    let waiting_for = "the end of the migration";
                    return Err(SwitchoverError::Timeout { waiting_for, waited: deadline, status });
                }
                _ => tokio::time::sleep(LOOK_INTERVAL).await,
            }
        }
    }

    async fn cancel(&self) {
        if let Err(error) = self.client.execute_raw("migrate_cancel", Value::Null, COMMAND_TIMEOUT).await {
            tracing::debug!(%error, "the migration could not be called off");
        }
    }

    fn by_events(&self) -> Verdict {
        let known = self.track.now();
        let ran_since = |sent: Stamp| known.resume.is_some_and(|resume| resume.at >= sent.at);
        match known.entered(&MigrationStatus::Completed) {
            Some(sent) if !ran_since(sent) => Verdict::Sent,
            None if self.sent_before && known.resume.is_none() => Verdict::Sent,
            _ => Verdict::Stays,
        }
    }

    /// QEMU's run state.
    ///
    /// # Errors
    /// [`QmpError`].
    pub async fn run_state(&self) -> Result<String, QmpError> {
        self.client.run_state(COMMAND_TIMEOUT).await
    }
}
