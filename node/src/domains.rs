//! Domains of libvirt and VMs of Proxmox VE whose guests move with vmove: `virsh migrate` or `vmove-pve move` decides, vmove carries the memory.
//!
//! Such a QEMU has a second monitor, a socket in one folder. Nothing is kept of it: whoever asks looks into the folder. libvirt or Proxmox VE starts
//! and ends these QEMUs; they are in no [store](crate::store), and no command of vmove changes them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use vmove_qmp::inspect::{self, PageKind, RamFact};
use vmove_qmp::switchover::SkipsShared;
use vmove_qmp::{Client, QmpError};
use vmove_types::proxmox::vm_name;
use vmove_types::vm::VmSummary;

use crate::blocking::run_blocking;
use crate::monitors::Monitors;
use crate::record::VmRecord;
use crate::registry::RegistryError;
use crate::registry::adopt::{Found, examine};
use crate::registry::show::summary;

/// QEMU answers within milliseconds unless its main loop hangs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// What the names of their sockets end with.
const SOCKET: &str = "qmp";

/// Who starts and ends a QEMU that is not ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manager {
    /// libvirt. Its domains have names that QEMU knows.
    Libvirt,
    /// Proxmox VE. Several of its VMs may have one name, so they are known by their number, which the socket has.
    Proxmox,
}

/// Where the monitors of a manager's QEMUs are.
#[derive(Debug, Clone)]
pub struct Monitored {
    /// Who starts them.
    pub by: Manager,
    /// The folder, which need not be there.
    pub folder: PathBuf,
}

/// A domain that was found.
#[derive(Debug, Clone)]
pub struct Domain {
    /// libvirt's UUID of it.
    pub uuid: String,
    /// QEMU's run state, such as `running` or `inmigrate`.
    pub status: String,
    /// Its QEMU.
    pub record: VmRecord,
}

impl Domain {
    /// What `vmove list` tells of it.
    #[must_use]
    pub fn summary(&self, migration: Option<String>) -> VmSummary {
        summary(&self.record, self.status.clone(), migration)
    }
}

/// Why a domain cannot be moved with vmove.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// Nobody answers.
    #[error("The monitor for vmove ({}) does not answer: is another client connected to it?", path.display())]
    Monitor {
        /// Its socket.
        path: PathBuf,
        /// What became of the attempt.
        #[source]
        source: QmpError,
    },
    /// Its memory, mostly.
    #[error(transparent)]
    NotMovable(#[from] RegistryError),
    /// Its memory is in a file that ends with QEMU, as with `<hugepages/>`: libvirt gives QEMU a folder, in which that makes a file and removes its name.
    #[error(
        "Guest memory of domain {0} is in a file without a name, as <hugepages/> has it made: `vmove libvirt enable {0} --check` says what to do instead"
    )]
    Nameless(String),
    /// It has the monitor of another domain or VM, from which it was copied.
    #[error(
        "{name} has the monitor of another one ({}), from which it was copied: `{mend}`, then end it and start it anew",
        path.display()
    )]
    Copied {
        /// Its name.
        name: String,
        /// The socket.
        path: PathBuf,
        /// What gives it its own.
        mend: String,
    },
    /// A thread has failed.
    #[error(transparent)]
    Task(#[from] crate::blocking::TaskFailed),
    /// It is on its way already.
    #[error("Domain {0} is expected here already")]
    ExpectedTwice(String),
}

/// What was found at a monitor that answers.
#[derive(Debug)]
struct Looked {
    uuid: String,
    domain: Result<Domain, DomainError>,
}

/// The domains of this node.
#[derive(Debug)]
pub struct Domains {
    monitors: Arc<Monitors>,
    monitored: Vec<Monitored>,
    /// Those whose QEMU waits for its guest, and libvirt for us.
    expected: Mutex<HashMap<String, Waiting>>,
}

#[derive(Debug)]
struct Waiting {
    record: VmRecord,
    go: Option<oneshot::Sender<()>>,
}

/// A guest is expected until this is dropped.
#[derive(Debug)]
pub struct Expected {
    domains: Arc<Domains>,
    uuid: String,
    go: oneshot::Receiver<()>,
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.domains.lock().remove(&self.uuid);
    }
}

