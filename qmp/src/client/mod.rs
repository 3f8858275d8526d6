//! A QMP connection with many commands in flight.
//!
//! One task reads, matches replies to commands by id, stamps events with the time of reading, and runs the callbacks;
//! a command is written to the socket by whoever sends it, without a task in between. Both save a thread switch on the
//! path between a guest's stop and its restart.

mod dial;
mod expectation;
mod fds;
pub(crate) mod hooks;
pub(crate) mod pending;
mod reader;
mod writer;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::Value;
use tokio::{
    net::UnixStream,
    sync::{broadcast, watch},
    task::AbortHandle,
    time::Instant,
};

pub use dial::{MAX_SOCKET_PATH, connect_unix};
pub use expectation::Expectation;
pub use fds::FdSetEntry;

use self::{
    hooks::{Hooks, Keep},
    pending::{Pending, Reply},
    writer::Writer,
};
use crate::{Event, Events, QmpError, codec, codec::Incoming};

/// Events kept for a slow subscriber.
const EVENT_BACKLOG: usize = 1024;

/// Deadline of the small commands that this crate sends by itself.
pub(crate) const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// QEMU's version, from the greeting.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[non_exhaustive]
pub struct QemuVersion {
    /// 10 in 10.0.2.
    pub major: u32,
    /// 0 in 10.0.2.
    pub minor: u32,
    /// 2 in 10.0.2.
    pub micro: u32,
    /// What the distribution adds, such as ` (Debian 1:10.0.2+ds-2)`.
    pub package: String,
}

impl std::fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// A QMP connection. Clones share it; it ends when the last clone is dropped, or when QEMU ends.
#[derive(Clone, Debug)]
pub struct Client(Arc<Owner>);

/// Ends the tasks with the last clone. The tasks themselves hold only [`Shared`].
#[derive(Debug)]
struct Owner {
    shared: Arc<Shared>,
    tasks: [AbortHandle; 2],
}

impl Drop for Owner {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.shared.close("the client was dropped");
    }
}

#[derive(Debug)]
pub(crate) struct Shared {
    path: PathBuf,
    version: QemuVersion,
    out_of_band: bool,
    peer_pid: Option<u32>,
    next_id: AtomicU64,
    writer: Writer,
    pending: Pending,
    pub(crate) hooks: Arc<Hooks>,
    /// `None` once the connection has ended, which ends all subscriptions.
    events: Mutex<Option<broadcast::Sender<Arc<Event>>>>,
    /// Why the connection ended, once it has.
    closed: watch::Sender<Option<String>>,
    /// QEMU keeps the descriptors of one message until it runs the command: one such command at a time.
    fd_turn: tokio::sync::Mutex<()>,
}

impl Client {
    /// Connects, reads the greeting and leaves the negotiation mode, with out-of-band execution if it is offered.
    ///
    /// # Errors
    /// [`QmpError::Connect`] if nobody listens; [`QmpError::NoGreeting`] if `deadline` passes in silence, which means
    /// that the monitor serves someone else; [`QmpError::NotQmp`] if it is no QMP monitor.
    pub async fn connect(path: &Path, deadline: Duration) -> Result<Self, QmpError> {
        let until = Instant::now() + deadline;
        let connect_error = |source| QmpError::Connect { path: path.to_owned(), source };
        let stream = tokio::time::timeout_at(until, connect_unix(path))
            .await
            .map_err(|_| connect_error(std::io::ErrorKind::TimedOut.into()))?
            .map_err(connect_error)?;
        Self::over(stream, path, deadline).await
    }

