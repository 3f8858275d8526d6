//! The side that has the guest.

use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    MigrationStatus, SwitchoverError, query_migration,
    settings::{self, Capabilities, Saved},
    track::{Known, Stamp, Track},
};
use crate::{Client, MonotonicNanos, QemuTime, client::SHORT};

/// Name of the descriptor given to QEMU for its stream.
const STREAM_FD: &str = "vmove-state-out";

/// What happens between the stop of the guest and the saving of its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Hold {
    /// QEMU waits in `pre-switchover` until [`Source::continue_`].
    #[default]
    UntilTold,
    /// `migrate-continue` is sent by the reader itself, in the moment `pre-switchover` is read.
    AtOnce,
    /// No `pre-switchover` at all: QEMU saves its devices as soon as the guest is drained. [`Source::held`] then never
    /// comes before [`Source::completed`].
    Never,
}

/// How a source is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SourceOptions {
    /// See [`Hold`].
    pub hold: Hold,
    /// Limit of QEMU's own stream, bytes per second. It carries device state only, so the default is no limit in
    /// practice (1 TB/s); a low limit makes QEMU sleep for the rest of each 100 ms, also while the guest is stopped.
    pub max_bandwidth: u64,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self { hold: Hold::default(), max_bandwidth: 1_000_000_000_000 }
    }
}

impl SourceOptions {
    /// With this hold.
    #[must_use]
    pub fn hold(mut self, hold: Hold) -> Self {
        self.hold = hold;
        self
    }
}

/// Where QEMU writes its stream.
#[derive(Debug)]
pub enum Outbound {
    /// One end of a socket pair, from [`super::StateReceiver::pair`].
    Fd(OwnedFd),
    /// A unix socket that someone listens on. At most 107 bytes; relative to QEMU's working directory.
    Unix(PathBuf),
}

/// The guest has stopped: its vCPUs no longer run. Block I/O that was under way may still land in guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoppedAt {
    /// When the STOP event was read; of a guest that was paused already: when QEMU entered `pre-switchover`.
    pub at: MonotonicNanos,
    /// When QEMU made it, by its wall clock.
    pub qemu_time: QemuTime,
    /// False for a guest that was paused before.
    pub was_running: bool,
}

/// The guest is stopped and drained: nothing in QEMU writes its RAM any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldAt {
    /// When `pre-switchover` was read.
    pub at: MonotonicNanos,
}

/// Everything was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletedAt {
    /// When `completed` was read.
    pub at: MonotonicNanos,
}

/// Where a guest is after [`Source::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GuestState {
    /// It runs, as it did before.
    Running {
        /// When RESUME was read; `None` if it had never stopped.
        resumed: Option<MonotonicNanos>,
    },
    /// It is paused, as it was before.
    Paused,
}

type OnStop = Box<dyn FnOnce(MonotonicNanos) + Send>;

/// A source QEMU, prepared. All methods may be called from several tasks at once.
#[derive(Debug)]
pub struct Source {
    client: Client,
    track: Track,
    saved: Saved,
    was_running: bool,
    on_stop: Arc<Slot>,
}

/// Holds the callback until STOP takes it.
#[derive(Default)]
struct Slot(Mutex<Option<OnStop>>);

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Slot")
    }
}

