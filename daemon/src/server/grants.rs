//! Grants: VMs that a bridge has let this node start, and what they have.

mod demand;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use vmove_grant::{Book, Grant, GrantError, GrantedShare, Host};
use vmove_node::admission::{Admission, Coming};
use vmove_node::registry::Registry;
use vmove_types::device::PciAddress;
use vmove_types::problem::{Code, Problem, chain};
use vmove_types::tuning::NumaShare;
use vmove_types::vm::{RunRequest, VmDetail};

use crate::config::GrantPolicy;

pub use self::demand::demand;

/// Between two looks for VMs that have ended.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The book of this node, and whose grants it takes.
#[derive(Debug)]
pub struct Grants {
    host: Host,
    required: bool,
    file: PathBuf,
    book: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    book: Book,
    /// VMs that are being started: the registry does not list them yet.
    starting: BTreeSet<String>,
}

/// A device that a VM of this node was granted.
#[derive(Debug)]
pub struct LeasedDevice {
    pub vm: String,
    pub role: String,
    pub lease: String,
    pub holder: String,
}

/// Processors of a grant.
#[derive(Debug)]
pub struct Processors {
    /// All of them.
    pub cores: u32,
    /// Of which NUMA nodes; empty if the bridge does not say.
    pub numa: Vec<NumaShare>,
}

/// A VM that is being started into its grant. Dropped before [`Entered::started`], it gives the grant's share back.
pub struct Entered {
    grants: Arc<Grants>,
    grant: Grant,
    started: bool,
}

