//! What the source can tell by itself.

use vmove_memory::DirtyTracker;
use vmove_qmp::inspect::{BlockerKind, DeviceKind, VmFacts};

use super::Blocker;
use crate::proto::message::Disk;
use crate::spec::Mode;

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
        (BlockerKind::Disk, _) => "disk-not-shared",
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