    /// As [`Client::connect`], over a stream that is connected already. `path` is for messages only.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub async fn over(stream: UnixStream, path: &Path, deadline: Duration) -> Result<Self, QmpError> {
        let until = Instant::now() + deadline;
        let peer_pid = stream.peer_cred().ok().and_then(|c| c.pid()).and_then(|pid| u32::try_from(pid).ok());
        let stream = Arc::new(stream);
        let mut framer = codec::Framer::default();
        let greeting = tokio::time::timeout_at(until, reader::first_message(&stream, &mut framer))
            .await
            .map_err(|_| QmpError::NoGreeting { path: path.to_owned(), waited: deadline })?
            .map_err(|source| QmpError::Io { what: "could not read the greeting", source })?;
        let Some(Incoming::Greeting(greeting)) = greeting else {
            let found = greeting.map_or_else(|| "end of stream".to_owned(), |other| format!("{other:?}"));
            return Err(QmpError::NotQmp { path: path.to_owned(), found });
        };
        let out_of_band = offers_oob(&greeting);
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            version: version(&greeting),
            out_of_band,
            peer_pid,
            next_id: AtomicU64::new(1),
            writer: Writer::new(stream.clone()),
            pending: Pending::default(),
            hooks: Arc::default(),
            events: Mutex::new(Some(broadcast::channel(EVENT_BACKLOG).0)),
            closed: watch::channel(None).0,
            fd_turn: tokio::sync::Mutex::new(()),
        });
        let tasks = [
            tokio::spawn(reader::run(shared.clone(), stream, framer)).abort_handle(),
            tokio::spawn(writer::run(shared.clone())).abort_handle(),
        ];
        let client = Self(Arc::new(Owner { shared, tasks }));
        let enable: &[&str] = if out_of_band { &["oob"] } else { &[] };
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(100));
        client.execute_raw("qmp_capabilities", serde_json::json!({ "enable": enable }), left).await?;
        Ok(client)
    }

    /// Path that was dialled.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.shared.path
    }

    /// QEMU's process id by `SO_PEERCRED`, in our pid name space. It is the process that *opened* the listening socket:
    /// a launcher, where one passed it on.
    #[must_use]
    pub fn peer_pid(&self) -> Option<u32> {
        self.0.shared.peer_pid
    }

    /// QEMU's version, from the greeting.
    #[must_use]
    pub fn version(&self) -> &QemuVersion {
        &self.0.shared.version
    }

    /// Whether out-of-band execution is in use.
    #[must_use]
    pub fn has_out_of_band(&self) -> bool {
        self.0.shared.out_of_band
    }

    /// Runs a typed command.
    ///
    /// # Errors
    /// [`QmpError::Refused`], [`QmpError::Timeout`], [`QmpError::Closed`], or [`QmpError::Decode`] when QEMU's reply
    /// does not fit the types (a newer QEMU): ask again by [`Client::execute_raw`].
    pub async fn execute<C: qapi::Command>(&self, command: C, deadline: Duration) -> Result<C::Ok, QmpError> {
        let name = C::NAME;
        let arguments = serde_json::to_value(&command)
            .map_err(|source| QmpError::Encode { command: name.to_owned(), source })?;
        let reply = self.execute_raw(name, arguments, deadline).await?;
        serde_json::from_value(reply).map_err(|source| QmpError::Decode { command: name.to_owned(), source })
    }

    /// Runs a command by name. `arguments` is an object, or `Null` for none.
    ///
    /// # Errors
    /// As [`Client::execute`], without `Decode`.
    pub async fn execute_raw(
        &self,
        name: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, QmpError> {
        let until = Instant::now() + deadline;
        let late = || QmpError::Timeout { command: name.to_owned(), waited: deadline };
        let permit =
            tokio::time::timeout_at(until, self.shared().pending.in_band()).await.map_err(|_| late())?;
        let reply = self.shared().send(name, &arguments, false, None, Some(permit))?;
        reply.wait(until, deadline).await
    }

    /// QEMU's run state, such as `running` or `inmigrate`.
    ///
    /// # Errors
    /// As [`Client::execute`], without `Decode`.
    pub async fn run_state(&self, deadline: Duration) -> Result<String, QmpError> {
        let reply = self.execute_raw("query-status", Value::Null, deadline).await?;
        Ok(reply.get("status").and_then(Value::as_str).unwrap_or("unknown").to_owned())
    }

    /// Runs a command out of band: QEMU's monitor thread carries it out, whatever the main loop does.
    ///
    /// # Errors
    /// [`QmpError::NoOutOfBand`] where the monitor does not offer it, else as [`Client::execute_raw`]. QEMU refuses
    /// commands that it does not allow out of band.
    pub async fn execute_oob_raw(
        &self,
        name: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, QmpError> {
        if !self.has_out_of_band() {
            return Err(QmpError::NoOutOfBand { command: name.to_owned() });
        }
        let reply = self.shared().send(name, &arguments, true, None, None)?;
        reply.wait(Instant::now() + deadline, deadline).await
    }

    /// Runs a command that takes a descriptor along (`SCM_RIGHTS`).
    ///
    /// # Errors
    /// As [`Client::execute_raw`].
    pub async fn execute_with_fd(
        &self,
        name: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
        deadline: Duration,
    ) -> Result<Value, QmpError> {
        let until = Instant::now() + deadline;
        let late = || QmpError::Timeout { command: name.to_owned(), waited: deadline };
        let fd = fd
            .try_clone_to_owned()
            .map_err(|source| QmpError::Io { what: "could not duplicate a descriptor to send", source })?;
        let _turn = tokio::time::timeout_at(until, self.shared().fd_turn.lock()).await.map_err(|_| late())?;
        let permit =
            tokio::time::timeout_at(until, self.shared().pending.in_band()).await.map_err(|_| late())?;
        let reply = self.shared().send(name, &arguments, false, Some(fd), Some(permit))?;
        reply.wait(until, deadline).await
    }

    /// All events from now on.
    #[must_use]
    pub fn events(&self) -> Events {
        let sender = self.shared().lock_events();
        // Without a sender the subscription is at its end from the start.
        Events(sender.as_ref().map_or_else(|| broadcast::channel(1).1, broadcast::Sender::subscribe))
    }

    /// The first event called `name` for which `accepts` holds, of those read from now on: call this before sending
    /// the command that causes it.
    pub fn expect(
        &self,
        name: &str,
        mut accepts: impl FnMut(&Event) -> bool + Send + 'static,
    ) -> Expectation {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let (mut sender, wanted) = (Some(sender), name.to_owned());
        let hooks = self.shared().hooks.clone();
        let id = hooks.add(move |event| {
            if event.name != wanted || !accepts(event) {
                return Keep::Yes;
            }
            if let Some(sender) = sender.take() {
                // The waiter may have given up; then nobody wants the event.
                let _ = sender.send(event.clone());
            }
            Keep::No
        });
        Expectation { name: name.to_owned(), receiver, hooks, id }
    }

    /// Calls `heard` for each event read from now on, as long as the connection lasts. It is called by the task that reads: it must not block.
    pub fn listen(&self, mut heard: impl FnMut(&Arc<Event>) + Send + 'static) {
        self.shared().hooks.add(move |event| {
            heard(event);
            Keep::Yes
        });
    }

    /// Ends when the connection has ended, with the reason.
    pub async fn closed(&self) -> String {
        let mut closed = self.shared().closed.subscribe();
        // `shared` holds the sender, so waiting cannot fail.
        closed
            .wait_for(Option::is_some)
            .await
            .map_or_else(|_| "the client was dropped".to_owned(), |reason| reason.clone().unwrap_or_default())
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared().closed.borrow().is_some()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }
}

impl Shared {
    /// Sends a command at once and returns its reply to be waited for later. Never blocks, so an event callback may call
    /// it. Not for everyday use: it does not keep QEMU's queue of 8 from filling up.
    pub(crate) fn post(&self, name: &str, arguments: &Value) -> Result<Reply, QmpError> {
        self.send(name, arguments, false, None, None)
    }

    /// Writes one command. The reply is registered before the first byte leaves.
    fn send(
        &self,
        name: &str,
        arguments: &Value,
        out_of_band: bool,
        fd: Option<OwnedFd>,
        permit: Option<tokio::sync::OwnedSemaphorePermit>,
    ) -> Result<Reply, QmpError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let arguments = Some(arguments).filter(|value| !value.is_null());
        let line = codec::encode(name, arguments, id, out_of_band)
            .map_err(|source| QmpError::Encode { command: name.to_owned(), source })?;
        let reply = self.pending.register(id, name, permit)?;
        tracing::trace!(command = name, id, out_of_band, "QMP command");
        self.writer.send(line, fd);
        Ok(reply)
    }

    /// Ends the connection for everyone who waits. The first reason stays.
    fn close(&self, reason: &str) {
        let first = self.closed.send_if_modified(|closed| {
            let first = closed.is_none();
            closed.get_or_insert_with(|| reason.to_owned());
            first
        });
        if first {
            self.pending.close(reason);
            self.hooks.close(reason);
            drop(self.lock_events().take());
        }
    }

    fn lock_events(&self) -> std::sync::MutexGuard<'_, Option<broadcast::Sender<Arc<Event>>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn offers_oob(greeting: &Value) -> bool {
    greeting
        .get("capabilities")
        .and_then(Value::as_array)
        .is_some_and(|all| all.iter().any(|one| one.as_str() == Some("oob")))
}

fn version(greeting: &Value) -> QemuVersion {
    let part = |name: &str| {
        let number = greeting.pointer(&format!("/version/qemu/{name}")).and_then(Value::as_u64);
        number.and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
    };
    let package = greeting.pointer("/version/package").and_then(Value::as_str).unwrap_or_default();
    QemuVersion {
        major: part("major"),
        minor: part("minor"),
        micro: part("micro"),
        package: package.to_owned(),
    }
}