impl Slot {
    fn take(&self) -> Option<OnStop> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Source {
    /// Sets capabilities and parameters. Changes nothing for the guest.
    ///
    /// # Errors
    /// [`SwitchoverError::Busy`], [`SwitchoverError::NoCapability`], [`SwitchoverError::RunState`] (a guest that has
    /// crashed or shut down is not moved), [`SwitchoverError::Qmp`].
    pub async fn prepare(client: &Client, options: &SourceOptions) -> Result<Self, SwitchoverError> {
        let info = query_migration(client, SHORT).await?;
        if !info.status.is_final() {
            return Err(SwitchoverError::Busy { status: info.status });
        }
        let run_state = run_state(client).await?;
        let was_running = match run_state.as_str() {
            "running" => true,
            "paused" | "prelaunch" | "postmigrate" | "suspended" => false,
            _ => return Err(SwitchoverError::RunState { run_state }),
        };
        let capabilities = Capabilities::from([
            ("events", true),
            ("x-ignore-shared", true),
            ("pause-before-switchover", options.hold != Hold::Never),
        ]);
        let mut parameters = serde_json::Map::new();
        parameters.insert("max-bandwidth".to_owned(), options.max_bandwidth.into());
        let saved = settings::apply(client, &capabilities, &parameters).await?;
        Ok(Self::follow(client, info.status, saved, was_running, options.hold))
    }

    fn follow(client: &Client, status: MigrationStatus, saved: Saved, was_running: bool, hold: Hold) -> Self {
        let on_stop = Arc::new(Slot::default());
        let slot = on_stop.clone();
        let shared = Arc::downgrade(client.shared());
        let callback = move |event: &crate::Event, known: &Known| {
            if event.name == "STOP" {
                if let Some(call) = slot.take() {
                    call(event.at);
                }
                return;
            }
            let held = event.name == "MIGRATION" && known.status == MigrationStatus::PreSwitchover;
            if let Some(shared) = shared.upgrade().filter(|_| held && hold == Hold::AtOnce) {
                // The reply says nothing that the next MIGRATION event does not.
                let _ = shared.post("migrate-continue", &json!({ "state": "pre-switchover" }));
            }
        };
        let track = Track::begin(client, status, Some(Box::new(callback)));
        Self { client: client.clone(), track, saved, was_running, on_stop }
    }

    /// Calls `call` in the moment STOP is read, from the reader itself: before any waiter wakes. It must be short and
    /// must not block, e.g. wake the thread that scans for dirty pages. Set it before [`Source::start`].
    pub fn on_stop(&self, call: impl FnOnce(MonotonicNanos) + Send + 'static) {
        *self.on_stop.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(call));
    }

    /// Whether the guest ran when this was prepared.
    #[must_use]
    pub fn was_running(&self) -> bool {
        self.was_running
    }

    /// Starts the stream. The guest runs on until QEMU has sent what little RAM of its own is not shared, then stops by
    /// itself: [`Source::stopped`].
    ///
    /// # Errors
    /// [`SwitchoverError::Qmp`]; the guest is then as it was.
    pub async fn start(&self, outbound: Outbound) -> Result<(), SwitchoverError> {
        let uri = match outbound {
            Outbound::Fd(fd) => {
                use std::os::fd::AsFd;
                let given = self.client.get_fd(STREAM_FD, fd.as_fd()).await;
                given.map_err(SwitchoverError::at("handing the stream to QEMU"))?;
                format!("fd:{STREAM_FD}")
            }
            Outbound::Unix(path) => format!("unix:{}", path.display()),
        };
        let started = self.client.execute_raw("migrate", json!({ "uri": uri }), SHORT).await;
        started.map(drop).map_err(SwitchoverError::at("starting the migration"))
    }

    /// Waits for the guest to stop.
    ///
    /// # Errors
    /// [`SwitchoverError::Failed`] (the guest then runs on), [`SwitchoverError::Gone`], [`SwitchoverError::Timeout`].
    pub async fn stopped(&self, deadline: Duration) -> Result<StoppedAt, SwitchoverError> {
        let was_running = self.was_running;
        let found = self.track.wait("the stop of the guest", deadline, move |known| {
            if was_running { known.stop } else { past_hold(known) }
        });
        let stamp = found.await?;
        Ok(StoppedAt { at: stamp.at, qemu_time: stamp.qemu, was_running })
    }

    /// Waits until the guest's RAM is final: stopped and drained.
    ///
    /// # Errors
    /// As [`Source::stopped`].
    pub async fn held(&self, deadline: Duration) -> Result<HeldAt, SwitchoverError> {
        let stamp = self.track.wait("pre-switchover", deadline, past_hold).await?;
        Ok(HeldAt { at: stamp.at })
    }

    /// Lets QEMU save its devices. Returns when the command is accepted.
    ///
    /// # Errors
    /// [`SwitchoverError::Qmp`] when QEMU is not in `pre-switchover`.
    pub async fn continue_(&self) -> Result<(), SwitchoverError> {
        let state = json!({ "state": "pre-switchover" });
        let reply = self.client.execute_raw("migrate-continue", state, SHORT).await;
        reply.map(drop).map_err(SwitchoverError::at("continuing after pre-switchover"))
    }