impl Expected {
    /// Waits until libvirt may go on. Ends never if that is not said. Cancel-safe.
    pub async fn may_go_on(&mut self) {
        if (&mut self.go).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Domains {
    /// Those whose monitors are in these folders.
    #[must_use]
    pub fn new(monitors: Arc<Monitors>, monitored: Vec<Monitored>) -> Arc<Self> {
        Arc::new(Self { monitors, monitored, expected: Mutex::default() })
    }

    /// Notes that a QEMU waits for its guest.
    ///
    /// # Errors
    /// [`DomainError::ExpectedTwice`].
    pub fn expect(self: &Arc<Self>, domain: &Domain) -> Result<Expected, DomainError> {
        let (go, may_go) = oneshot::channel();
        let mut expected = self.lock();
        if expected.contains_key(&domain.uuid) {
            return Err(DomainError::ExpectedTwice(domain.uuid.clone()));
        }
        expected.insert(domain.uuid.clone(), Waiting { record: domain.record.clone(), go: Some(go) });
        Ok(Expected { domains: Arc::clone(self), uuid: domain.uuid.clone(), go: may_go })
    }

    /// The QEMU in which the guest of a domain is expected.
    #[must_use]
    pub fn expected(&self, uuid: &str) -> Option<VmRecord> {
        self.lock().get(uuid).map(|waiting| waiting.record.clone())
    }

    /// libvirt may go on with the migration of this domain to here.
    pub fn let_go(&self, uuid: &str) {
        if let Some(go) = self.lock().get_mut(uuid).and_then(|waiting| waiting.go.take()) {
            // Who has waited may have gone away.
            let _ = go.send(());
        }
    }

    /// All that answer and can be moved, by name.
    pub async fn all(self: &Arc<Self>) -> Vec<Domain> {
        let looked = self.look_at_all().await.into_iter().filter_map(|(_, looked)| looked.ok());
        let mut found: Vec<Domain> = looked.filter_map(|looked| looked.domain.ok()).collect();
        found.sort_by(|a, b| a.record.name.cmp(&b.record.name));
        found
    }

    async fn look_at_all(self: &Arc<Self>) -> Vec<(PathBuf, Result<Looked, DomainError>)> {
        let mut looking = JoinSet::new();
        for socket in self.sockets() {
            let domains = Arc::clone(self);
            looking.spawn(async move {
                let looked = domains.look_at(&socket).await;
                (socket, looked)
            });
        }
        looking.join_all().await
    }

    /// QEMU's run state, such as `inmigrate`, of the QEMU whose monitor this is.
    ///
    /// # Errors
    /// [`DomainError::Monitor`].
    pub async fn status(&self, socket: &Path) -> Result<String, DomainError> {
        let not_there = |source| DomainError::Monitor { path: socket.to_owned(), source };
        let client = self.monitors.client(socket).await.map_err(not_there)?;
        client.run_state(ANSWER_TIMEOUT).await.map_err(not_there)
    }

    /// The domain of this UUID; nothing if it is not here.
    ///
    /// # Errors
    /// [`DomainError`], if it is here and cannot be moved.
    pub async fn find(self: &Arc<Self>, uuid: &str) -> Result<Option<Domain>, DomainError> {
        let mut silent = Vec::new();
        for (socket, looked) in self.look_at_all().await {
            match looked {
                Ok(looked) if looked.uuid == uuid => return looked.domain.map(Some),
                Ok(_) => {}
                Err(error) => silent.push((socket, error)),
            }
        }
        for (socket, error) in silent {
            if self.is_named_after(&socket, uuid) || is_of_qemu_with(&socket, uuid).await {
                return Err(error);
            }
        }
        Ok(None)
    }

    /// Whether a socket of libvirt's has the name of this domain: as `vmove libvirt enable` gives it, or as it was at first.
    fn is_named_after(&self, socket: &Path, uuid: &str) -> bool {
        let named = socket.file_stem().and_then(|stem| stem.to_str()).map(uuid_in);
        self.manager_of(socket) == Some(Manager::Libvirt) && named == Some(uuid)
    }

    /// The domain whose monitor this is.
    ///
    /// # Errors
    /// [`DomainError`].
    pub async fn look(&self, socket: &Path) -> Result<Domain, DomainError> {
        self.look_at(socket).await?.domain
    }

    async fn look_at(&self, socket: &Path) -> Result<Looked, DomainError> {
        let not_there = |source| DomainError::Monitor { path: socket.to_owned(), source };
        let client = self.monitors.client(socket).await.map_err(not_there)?;
        let uuid = client.execute_raw("query-uuid", Value::Null, ANSWER_TIMEOUT).await;
        let looked = match uuid {
            Ok(uuid) => {
                let uuid = uuid.get("UUID").and_then(Value::as_str).unwrap_or_default().to_owned();
                let domain = self.ask(&client, socket, &uuid).await;
                Ok(Looked { uuid, domain })
            }
            Err(source) => Err(not_there(source)),
        };
        if client.is_closed() {
            self.monitors.forget(socket).await;
        }
        looked
    }

    async fn ask(&self, client: &Client, socket: &Path, uuid: &str) -> Result<Domain, DomainError> {
        let not_there = |source| DomainError::Monitor { path: socket.to_owned(), source };
        let facts = inspect::facts(client, client.peer_pid().unwrap_or(0), None).await.map_err(not_there)?;
        let nameless = |ram: &RamFact| ram.path.is_some() && ram.pages == PageKind::Anonymous;
        let status = facts.status.clone();
        let name = self.name_by_socket(socket).or(facts.name.clone()).unwrap_or_else(|| uuid.to_owned());
        self.not_copied(client, socket, uuid, &name)?;
        if facts.ram.iter().any(nameless) {
            return Err(DomainError::Nameless(name));
        }
        let path = socket.to_owned();
        let Found { pid, pid_start, backing, ram, command_line } =
            run_blocking(move || examine(&facts, &path)).await??;
        let uuid = uuid.to_owned();
        let record = VmRecord {
            name,
            pid: i32::try_from(pid).unwrap_or_default(),
            pid_start,
            qmp_socket: socket.to_owned(),
            vm_dir: socket.parent().unwrap_or(socket).to_owned(),
            backing,
            command_line,
            environment: Vec::new(),
            ram,
            overlays: Vec::new(),
            devices: Vec::new(),
            adopted: true,
            session: None,
            libvirt: Some(uuid.clone()),
        };
        Ok(Domain { uuid, status, record })
    }

    /// A copy of an enabled domain or VM has its monitor, and of Proxmox VE its memory as well.
    fn not_copied(&self, client: &Client, socket: &Path, uuid: &str, name: &str) -> Result<(), DomainError> {
        let stem = socket.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let path = socket.to_owned();
        match self.manager_of(socket) {
            // Names that are no UUID were given by hand.
            Some(Manager::Libvirt) if uuid_in(stem).len() == uuid.len() && uuid_in(stem) != uuid => {
                let (name, mend) = (name.to_owned(), format!("vmove libvirt enable {name}"));
                Err(DomainError::Copied { name, path, mend })
            }
            Some(Manager::Proxmox) => match client.peer_pid().and_then(vmid_of) {
                Some(vmid) if vmid != stem => {
                    let mend = format!("vmove-pve enable {vmid}");
                    Err(DomainError::Copied { name: vm_name(vmid), path, mend })
                }
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Clears, after a start, what an earlier process may have left in QEMUs: with `x-ignore-shared` the next `virsh save` would leave guest memory
    /// out. Where a migration is under way, it is cleared when that has ended.
    pub async fn clear_left_over(&self) {
        for socket in self.sockets() {
            match self.monitors.client(&socket).await {
                Ok(client) => drop(SkipsShared::taken_up(&client)),
                Err(error) => {
                    tracing::warn!(socket = %socket.display(), %error, "a domain's monitor for vmove does not answer: its settings are not looked at");
                }
            }
        }
    }

    /// The name of a QEMU that is not known by QEMU's own.
    fn name_by_socket(&self, socket: &Path) -> Option<String> {
        let number = socket.file_stem()?.to_str()?;
        (self.manager_of(socket)? == Manager::Proxmox).then(|| vm_name(number))
    }

    fn manager_of(&self, socket: &Path) -> Option<Manager> {
        self.monitored.iter().find(|monitored| socket.starts_with(&monitored.folder)).map(|of| of.by)
    }

    fn sockets(&self) -> Vec<PathBuf> {
        let folders = self.monitored.iter().map(|monitored| std::fs::read_dir(&monitored.folder));
        let entries = folders.flatten().flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        paths.filter(|path| path.extension().is_some_and(|kind| kind == SOCKET)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Waiting>> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The UUID in a name that libvirt's domains have their monitors by.
fn uuid_in(stem: &str) -> &str {
    stem.strip_prefix("libvirt-").unwrap_or(stem)
}

fn words_of(pid: u32) -> Vec<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// The number of the VM of Proxmox VE that a QEMU is: it has the name of its file with the process id.
fn vmid_of(pid: u32) -> Option<String> {
    let words = words_of(pid);
    let at = words.iter().position(|word| word == "-pidfile")?;
    Some(Path::new(words.get(at + 1)?).file_stem()?.to_str()?.to_owned())
}

/// Whether a QEMU whose monitor does not answer was started with this UUID: of Proxmox VE's the socket does not tell.
async fn is_of_qemu_with(socket: &Path, uuid: &str) -> bool {
    // The kernel takes the connection, and tells whose socket it is, also where QEMU is busy with another client.
    let connected = tokio::time::timeout(ANSWER_TIMEOUT, UnixStream::connect(socket)).await;
    let Ok(Ok(stream)) = connected else { return false };
    let pid = stream.peer_cred().ok().and_then(|peer| peer.pid()).and_then(|pid| u32::try_from(pid).ok());
    pid.is_some_and(|pid| words_of(pid).iter().any(|word| word.contains(uuid)))
}