impl Grants {
    /// Reads the book of an earlier daemon. None if the configuration names no bridge: then nothing is checked.
    pub fn open(policy: &GrantPolicy, node: &str, state_dir: &Path) -> anyhow::Result<Option<Arc<Self>>> {
        if policy.keys.is_empty() {
            return Ok(None);
        }
        let file = state_dir.join("grants.json");
        let book = match std::fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text).with_context(|| {
                format!("{} is not the book of grants that this version writes", file.display())
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Book::default(),
            Err(error) => return Err(error).with_context(|| format!("Could not read {}", file.display())),
        };
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
        // Bridges know nodes by short names.
        let node = node.split('.').next().unwrap_or(node);
        let host = Host { node: node.to_owned(), cores, keys: policy.keys.clone() };
        let kept = Kept { book, starting: BTreeSet::new() };
        Ok(Some(Arc::new(Self { host, required: policy.required, file, book: Mutex::new(kept) })))
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a VM that is to be started into its grant. None if it has none, and needs none.
    pub fn enter(self: &Arc<Self>, request: &RunRequest) -> Result<Option<Entered>, Problem> {
        let mut kept = self.kept();
        if kept.starting.contains(&request.name) || kept.book.vms().contains_key(&request.name) {
            let text = format!("VM {:?} runs, or is being started, in another grant", request.name);
            return Err(Problem::new(Code::NameTaken, text));
        }
        let Some((book, grant)) = self.taken(&kept.book, request, false)? else { return Ok(None) };
        self.keep(&mut kept, book, &grant)?;
        kept.starting.insert(request.name.clone());
        Ok(Some(Entered { grants: Arc::clone(self), grant, started: false }))
    }

    /// The book with the VM in it. None if it has no grant, and needs none. `comes`: from another node, or as a child of a guest.
    fn taken(
        &self,
        book: &Book,
        request: &RunRequest,
        comes: bool,
    ) -> Result<Option<(Book, Grant)>, Problem> {
        let refused = |error: &GrantError| Problem::from_error(Code::GrantRefused, error);
        let Some(text) = &request.grant else {
            let (vm, here) = (request.name.clone(), self.host.node.clone());
            let missing =
                if comes { GrantError::ComesWithout { vm, here } } else { GrantError::Missing { vm } };
            return if self.required { Err(refused(&missing)) } else { Ok(None) };
        };
        let mut demand = demand(request).map_err(|error| Problem::bad_request(chain(&error)))?;
        if comes {
            // Its command line names those of the node that it comes from.
            demand.devices = request.devices.iter().map(|device| device.address.to_string()).collect();
        }
        let mut book = book.clone();
        let taken = book.take(&self.host, text, &request.name, &demand, now_ms());
        let grant = taken.map_err(|error| refused(&error))?.clone();
        Ok(Some((book, grant)))
    }

    /// A grant is used up before the VM is here: whatever happens then, it is good for nothing.
    fn keep(&self, kept: &mut Kept, book: Book, grant: &Grant) -> Result<(), Problem> {
        self.write(&book).map_err(|error| Problem::new(Code::LocalFile, format!("{error:#}")))?;
        kept.book = book;
        tracing::info!(
            vm = grant.vm,
            lease = grant.lease,
            holder = grant.holder,
            "the VM is taken into its grant"
        );
        Ok(())
    }

    fn write(&self, book: &Book) -> anyhow::Result<()> {
        vmove_node::files::write_durably(&self.file, book)
            .with_context(|| format!("Could not write {}", self.file.display()))
    }

    /// The lease into whose grant a VM was started.
    pub fn lease_of(&self, vm: &str) -> Option<String> {
        self.kept().book.vms().get(vm).map(|taken| taken.grant.lease.clone())
    }

    /// What a VM was granted of processors and NUMA nodes, if it came into a grant.
    pub fn processors_of(&self, vm: &str) -> Option<Processors> {
        let kept = self.kept();
        let grant = &kept.book.vms().get(vm)?.grant;
        let share =
            |of: &GrantedShare| NumaShare { node: of.node, cpus: of.cores, memory_mib: of.memory_mib };
        Some(Processors { cores: grant.cores, numa: grant.numa.iter().map(share).collect() })
    }

    /// The VM that was granted a device, and by which lease.
    pub fn holder_of(&self, address: PciAddress) -> Option<LeasedDevice> {
        self.kept().book.vms().iter().find_map(|(vm, taken)| {
            let granted = &taken.grant.devices;
            let device = granted.iter().find(|granted| granted.address.parse() == Ok(address))?;
            let (lease, holder) = (taken.grant.lease.clone(), taken.grant.holder.clone());
            Some(LeasedDevice { vm: vm.clone(), role: device.role.clone(), lease, holder })
        })
    }

    /// A VM has ended, or has not started: what it had is free.
    pub fn end(&self, vm: &str) {
        let mut kept = self.kept();
        kept.starting.remove(vm);
        let Some(taken) = kept.book.end(vm) else { return };
        tracing::info!(vm, lease = taken.grant.lease, "what the VM had is free");
        if let Err(error) = self.write(&kept.book) {
            // The next daemon finds that the VM has ended, as this one did.
            tracing::warn!("{error:#}");
        }
    }

    /// Gives back what VMs had that have ended or left, until the task is dropped.
    pub async fn keep_book(self: Arc<Self>, registry: Arc<Registry>) {
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let known: Vec<String> = {
                let kept = self.kept();
                let names = kept.book.vms().keys();
                names.filter(|vm| !kept.starting.contains(*vm)).cloned().collect()
            };
            // Asked first, since a list takes time: of one that has come meanwhile, it may tell nothing yet.
            let here: Vec<String> = known.into_iter().filter(|vm| !registry.is_expected(vm)).collect();
            if here.is_empty() {
                continue;
            }
            let listed = registry.list().await;
            let runs = |name: &String| listed.iter().any(|vm| vm.name == *name && vm.status != "ended");
            here.iter().filter(|name| !runs(name)).for_each(|name| self.end(name));
        }
    }
}

/// VMs from other nodes need a grant of this one, as those that are started here.
impl Admission for Grants {
    fn would_admit(&self, asked: &RunRequest) -> Result<(), Problem> {
        let kept = self.kept();
        self.taken(&kept.book, asked, true).map(drop)
    }

    fn admit(&self, asked: &RunRequest, _: Coming) -> Result<(), Problem> {
        let mut kept = self.kept();
        match self.taken(&kept.book, asked, true)? {
            Some((book, grant)) => self.keep(&mut kept, book, &grant),
            None => Ok(()),
        }
    }
}