    /// Waits until everything was sent. The guest stays stopped.
    ///
    /// # Errors
    /// As [`Source::stopped`].
    pub async fn completed(&self, deadline: Duration) -> Result<CompletedAt, SwitchoverError> {
        let done = |known: &Known| known.entered(&MigrationStatus::Completed);
        let stamp = self.track.wait("the end of the migration", deadline, done).await?;
        Ok(CompletedAt { at: stamp.at })
    }

    /// Ends the migration wherever it stands, brings the guest back to what it was (running or paused) and puts QEMU's
    /// migration settings back.
    ///
    /// Also right after an error, and after [`Source::completed`]; in the latter case the caller must have made sure
    /// that the destination has never resumed the guest and has ended, or two copies will run.
    ///
    /// # Errors
    /// [`SwitchoverError::NotResumed`] with the run state, [`SwitchoverError::Timeout`], [`SwitchoverError::Qmp`].
    pub async fn cancel(&self, deadline: Duration) -> Result<GuestState, SwitchoverError> {
        let until = Instant::now() + deadline;
        let cancelled = self.client.execute_raw("migrate_cancel", Value::Null, deadline).await;
        cancelled.map_err(SwitchoverError::at("cancelling the migration"))?;
        self.settle(until, deadline).await?;
        let guest = self.bring_back(until).await?;
        settings::restore(&self.client, &self.saved).await?;
        Ok(guest)
    }

    /// As [`Source::cancel`], named for its place after [`Source::completed`]: `cont` from `postmigrate`.
    ///
    /// # Errors
    /// As [`Source::cancel`].
    pub async fn resume_after_completed(&self, deadline: Duration) -> Result<GuestState, SwitchoverError> {
        self.cancel(deadline).await
    }

    /// Waits until QEMU is done with the migration. Asks, since a status reached before we listened sends no event.
    async fn settle(&self, until: Instant, deadline: Duration) -> Result<(), SwitchoverError> {
        loop {
            let status = query_migration(&self.client, SHORT).await?.status;
            if status.is_final() {
                return Ok(());
            }
            if Instant::now() >= until {
                let waiting_for = "the end of the cancelled migration";
                return Err(SwitchoverError::Timeout { waiting_for, waited: deadline, status });
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// QEMU restarts a guest that it had stopped itself, soon after the migration has ended; after `completed` it does
    /// not, and `cont` must.
    async fn bring_back(&self, until: Instant) -> Result<GuestState, SwitchoverError> {
        if !self.was_running {
            return Ok(GuestState::Paused);
        }
        loop {
            let run_state = run_state(&self.client).await?;
            match run_state.as_str() {
                "running" => {
                    let known = self.track.now();
                    let resumed = known.resume.filter(|r| known.stop.is_some_and(|s| r.at >= s.at));
                    return Ok(GuestState::Running { resumed: resumed.map(|stamp| stamp.at) });
                }
                "paused" | "postmigrate" | "finish-migrate" => {
                    let reply = self.client.execute_raw("cont", Value::Null, SHORT).await;
                    reply.map_err(SwitchoverError::at("resuming the guest"))?;
                }
                _ => return Err(SwitchoverError::NotResumed { run_state }),
            }
            if Instant::now() >= until {
                return Err(SwitchoverError::NotResumed { run_state });
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// The first sign that the guest is drained: `pre-switchover`, or what can only come after it.
fn past_hold(known: &Known) -> Option<Stamp> {
    [MigrationStatus::PreSwitchover, MigrationStatus::Device, MigrationStatus::Completed]
        .iter()
        .find_map(|status| known.entered(status))
}

async fn run_state(client: &Client) -> Result<String, SwitchoverError> {
    let reply = client.execute_raw("query-status", Value::Null, SHORT).await;
    let reply = reply.map_err(SwitchoverError::at("asking for the run state"))?;
    Ok(reply.get("status").and_then(Value::as_str).unwrap_or("unknown").to_owned())
}
