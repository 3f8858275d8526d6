//! What the destination finds when a guest of libvirt's is to come: libvirt has started its QEMU, and has looked at disks, networks and devices.

use vmove_node::peer::negotiate;
use vmove_qmp::CommandLine;
use vmove_qmp::confine::LockedMemory;
use vmove_types::check::{Blocker, BlockerCode};

use crate::node::Node;
use crate::proto::message::Prepare;

/// All that stands in the way.
pub(super) fn blockers(node: &Node, prepare: &Prepare, domain: &str) -> Vec<Blocker> {
    let other = |message: String| Blocker::new(BlockerCode::Other, message).about(&prepare.vm);
    let Some(waits) = node.config.vmm.expected(domain) else {
        let message = format!(
            "No QEMU of libvirt or Proxmox VE waits on {} for domain {domain}: `virsh migrate` or `vmove-pve move` begins such a migration",
            node.config.node
        );
        return vec![other(message)];
    };
    let mut found = Vec::new();
    if let Err(why) = negotiate(&prepare.fabrics, &node.config.dialer.fabrics()) {
        found.push(Blocker::new(BlockerCode::NoCommonFabric, why.to_string()));
    }
    if waits.backing != prepare.backing {
        found.push(other(format!(
            "Guest memory is {} at the source and {} on {}: have it on the same kind of mount on both hosts (libvirt: memory_backing_dir of qemu.conf; Proxmox VE: `vmove-pve host`)",
            prepare.backing, waits.backing, node.config.node
        )));
    }
    for block in &prepare.blocks {
        if !waits.ram.iter().any(|ram| ram.id == block.id && ram.size == block.size) {
            let (id, bytes) = (&block.id, block.size);
            found.push(other(format!("The QEMU that waits has no RAM block {id} of {bytes} bytes")));
        }
    }
    let argv = waits.command_line.iter().map(Into::into).collect();
    if CommandLine::parse(argv).is_ok_and(|line| line.locked_memory() != LockedMemory::Usual) {
        let message =
            "<locked/> is set: a QEMU of libvirt's that locks its memory cannot be filled from outside";
        found.push(Blocker::new(BlockerCode::MemoryLocked, message).about(&prepare.vm));
    }
    found
}