impl Entered {
    /// The VM has started. Whether it has no more memory than was granted is only known now.
    ///
    /// # Errors
    /// It has more, and must be ended.
    pub fn started(mut self, vm: &VmDetail) -> Result<(), Problem> {
        let has = vm.summary.memory_bytes >> 20;
        let granted = self.grant.memory_mib + self.grant.huge_2m_mib + self.grant.huge_1g_mib;
        if has > granted {
            let error = GrantError::Exceeds {
                vm: vm.summary.name.clone(),
                lease: self.grant.lease.clone(),
                what: "MiB of memory",
                wanted: has,
                granted,
            };
            return Err(Problem::from_error(Code::GrantRefused, &error));
        }
        self.started = true;
        self.grants.kept().starting.remove(&self.grant.vm);
        Ok(())
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if !self.started {
            self.grants.end(&self.grant.vm);
        }
    }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use vmove_grant::{GrantedDevice, SecretKey};

    use super::*;

    /// What VM `v` may have on a node, signed.
    fn granted(key: &SecretKey, node: &str) -> Option<String> {
        let device = GrantedDevice { role: "net0".to_owned(), address: "0000:17:00.2".to_owned() };
        let grant = Grant {
            lease: "l".to_owned(),
            holder: "alice".to_owned(),
            node: node.to_owned(),
            vm: "v".to_owned(),
            serial: SecretKey::serial().unwrap(),
            expires_ms: now_ms() + 60_000,
            cores: 1,
            memory_mib: 64,
            huge_2m_mib: 0,
            huge_1g_mib: 0,
            devices: vec![device],
            numa: Vec::new(),
        };
        Some(key.sign(&grant).unwrap())
    }

    /// VM `v`, without a grant.
    fn request(more: &[&str], device: &str) -> RunRequest {
        RunRequest {
            name: "v".to_owned(),
            memory: "thp".to_owned(),
            command_line: [&["qemu", "-m", "64"], more].concat().into_iter().map(str::to_owned).collect(),
            environment: std::collections::BTreeMap::new(),
            devices: vec![device.parse().unwrap()],
            grant: None,
            pin: None,
        }
    }

    /// The book of node `n1`, which requires grants.
    fn book() -> (SecretKey, Arc<Grants>, tempfile::TempDir) {
        let (key, _) = SecretKey::generate().unwrap();
        let policy = GrantPolicy { keys: vec![key.public()], required: true };
        let dir = tempfile::tempdir().unwrap();
        let grants = Grants::open(&policy, "n1", dir.path()).unwrap().unwrap();
        (key, grants, dir)
    }

    #[test]
    fn a_device_of_the_request_that_is_not_granted_is_refused() {
        let (key, grants, _dir) = book();
        let with = |device| RunRequest { grant: granted(&key, "n1"), ..request(&[], device) };
        let refused = grants.enter(&with("net0=0000:17:00.3")).err().unwrap();
        assert_eq!(refused.code, Code::GrantRefused);
        assert!(refused.to_string().contains("0000:17:00.3"), "{refused}");
        assert!(grants.enter(&with("net0=17:00.2")).unwrap().is_some());
    }

    #[test]
    fn a_vm_that_comes_is_let_in_once_by_its_own_grant() {
        let (key, grants, _dir) = book();
        // It names a device of the node that it comes from.
        let without = request(&["-device", "vfio-pci,host=09:00.0"], "net0=17:00.2");
        let refused = grants.admit(&without, Coming::ByMigration).unwrap_err();
        assert!(refused.code == Code::GrantRefused && refused.to_string().contains("comes without a grant"));
        let with = |node| RunRequest { grant: granted(&key, node), ..without.clone() };
        assert!(
            grants
                .admit(&with("n2"), Coming::ByMigration)
                .unwrap_err()
                .to_string()
                .contains("is for node n2")
        );
        let good = with("n1");
        grants.would_admit(&good).unwrap();
        assert_eq!(grants.lease_of("v"), None, "looking changes nothing");
        grants.admit(&good, Coming::ByMigration).unwrap();
        assert_eq!(grants.lease_of("v").as_deref(), Some("l"));
        assert!(grants.admit(&good, Coming::ByMigration).unwrap_err().to_string().contains("used before"));
    }
}
