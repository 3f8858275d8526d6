//! The side that has the guest.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};
use vmove_types::time::Mono;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    MigrationStatus, SwitchoverError, query_migration,
    settings::{self, Capabilities, Saved},
    track::{Known, Stamp, Track},
};
use crate::{Client, QemuTime, client::COMMAND_TIMEOUT, io_threads::IoThreads};

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
    /// A unix socket that someone listens on. We connect to it and hand QEMU the connection.
    Unix(PathBuf),
}

/// The guest has stopped: its vCPUs no longer run. Block I/O that was under way may still land in guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoppedAt {
    /// When the STOP event was read; of a guest that was paused already: when QEMU entered `pre-switchover`.
    pub at: Mono,
    /// When QEMU made it, by its wall clock.
    pub qemu_time: QemuTime,
    /// False for a guest that was paused before.
    pub was_running: bool,
}

/// The guest is stopped and drained: nothing in QEMU writes its RAM any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldAt {
    /// When `pre-switchover` was read.
    pub at: Mono,
}

/// Everything was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletedAt {
    /// When `completed` was read.
    pub at: Mono,
}

/// Where a guest is after [`Source::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GuestState {
    /// It runs, as it did before.
    Running {
        /// When RESUME was read; `None` if it had never stopped.
        resumed: Option<Mono>,
    },
    /// It is paused, as it was before.
    Paused,
}

type OnStop = Box<dyn FnOnce(Mono) + Send>;

/// A source QEMU, prepared. All methods may be called from several tasks at once.
#[derive(Debug)]
pub struct Source {
    client: Client,
    track: Track,
    saved: Saved,
    was_running: bool,
    on_stop: Slot<OnStop>,
    io_threads: IoThreads,
    /// A second handle of QEMU's end of the stream, to cut it with. The event hook owns it, so that it is closed (and
    /// the reader of the stream sees its end) when QEMU is done or gone.
    stream: Weak<Mutex<Option<OwnedFd>>>,
}

/// Something that one of two takes.
struct Slot<T>(Arc<Mutex<Option<T>>>);

impl<T> Slot<T> {
    fn empty() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }

    fn share(&self) -> Self {
        Self(self.0.clone())
    }

    fn put(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<T> std::fmt::Debug for Slot<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Slot")
    }
}

