//! VMs of Proxmox VE: what `vmove-pve` asks at the destination of a move, and memory that nobody needs any more.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmove_migrate::domains::Carrier;
use vmove_pve::{Config, MEMORY, PID_FILES, Section, Vm, Vmid};
use vmove_types::libvirt::{DomainHookDone, DomainOperation};
use vmove_types::problem::{Code, Problem};
use vmove_types::proxmox::ProxmoxArrival;

use super::problem::IntoProblem;

/// Configurations of VMs, by node.
const NODES: &str = "/etc/pve/nodes";
/// How often ended VMs are looked for.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// Answers `vmove-pve`. Not before QEMU's own migration may begin.
pub async fn arrival(carrier: &Carrier, arrival: &ProxmoxArrival) -> Result<DomainHookDone, Problem> {
    let vmid: Vmid =
        arrival.vmid.to_string().parse().map_err(|error| Problem::from_error(Code::BadRequest, &error))?;
    let done = match arrival.operation {
        DomainOperation::Migrate => carrier.announce(&arrival.uuid, &vmid.name()).await.map(|()| None),
        DomainOperation::Started => carrier.started(&arrival.uuid, &vmid.monitor()).await,
    };
    let migration = done.map_err(IntoProblem::into_problem)?.map(|id| id.to_string());
    Ok(DomainHookDone { migration })
}

/// Looks after VMs of this node, for ever: warns of clones, and frees the memory of those that have ended. QEMU leaves its file of guest memory behind, and Proxmox VE knows nothing of it.
pub async fn look_after_vms() {
    let mut known = BTreeSet::new();
    loop {
        if let Ok(found) = tokio::task::spawn_blocking(clones).await {
            warn_of_clones(&mut known, found);
        }
        let looked = tokio::task::spawn_blocking(|| remove_left(Path::new(MEMORY), Path::new(PID_FILES)));
        for path in looked.await.unwrap_or_default() {
            tracing::info!(path = %path.display(), "freed the guest memory of a VM of Proxmox VE that has ended");
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// VMs of this node whose configuration names monitor and memory of another VM: (VM, the other one). Nothing of Proxmox VE hinders their start, with which
/// both would write to one memory.
pub fn clones() -> Vec<(Vmid, Vmid)> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let node = host.split('.').next().unwrap_or_default();
    clones_in(&Path::new(NODES).join(node).join("qemu-server"))
}

fn clones_in(folder: &Path) -> Vec<(Vmid, Vmid)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let copied = |path: PathBuf| {
        let vmid: Vmid = path.file_stem()?.to_str()?.parse().ok()?;
        let vm = Vm::new(vmid, Config::read(&std::fs::read_to_string(&path).ok()?));
        let of = [Section::Main, Section::Pending].map(|section| vm.copied_from(section).ok().flatten());
        Some((vmid, of.into_iter().flatten().next()?))
    };
    entries.filter_map(|entry| copied(entry.path())).collect()
}

/// Warns of each once.
fn warn_of_clones(known: &mut BTreeSet<(Vmid, Vmid)>, found: Vec<(Vmid, Vmid)>) {
    known.retain(|clone| found.contains(clone));
    for (vmid, of) in found {
        if known.insert((vmid, of)) {
            tracing::error!(
                vm = vmid.name(),
                "VM {vmid} was cloned from VM {of}, and would use its monitor and memory, which destroys both: run `vmove-pve enable {vmid}` before it is started"
            );
        }
    }
}

/// Removes the files of VMs of which no QEMU lives; their paths. QEMU writes its process id before it makes its memory, so files are listed first.
fn remove_left(memory: &Path, pid_files: &Path) -> Vec<PathBuf> {
    let entries: Vec<PathBuf> =
        std::fs::read_dir(memory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    let ended = |path: &PathBuf| {
        Vmid::of_memory(path).is_some_and(|vmid| !lives(&pid_files.join(format!("{vmid}.pid"))))
    };
    entries.into_iter().filter(ended).filter(|path| std::fs::remove_file(path).is_ok()).collect()
}

/// Whether the process of this file lives. A file that cannot be read tells nothing, so its process may live.
fn lives(pid_file: &Path) -> bool {
    match std::fs::read_to_string(pid_file) {
        Ok(text) => {
            // Empty while QEMU writes it.
            text.trim().parse::<u32>().map_or(true, |pid| Path::new(&format!("/proc/{pid}")).exists())
        }
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_ended_vms_is_freed_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let (memory, pids) = (folder.path().join("ram"), folder.path().join("run"));
        std::fs::create_dir_all(&memory).unwrap();
        std::fs::create_dir_all(&pids).unwrap();
        for name in ["100-64M", "101-64M", "102-64M", "103-64M", "notes", "x-64M", ".vmove-1-0"] {
            std::fs::write(memory.join(name), "").unwrap();
        }
        std::fs::write(pids.join("100.pid"), format!("{}\n", std::process::id())).unwrap();
        // Of a QEMU that was killed; no process has the highest number.
        std::fs::write(pids.join("101.pid"), "4194304\n").unwrap();
        std::fs::write(pids.join("102.pid"), "").unwrap();
        let mut removed = remove_left(&memory, &pids);
        removed.sort();
        assert_eq!(removed, [memory.join("101-64M"), memory.join("103-64M")]);
        for stays in ["100-64M", "102-64M", "notes", "x-64M", ".vmove-1-0"] {
            assert!(memory.join(stays).exists(), "{stays}");
        }
        assert_eq!(remove_left(&folder.path().join("none"), &pids), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_clone_that_nobody_has_enabled_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let vmid: Vmid = "100".parse().unwrap();
        let parent = Vm::new(vmid, Config::read("memory: 768\nname: web\n"));
        let enabled = parent.enabled(Section::Main).unwrap().text();
        for (name, text) in
            [("100.conf", enabled.as_str()), ("101.conf", &enabled), ("102.conf", "name: x\n"), ("notes", "")]
        {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let clone = ("101".parse().unwrap(), vmid);
        assert_eq!(clones_in(folder.path()), [clone]);
        let mended = Vm::new(clone.0, Config::read(&enabled)).enabled(Section::Main).unwrap().text();
        std::fs::write(folder.path().join("101.conf"), mended).unwrap();
        assert_eq!(clones_in(folder.path()), []);
    }
}
