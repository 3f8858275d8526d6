//! A QMP monitor for synchronous code: tests and the benchmark control QEMU step by step.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio::runtime::Runtime;
use vmove_qmp::{Client, Event, EventsError, QmpError};

const DEADLINE: Duration = Duration::from_secs(20);

/// A connection to QEMU's monitor that keeps all events.
#[derive(Debug)]
pub struct Monitor {
    client: Client,
    events: Arc<Mutex<Vec<Arc<Event>>>>,
    // Dropped last, because the client's tasks run in it.
    runtime: Runtime,
}

impl Monitor {
    /// Connects to the monitor at `socket`, which QEMU may be about to open.
    ///
    /// # Errors
    /// When it does not answer within 20 s.
    pub fn connect(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let deadline = Instant::now() + DEADLINE;
        let client = loop {
            // After `bind` and before `listen`, the socket exists but refuses connections.
            match runtime.block_on(Client::connect(socket, DEADLINE)) {
                Err(QmpError::Connect { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => break other?,
            }
        };
        let events: Arc<Mutex<Vec<Arc<Event>>>> = Arc::default();
        let (kept, mut stream) = (Arc::clone(&events), client.events());
        runtime.spawn(async move {
            loop {
                match stream.next().await {
                    Ok(event) => kept.lock().unwrap_or_else(PoisonError::into_inner).push(event),
                    Err(EventsError::Missed(_)) => {}
                    Err(_) => return,
                }
            }
        });
        Ok(Self { client, events, runtime })
    }

    /// Runs a command. `arguments` is an object, or null for none.
    ///
    /// # Errors
    /// QEMU's error, or a timeout after 20 s.
    pub fn run(&self, command: &str, arguments: Value) -> Result<Value> {
        self.runtime
            .block_on(self.client.execute_raw(command, arguments, DEADLINE))
            .with_context(|| format!("QMP command {command}"))
    }

    /// Switches migration capabilities on.
    ///
    /// # Errors
    /// When QEMU refuses them: this mode is not possible for this guest.
    pub fn enable(&self, capabilities: &[&str]) -> Result<()> {
        let list: Vec<Value> =
            capabilities.iter().map(|name| serde_json::json!({"capability": name, "state": true})).collect();
        self.run("migrate-set-capabilities", serde_json::json!({ "capabilities": list })).map(|_| ())
    }

    /// The first event `name` so far for which `accepts` returns true.
    #[must_use]
    pub fn event(&self, name: &str, accepts: impl Fn(&Event) -> bool) -> Option<Arc<Event>> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.iter().find(|event| event.name == name && accepts(event)).map(Arc::clone)
    }

    /// Number of events `name` so far.
    #[must_use]
    pub fn count(&self, name: &str) -> usize {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.iter().filter(|event| event.name == name).count()
    }

    /// Waits for such an event.
    ///
    /// # Errors
    /// When it does not come within `timeout`, or QEMU ends.
    pub fn wait(
        &self,
        name: &str,
        timeout: Duration,
        accepts: impl Fn(&Event) -> bool,
    ) -> Result<Arc<Event>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(event) = self.event(name, &accepts) {
                return Ok(event);
            }
            if self.client.is_closed() {
                bail!("QEMU closed its monitor while {name} was waited for");
            }
            if Instant::now() > deadline {
                bail!("no event {name} in {timeout:?}");
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// QEMU's version, as `10.0.2`.
    #[must_use]
    pub fn version(&self) -> String {
        self.client.version().to_string()
    }
}
