//! What the source can tell by itself.

use vmove_memory::{DirtyTracker, Process, RamFile, is_shared_whole};
use vmove_qmp::inspect::{BlockerKind, DeviceKind, VmFacts};

use super::Blocker;
use crate::destination::chain;
use crate::proto::message::Disk;
use crate::spec::Mode;
use crate::vm::VmRecord;

/// Blockers that do not depend on where the guest goes. Disks are judged by the destination, which sees them or not.
pub(crate) fn blockers(facts: &VmFacts) -> Vec<Blocker> {
    let fatal = facts.blockers().into_iter().filter(|b| b.fatal && b.kind != BlockerKind::Disk);
    let mut found: Vec<Blocker> = fatal
        .map(|b| {
            let device = facts.devices.iter().find(|d| d.id == b.subject).map(|d| d.kind);
            Blocker::new(code(b.kind, device), b.message).about(b.subject)
        })
        .collect();
    if let Err(why) = DirtyTracker::supported() {
        found.push(Blocker::new("no-pagemap-scan", why.to_string()).only_for(&[Mode::Precopy, Mode::Hybrid]));
    }
    found
}

/// A guest whose memory is private, as after a fork: what it has written is in none of its RAM files, and a destination would
/// get what it had at the fork.
pub(crate) fn private_ram(vm: &VmRecord) -> Result<Option<Blocker>, String> {
    let process = Process::reopen(vm.pid.unsigned_abs(), vm.pid_start).map_err(|e| chain(&e))?;
    let files: Vec<RamFile> =
        vm.ram.iter().map(|ram| RamFile::open(&ram.path)).collect::<Result<_, _>>().map_err(|e| chain(&e))?;
    if is_shared_whole(&process, &files.iter().collect::<Vec<_>>()).map_err(|e| chain(&e))? {
        return Ok(None);
    }
    let message = format!(
        "The memory of {:?} is private since a fork: `vfork promote` gives it memory of its own (`vmove migrate` does that \
         by itself)",
        vm.name
    );
    Ok(Some(Blocker::new("private-ram", message).about(&vm.name)))
}

fn code(kind: BlockerKind, device: Option<DeviceKind>) -> &'static str {
    match (kind, device) {
        (BlockerKind::Ram, _) => "ram-not-shared",
        (BlockerKind::OutsideWriter, Some(DeviceKind::Vfio)) => "vfio",
        (BlockerKind::OutsideWriter, Some(DeviceKind::Ivshmem)) => "ivshmem",
        (BlockerKind::OutsideWriter, Some(DeviceKind::Vdpa)) => "vdpa",
        (BlockerKind::OutsideWriter, _) => "vhost-user",
        (BlockerKind::HostDevice, _) => "host-device",
        (BlockerKind::Cpu, _) => "cpu-model",
        (BlockerKind::RunState, _) => "run-state",
        (BlockerKind::Qemu, _) => "qemu-refuses",
        (BlockerKind::Disk | BlockerKind::DiskSocket, _) => "disk-not-shared",
        _ => "other",
    }
}

/// What is no blocker but should be known.
pub(crate) fn warnings(facts: &VmFacts) -> Vec<String> {
    facts.blockers().into_iter().filter(|b| !b.fatal).map(|b| b.message).collect()
}

/// The disks the destination must see.
pub(crate) fn disks(facts: &VmFacts) -> Vec<Disk> {
    let disk = |b: &vmove_qmp::inspect::BlockFact| Disk {
        node: b.node.clone(),
        path: b.file.clone(),
        size: std::fs::metadata(&b.file).map_or(0, |m| m.len()),
        read_only: b.read_only,
        shared: b.shared,
        fs: b.fs.clone().unwrap_or_default(),
    };
    // Only files have paths that can be looked at; network disks name themselves the same everywhere.
    facts.block.iter().filter(|b| b.file.starts_with('/')).map(disk).collect()
}
