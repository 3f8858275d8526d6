//! Disks of children on other hosts.
//!
//! Where a host sees the same file at the same path ([`proof`]), overlays lie over it as on the parent's node. Otherwise the
//! parent's node serves the frozen image ([`export`]), and the host has a socket for each disk ([`relay`]):
//!
//! ```text
//! QEMU - overlay - 0.sock - vmoved ==== peer port ==== vmoved - 0.sock - qemu-nbd --read-only - image
//!        |________ the child's host ________|            |________ the parent's node ________|
//! ```
//!
//! Both outlive the daemons: qemu-nbd goes on, records in the state folder say what is served to whom, and a QEMU whose connection
//! is lost connects anew and asks again. The parent's node asks the hosts now and then which of them still read; when none does, the
//! export ends.

mod export;
mod need;
mod proof;
mod relay;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::disk::Exported;
use serde::de::DeserializeOwned;
use vmove_node::peer::{SessionId, join};
use vmove_qmp::confine::Confinement;

use self::export::Export;
pub use self::export::{Wanted, find_server};
pub use self::proof::{Proofs, prove};
use self::relay::Relay;
pub use self::relay::{Images, RelayInUse};
use super::ForkEngine;
use super::error::ImageError;
use vmove_node::blocking::run_blocking;
use vmove_node::files::read_json;

const RECORD: &str = "record.json";
/// The kernel's limit, without the zero.
const SOCKET_PATH: usize = 107;

/// What this node serves to others, and what others serve to it.
#[derive(Debug)]
pub struct ServedImages {
    /// Records, sockets, and overlays that have no other place.
    dir: PathBuf,
    /// How long a guest that reads waits for a lost connection, in seconds.
    reconnect_s: u64,
    /// The rights of QEMUs here that read by sockets.
    confinement: Confinement,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    exports: HashMap<SessionId, Export>,
    relays: HashMap<SessionId, Relay>,
}

impl ServedImages {
    pub fn new(dir: &Path, reconnect_for: Duration, confinement: Confinement) -> Self {
        Self {
            dir: dir.to_owned(),
            reconnect_s: reconnect_for.as_secs(),
            confinement,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where an export or a relay has its record and its sockets.
    fn folder(&self, kind: &str, session: SessionId) -> PathBuf {
        let id = session.0.simple().to_string();
        self.dir.join(format!("{kind}-{}", &id[..12]))
    }

    /// Whether sockets can be made here at all.
    pub fn able(&self) -> Result<(), ImageError> {
        let path = Exported::socket(&self.folder("out", SessionId::random()), 255);
        let len = path.as_os_str().len();
        if len <= SOCKET_PATH {
            return Ok(());
        }
        Err(ImageError::LongPath { path, len, most: SOCKET_PATH })
    }

    /// Folders of a kind.
    fn folders(&self, kind: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let is_one = |dir: &PathBuf| {
            let name = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.strip_prefix(kind).is_some_and(|rest| rest.starts_with('-'))
        };
        entries.map(|entry| entry.path()).filter(is_one).collect()
    }

    /// Records of a kind that an earlier life left.
    fn left<T: DeserializeOwned>(&self, kind: &str) -> Vec<T> {
        self.folders(kind).iter().filter_map(|dir| read(dir)).collect()
    }
}

/// Lets QEMUs pass to what is in the folder of an export or a relay.
fn let_pass(confinement: &Confinement, dir: &Path) -> io::Result<()> {
    // Those above are in the state folder, through which they may pass.
    dir.ancestors().take(3).try_for_each(|folder| confinement.let_pass(folder))
}

impl ForkEngine {
    /// Takes up what an earlier life served, and was served. Servers that have ended are started again by [`ForkEngine::serve_disks`].
    pub(super) async fn recover_disks(&self) {
        let (images, peers) = (self.images.clone(), self.peers.clone());
        // Sockets are listened on by tasks.
        let runtime = tokio::runtime::Handle::current();
        let work = move || {
            let _entered = runtime.enter();
            images.remove_links();
            images.recover_relays(&peers);
            images.find_exports();
        };
        if let Err(error) = run_blocking(work).await {
            tracing::error!(%error, "disks of forks are not taken up");
        }
    }

    /// Looks after disks of forks to and from other nodes. Never returns.
    pub async fn serve_disks(self: Arc<Self>) {
        tokio::join!(self.clone().serve_exports(), self.tidy_relays());
    }
}

/// Reads a record; half a folder, of a life that was cut off before it wrote one, is removed.
fn read<T: DeserializeOwned>(dir: &Path) -> Option<T> {
    let path = dir.join(RECORD);
    match read_json(&path) {
        Ok(record) => Some(record),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            remove(dir);
            None
        }
        Err(error) => {
            tracing::error!(path = %path.display(), %error, "the record of a fork's disks cannot be read");
            None
        }
    }
}

fn remove(dir: &Path) {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(dir = %dir.display(), %error, "something of a fork's disks is left");
        }
        _ => {}
    }
}
