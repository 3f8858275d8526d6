//! QMP connections of this daemon, one for each QEMU: a QMP socket serves one client at a time.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex as AsyncMutex;
use vmove_qmp::{Client, Event, QmpError};

/// Long enough for a QEMU whose main loop is busy; a socket nobody listens on answers at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Hears of each event of each QEMU, with the path of its socket. Called where events are read: it must not block.
pub type Listener = Box<dyn Fn(&Path, &Arc<Event>) + Send + Sync>;

/// Shares one [`Client`] among everything in the daemon that talks to the same QEMU.
#[derive(Default)]
pub struct Monitors {
    /// Never held across a connection attempt: a QEMU that hangs must not keep others waiting.
    clients: Mutex<HashMap<PathBuf, Arc<AsyncMutex<Option<Client>>>>>,
    listeners: Arc<OnceLock<Vec<Listener>>>,
}

impl fmt::Debug for Monitors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Monitors").field("clients", &self.clients).finish_non_exhaustive()
    }
}

impl Monitors {
    /// The connection to the QMP socket at `path`, made if there is none or the old one has closed.
    ///
    /// # Errors
    /// [`QmpError`] of the connection attempt.
    pub async fn client(&self, path: &Path) -> Result<Client, QmpError> {
        // Held while connecting: a second caller waits for the first one's connection rather than for its own greeting, which
        // QEMU would not send before the first connection closes.
        let slot = self.slot(path);
        let mut slot = slot.lock().await;
        if let Some(client) = slot.as_ref().filter(|c| !c.is_closed()) {
            return Ok(client.clone());
        }
        let client = Client::connect(path, CONNECT_TIMEOUT).await?;
        self.listen_to(path, &client);
        Ok(slot.insert(client).clone())
    }

    fn slot(&self, path: &Path) -> Arc<AsyncMutex<Option<Client>>> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(clients.entry(path.to_owned()).or_default())
    }

    /// Takes in a connection that was made elsewhere (a QEMU that was just started).
    pub async fn insert(&self, path: &Path, client: Client) {
        self.listen_to(path, &client);
        *self.slot(path).lock().await = Some(client);
    }

    /// Has `listeners` hear of all events of all QEMUs, whoever else holds their monitors. Once, before there is a connection: others are not
    /// taken later.
    pub fn hear(&self, listeners: Vec<Listener>) {
        let _ = self.listeners.set(listeners);
    }

    fn listen_to(&self, path: &Path, client: &Client) {
        if self.listeners.get().is_some_and(|all| !all.is_empty()) {
            let (listeners, path) = (Arc::clone(&self.listeners), path.to_owned());
            client.listen(move |event| {
                listeners.get().into_iter().flatten().for_each(|heard| heard(&path, event));
            });
        }
    }

    /// Forgets a connection; it closes when its last user drops it.
    pub async fn forget(&self, path: &Path) {
        let slot = self.clients.lock().unwrap_or_else(PoisonError::into_inner).remove(path);
        if let Some(slot) = slot {
            slot.lock().await.take();
        }
    }
}
