//! Files of the cluster (`/etc/pve`), which all its nodes see, and who may change them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use vmove_pve::{Cluster, Config, Storages, Vm, Vmid};
use vmove_types::problem::Code;

use super::refused;
use crate::failure::Failure;

const ROOT: &str = "/etc/pve";
/// Whoever changes a configuration holds a lock of a file here, as Proxmox VE does.
const LOCKS: &str = "/var/lock/qemu-server";
/// As long as Proxmox VE waits for it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// For a rename by another node to be seen here.
const SEEN_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The name of this node in the cluster: that of the host, without its domain.
pub fn this_node() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.split('.').next().unwrap_or_default().to_owned()
}

/// Where the configuration of a VM is, if that is on this node.
pub fn config_path(node: &str, vmid: Vmid) -> PathBuf {
    folder(node).join(format!("{vmid}.conf"))
}

fn folder(node: &str) -> PathBuf {
    Path::new(ROOT).join("nodes").join(node).join("qemu-server")
}

/// Whether the cluster has such a node.
pub fn has_node(node: &str) -> bool {
    !node.is_empty() && !node.contains('/') && !node.starts_with('.') && folder(node).is_dir()
}

/// The node that has the configuration of a VM.
pub fn node_of(vmid: Vmid) -> Result<String, Failure> {
    let nodes = Path::new(ROOT).join("nodes");
    let found = std::fs::read_dir(&nodes).map_err(|error| {
        refused(format!(
            "{} cannot be read ({error}): is this a node of Proxmox VE, and are you root?",
            nodes.display()
        ))
    })?;
    let names = found.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut with = names.filter(|node| config_path(node, vmid).exists());
    with.next()
        .ok_or_else(|| refused(format!("No node of the cluster has a VM {vmid}: `qm list` shows them")))
}

/// A VM that this node has.
pub fn own_vm(vmid: Vmid) -> Result<Vm, Failure> {
    let (node, here) = (node_of(vmid)?, this_node());
    if node != here {
        return Err(refused(format!(
            "VM {vmid} is on node {node}, not here ({here}): run this command there"
        )));
    }
    read(&here, vmid)
}

/// The configuration that a node has of a VM.
pub fn read(node: &str, vmid: Vmid) -> Result<Vm, Failure> {
    let path = config_path(node, vmid);
    let text = std::fs::read_to_string(&path).map_err(|error| {
        Failure::new(Code::LocalFile, format!("{} cannot be read: {error}", path.display()))
    })?;
    Ok(Vm::new(vmid, Config::read(&text)))
}

/// What the cluster says of all its VMs. A file that is not there says nothing.
pub fn read_cluster() -> Result<Cluster, Failure> {
    let text = |name: &str| {
        let path = Path::new(ROOT).join(name);
        match std::fs::read_to_string(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Failure::new(Code::LocalFile, format!("{} cannot be read: {error}", path.display())))
            }
            read => Ok(read.unwrap_or_default()),
        }
    };
    Ok(Cluster {
        storages: Storages::read(&text("storage.cfg")?),
        ha: text("ha/resources.cfg")?,
        replication: text("replication.cfg")?,
    })
}

/// Changes the configuration of a VM that this node has: reads it anew, under the lock of Proxmox VE, and puts the new one in its place at once.
pub fn change(vmid: Vmid, make: impl FnOnce(&Vm) -> Result<Config, Failure>) -> Result<(), Failure> {
    let _lock = hold(vmid)?;
    let vm = own_vm(vmid)?;
    let new = make(&vm)?;
    if new == *vm.config() {
        return Ok(());
    }
    let path = config_path(&this_node(), vmid);
    let beside = path.with_extension(format!("conf.tmp.{}", std::process::id()));
    let written = std::fs::write(&beside, new.text()).and_then(|()| std::fs::rename(&beside, &path));
    written.map_err(|error| {
        let _ = std::fs::remove_file(&beside);
        Failure::new(
            Code::LocalFile,
            format!(
                "{} cannot be written ({error}): has the cluster a quorum (`pvecm status`)?",
                path.display()
            ),
        )
    })
}

/// Waits until the cluster has told this node that it has the configuration of a VM, after another one has renamed it. Whether it has.
pub async fn seen_here(vmid: Vmid) -> bool {
    let path = config_path(&this_node(), vmid);
    let until = Instant::now() + SEEN_TIMEOUT;
    while !path.exists() {
        if Instant::now() > until {
            return false;
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
    true
}

/// Gives the configuration of a VM to another node. Only the node that has it may do that.
pub fn hand_over(vmid: Vmid, to: &str) -> io::Result<()> {
    std::fs::rename(config_path(&this_node(), vmid), config_path(to, vmid))
}

fn hold(vmid: Vmid) -> Result<File, Failure> {
    let path = Path::new(LOCKS).join(format!("lock-{vmid}.conf"));
    let failed = |error: io::Error| {
        Failure::new(Code::LocalFile, format!("The lock {} cannot be had: {error}", path.display()))
    };
    std::fs::create_dir_all(LOCKS).map_err(failed)?;
    let until = Instant::now() + LOCK_TIMEOUT;
    loop {
        match try_lock(&path) {
            Ok(file) => return Ok(file),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() <= until => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            Err(error) => return Err(failed(error)),
        }
    }
}

/// Locks a file, which is made if need be, until what is returned is dropped. [`io::ErrorKind::WouldBlock`] if somebody else has it.
pub fn try_lock(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}
