//! VMs of Proxmox VE that `vmove-pve` moves, between two nodes in namespaces of their own. The test plays Proxmox VE, with its options of QEMU.
#![cfg(test)]

mod cut;
mod moves;
mod refused;