impl Source {
    /// Sets capabilities and parameters. Changes nothing for the guest.
    ///
    /// # Errors
    /// [`SwitchoverError::Busy`], [`SwitchoverError::NoCapability`], [`SwitchoverError::RunState`] (a guest that has
    /// crashed or shut down is not moved), [`SwitchoverError::Qmp`].
    pub async fn prepare(client: &Client, options: &SourceOptions) -> Result<Self, SwitchoverError> {
        let info = query_migration(client, COMMAND_TIMEOUT).await?;
        if !info.status.is_final() || cleanup_pending(client).await? {
            return Err(SwitchoverError::Busy { status: info.status });
        }
        let run_state = run_state(client).await?;
        let was_running = match run_state.as_str() {
            "running" => true,
            "paused" | "prelaunch" | "postmigrate" | "suspended" | GUEST_PANICKED => false,
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
        let io_threads = io_threads(client).await?;
        Ok(Self::follow(client, info.status, saved, was_running, options.hold, io_threads))
    }

    /// Takes up a source whose switch-over was begun by an earlier life of this program, over a new connection. Only
    /// [`Source::completed`] and [`Source::cancel`] make sense then: the old stream has ended with its reader.
    /// `was_running` is what the earlier life had seen.
    ///
    /// # Errors
    /// [`SwitchoverError::Qmp`].
    pub async fn attach(client: &Client, was_running: bool) -> Result<Self, SwitchoverError> {
        let status = query_migration(client, COMMAND_TIMEOUT).await?.status;
        let io_threads = io_threads(client).await?;
        io_threads.take_back();
        Ok(Self::follow(client, status, Saved::defaults(), was_running, Hold::UntilTold, io_threads))
    }

    fn follow(
        client: &Client,
        status: MigrationStatus,
        saved: Saved,
        was_running: bool,
        hold: Hold,
        io_threads: IoThreads,
    ) -> Self {
        let (on_stop, stream) = (Slot::empty(), Slot::empty());
        let (slot, weak_stream) = (on_stop.share(), Arc::downgrade(&stream.0));
        let shared = Arc::downgrade(client.shared());
        let callback = move |event: &crate::Event| match (event.name.as_str(), event.text("status")) {
            ("STOP", _) => {
                if let Some(call) = Slot::<OnStop>::take(&slot) {
                    call(event.at);
                }
            }
            ("MIGRATION", Some("pre-switchover")) if hold == Hold::AtOnce => {
                if let Some(shared) = shared.upgrade() {
                    // The reply says nothing that the next MIGRATION event does not.
                    let _ = shared.post("migrate-continue", &json!({ "state": "pre-switchover" }));
                }
            }
            ("MIGRATION", Some("completed" | "failed" | "cancelled")) => drop(stream.take()),
            _ => {}
        };
        let track = Track::begin(client, status, Some(Box::new(callback)));
        Self { client: client.clone(), track, saved, was_running, on_stop, io_threads, stream: weak_stream }
    }

    /// Calls `call` in the moment STOP is read, from the reader itself: before any waiter wakes. It must be short and
    /// must not block nor use this connection, e.g. wake the thread that scans for dirty pages. Set it before
    /// [`Source::start`].
    pub fn on_stop(&self, call: impl FnOnce(Mono) + Send + 'static) {
        self.on_stop.put(Box::new(call));
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
        let fd = match outbound {
            Outbound::Fd(fd) => fd,
            Outbound::Unix(path) => connect(&path).await.map_err(|source| SwitchoverError::Stream {
                what: "could not connect to the reader",
                source,
            })?,
        };
        let given = self.client.get_fd(STREAM_FD, fd.as_fd()).await;
        given.map_err(SwitchoverError::at("handing the stream to QEMU"))?;
        // From here on QEMU's end can be cut.
        let stream = self.stream.upgrade().map(Slot);
        if let Some(stream) = &stream {
            stream.put(fd);
        }
        let uri = format!("fd:{STREAM_FD}");
        self.io_threads.go_ahead();
        let started = self.client.execute_raw("migrate", json!({ "uri": uri }), COMMAND_TIMEOUT).await;
        if started.is_err() {
            drop(stream.and_then(|stream| stream.take()));
            self.io_threads.step_back();
        }
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
        self.io_threads.step_back();
        Ok(HeldAt { at: stamp.at })
    }

    /// Lets QEMU save its devices. Returns when the command is accepted.
    ///
    /// # Errors
    /// [`SwitchoverError::Qmp`] when QEMU is not in `pre-switchover`.
    pub async fn continue_(&self) -> Result<(), SwitchoverError> {
        let state = json!({ "state": "pre-switchover" });
        let reply = self.client.execute_raw("migrate-continue", state, COMMAND_TIMEOUT).await;
        reply.map(drop).map_err(SwitchoverError::at("continuing after pre-switchover"))
    }

    /// Waits until everything was sent. The guest stays stopped.
    ///
    /// # Errors
    /// As [`Source::stopped`].
    pub async fn completed(&self, deadline: Duration) -> Result<CompletedAt, SwitchoverError> {
        let done = |known: &Known| known.entered(&MigrationStatus::Completed);
        let stamp = self.track.wait("the end of the migration", deadline, done).await?;
        self.io_threads.step_back();
        Ok(CompletedAt { at: stamp.at })
    }

    /// Ends the migration wherever it stands, brings the guest back to what it was (running or paused) and puts QEMU's
    /// migration settings back.
    ///
    /// Also right after an error, and after [`Source::completed`]; in the latter case the caller must have made sure
    /// that the destination has never resumed the guest and has ended, or two copies will run.
    ///
    /// The migration is ended by cutting its stream, not by `migrate_cancel`: QEMU 7.2 that gets `migrate_cancel` in the
    /// millisecond before `pre-switchover` waits for ever with the guest stopped. On a lost stream every QEMU gives up
    /// by itself and runs the guest on.
    ///
    /// # Errors
    /// [`SwitchoverError::NotResumed`] with the run state, [`SwitchoverError::Timeout`], [`SwitchoverError::Qmp`].
    pub async fn cancel(&self, deadline: Duration) -> Result<GuestState, SwitchoverError> {
        let begin = Instant::now();
        if let Some(fd) = self.stream.upgrade().and_then(|stream| Slot(stream).take()) {
            // ENOTCONN: the reader has gone already.
            let _ = rustix::net::shutdown(&fd, rustix::net::Shutdown::Both);
        }
        self.settle(begin, deadline).await?;
        self.io_threads.step_back();
        let guest = self.bring_back(begin + deadline).await?;
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

    /// Waits until QEMU is done with the migration and has cleaned up after it. Asks, since a status reached before we
    /// listened sends no event.
    async fn settle(&self, begin: Instant, deadline: Duration) -> Result<(), SwitchoverError> {
        let mut asked_to_cancel = false;
        loop {
            let status = query_migration(&self.client, COMMAND_TIMEOUT).await?.status;
            if status.is_final() && !cleanup_pending(&self.client).await? {
                return Ok(());
            }
            if status == MigrationStatus::PreSwitchover {
                // It must go on to notice that its stream is gone. A refusal means that it has gone on.
                refusal_is_fine(self.continue_().await)?;
            }
            let waited = begin.elapsed();
            if waited >= deadline {
                let waiting_for = "the end of the cancelled migration";
                return Err(SwitchoverError::Timeout { waiting_for, waited, status });
            }
            if waited >= deadline / 2 && !asked_to_cancel && !status.is_final() {
                // Not expected. Nothing is left to lose.
                tracing::warn!(%status, "migration does not end with its stream, sending migrate_cancel");
                asked_to_cancel = true;
                let asked = self.client.execute_raw("migrate_cancel", Value::Null, COMMAND_TIMEOUT).await;
                refusal_is_fine(asked.map(drop).map_err(SwitchoverError::at("cancelling the migration")))?;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// A guest that was paused before. If QEMU has left it in `postmigrate`, it runs for some 50 us: `cont` and `stop` in
    /// one go are the only way out of that state.
    async fn pause_again(&self) -> Result<GuestState, SwitchoverError> {
        if run_state(&self.client).await? == "postmigrate" {
            let failed = SwitchoverError::at;
            self.io_threads.go_ahead();
            let send = |name| self.client.shared().post(name, &Value::Null);
            let replies = PAUSE_AGAIN.map(send);
            for reply in replies {
                let reply = reply.map_err(failed("pausing the guest again"))?;
                reply
                    .wait(Instant::now() + COMMAND_TIMEOUT, COMMAND_TIMEOUT)
                    .await
                    .map_err(failed("pausing the guest again"))?;
            }
            self.io_threads.step_back();
        }
        Ok(GuestState::Paused)
    }

    /// QEMU restarts a guest that it had stopped itself, soon after the migration has ended; after `completed` it does
    /// not, and `cont` must.
    async fn bring_back(&self, until: Instant) -> Result<GuestState, SwitchoverError> {
        if !self.was_running {
            return self.pause_again().await;
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
                    let reply = self.client.execute_raw("cont", Value::Null, COMMAND_TIMEOUT).await;
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

/// The state of a guest that has panicked, with `-action panic=pause`: it stands still. It is not moved, but a copy can be made of it.
pub const GUEST_PANICKED: &str = "guest-panicked";

/// Whoever finds the guest in `postmigrate` cannot migrate it again, and no command leads from there to `paused`.
const PAUSE_AGAIN: [&str; 2] = ["cont", "stop"];

/// The first sign that the guest is drained: `pre-switchover`, or what can only come after it.
pub(super) fn past_hold(known: &Known) -> Option<Stamp> {
    [MigrationStatus::PreSwitchover, MigrationStatus::Device, MigrationStatus::Completed]
        .iter()
        .find_map(|status| known.entered(status))
}

/// Whether QEMU has still to clean up after a migration whose status is final already. A `migrate` sent before that
/// crashes QEMU 10.0: the old migration's thread meets the new one's state. The `yank` instance goes last.
async fn cleanup_pending(client: &Client) -> Result<bool, SwitchoverError> {
    match client.execute_raw("query-yank", Value::Null, COMMAND_TIMEOUT).await {
        Ok(reply) => {
            let of_migration = |one: &Value| one.get("type").and_then(Value::as_str) == Some("migration");
            Ok(reply.as_array().is_some_and(|all| all.iter().any(of_migration)))
        }
        // QEMU before 6.0.
        Err(error) if error.is_refusal() => Ok(false),
        Err(error) => Err(SwitchoverError::at("asking whether the migration is cleaned up")(error)),
    }
}

fn refusal_is_fine(result: Result<(), SwitchoverError>) -> Result<(), SwitchoverError> {
    match result {
        Err(SwitchoverError::Qmp { source, .. }) if source.is_refusal() => Ok(()),
        other => other,
    }
}

/// Connects to the reader of the stream, for QEMU.
async fn connect(path: &Path) -> io::Result<OwnedFd> {
    let stream = crate::client::connect_unix(path).await?.into_std()?;
    // QEMU expects to choose that itself.
    stream.set_nonblocking(false)?;
    Ok(stream.into())
}

async fn io_threads(client: &Client) -> Result<IoThreads, SwitchoverError> {
    IoThreads::of(client).await.map_err(SwitchoverError::at("asking for the I/O threads"))
}

async fn run_state(client: &Client) -> Result<String, SwitchoverError> {
    client.run_state(COMMAND_TIMEOUT).await.map_err(SwitchoverError::at("asking for the run state"))
}
