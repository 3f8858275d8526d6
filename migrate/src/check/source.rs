//! What the source can tell by itself.

use vmove_memory::{DirtyTracker, MemoryError};
use vmove_qmp::inspect::{BlockerKind, DeviceKind, VmFacts};

use crate::vmm::Vmm;
use vmove_node::guest_devices::fit::leaves_with;
use vmove_node::record::VmRecord;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::device::VmDevice;
use vmove_types::spec::Mode;

/// Blockers that do not depend on where the guest goes. Disks are judged by the destination, which sees them or not.
/// `owned`: devices that the guest lets go before.
pub(crate) fn blockers(facts: &VmFacts, owned: &[VmDevice]) -> Vec<Blocker> {
    let fatal = facts
        .blockers()
        .into_iter()
        .filter(|b| b.fatal && b.kind != BlockerKind::Disk && !leaves_with(b, owned));
    let mut found: Vec<Blocker> = fatal
        .map(|b| {
            let device = facts.devices.iter().find(|d| d.id == b.subject).map(|d| d.kind);
            Blocker::new(code(b.kind, device), b.message).about(b.subject)
        })
        .collect();
    if let Err(why) = DirtyTracker::supported() {
        found.push(
            Blocker::new(BlockerCode::NoPagemapScan, why.to_string())
                .only_for(&[Mode::Precopy, Mode::Hybrid]),
        );
    }
    found
}

/// A guest whose memory is private, as after a fork: what it has written is in none of its RAM files, and a destination would
/// get what it had at the fork.
pub(crate) fn private_ram(vmm: &dyn Vmm, vm: &VmRecord) -> Result<Option<Blocker>, MemoryError> {
    if vmm.shares_memory(vm)? {
        return Ok(None);
    }
    let message = format!(
        "The memory of {:?} is private since a fork: `vmove migrate` first gives it memory of its own, as `vfork promote` does; \
         that copies all of it",
        vm.name
    );
    Ok(Some(Blocker::new(BlockerCode::PrivateRam, message).about(&vm.name)))
}

const fn code(kind: BlockerKind, device: Option<DeviceKind>) -> BlockerCode {
    match (kind, device) {
        (BlockerKind::Ram, _) => BlockerCode::RamNotShared,
        (BlockerKind::OutsideWriter, Some(DeviceKind::Vfio)) => BlockerCode::Vfio,
        (BlockerKind::OutsideWriter, Some(DeviceKind::Ivshmem)) => BlockerCode::Ivshmem,
        (BlockerKind::OutsideWriter, Some(DeviceKind::Vdpa)) => BlockerCode::Vdpa,
        (BlockerKind::OutsideWriter, _) => BlockerCode::VhostUser,
        (BlockerKind::HostDevice, _) => BlockerCode::HostDevice,
        (BlockerKind::Cpu, _) => BlockerCode::CpuModel,
        (BlockerKind::RunState, _) => BlockerCode::RunState,
        (BlockerKind::Qemu, _) => BlockerCode::QemuRefuses,
        (BlockerKind::Disk | BlockerKind::DiskSocket, _) => BlockerCode::DiskNotShared,
        _ => BlockerCode::Other,
    }
}

/// What is no blocker but should be known.
pub(crate) fn warnings(facts: &VmFacts) -> Vec<String> {
    facts.blockers().into_iter().filter(|b| !b.fatal).map(|b| b.message).collect()
}
