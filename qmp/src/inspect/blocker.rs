//! What of a guest cannot be moved, all at once.

use serde::{Deserialize, Serialize};

use super::{DeviceKind, PageKind, VmFacts};

/// Kind of a blocker, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum BlockerKind {
    /// RAM is no shared named file on tmpfs or hugetlbfs.
    Ram,
    /// Someone else writes guest RAM.
    OutsideWriter,
    /// A disk that the destination cannot see.
    Disk,
    /// A disk that comes through a socket of this host.
    DiskSocket,
    /// A device that belongs to this host.
    HostDevice,
    /// The CPU model is that of this host.
    Cpu,
    /// QEMU itself refuses.
    Qemu,
    /// The guest's run state.
    RunState,
}

/// One reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Blocker {
    /// Kind, for programs.
    pub kind: BlockerKind,
    /// What it is about: an id, a node name, a path.
    pub subject: String,
    /// For people: what was found, what is needed.
    pub message: String,
    /// False: the move is possible, but the operator should know.
    pub fatal: bool,
}

impl VmFacts {
    /// Everything that stands in the way of a move, as far as this side can tell.
    #[must_use]
    pub fn blockers(&self) -> Vec<Blocker> {
        let mut found = Vec::new();
        let mut add = |kind, subject: &str, fatal, message: String| {
            found.push(Blocker { kind, subject: subject.to_owned(), message, fatal });
        };
        self.ram_blockers(&mut add);
        self.device_blockers(&mut add);
        self.disk_blockers(&mut add);
        if matches!(self.cpu.as_deref(), Some("host" | "max")) && self.accelerator == "kvm" {
            let model = self.cpu.as_deref().unwrap_or_default();
            let message = format!(
                "CPU model {model} is whatever this host has: the destination must have the same CPU, \
                 or the guest may crash there; a named model is safe"
            );
            add(BlockerKind::Cpu, model, false, message);
        }
        for reason in &self.qemu_blockers {
            add(BlockerKind::Qemu, "qemu", true, format!("QEMU will not migrate this guest: {reason}"));
        }
        if !matches!(self.status.as_str(), "running" | "paused" | "prelaunch" | "suspended") {
            let message = format!("The guest is in run state {}, it must be running or paused", self.status);
            add(BlockerKind::RunState, &self.status, true, message);
        }
        found
    }

    fn ram_blockers(&self, add: &mut impl FnMut(BlockerKind, &str, bool, String)) {
        if self.ram.is_empty() {
            let message = "Guest RAM is private to QEMU: it must be -object memory-backend-file,share=on \
                           on tmpfs or hugetlbfs, with -machine memory-backend= (vmove run does that)";
            add(BlockerKind::Ram, "ram", true, message.to_owned());
        }
        for ram in self.ram.iter().filter(|ram| !ram.movable()) {
            let id = ram.id.as_deref().unwrap_or("ram");
            let found = match (ram.share, ram.pages) {
                _ if ram.kind != "memory-backend-file" => format!("is {}", ram.kind),
                (false, _) => "is not shared (share=off)".to_owned(),
                (true, PageKind::Anonymous) => {
                    "is in a file without a name (mem-path is a directory)".to_owned()
                }
                _ => "is in a file on a disk".to_owned(),
            };
            let message = format!(
                "Memory back end {id} {found}: it must be memory-backend-file,share=on with mem-path= \
                 a file on tmpfs or hugetlbfs"
            );
            add(BlockerKind::Ram, id, true, message);
        }
    }

    fn device_blockers(&self, add: &mut impl FnMut(BlockerKind, &str, bool, String)) {
        for device in &self.devices {
            let name = format!("Device {} ({})", device.id, device.driver);
            let (kind, fatal, message) = match device.kind {
                DeviceKind::VhostUser | DeviceKind::Vfio | DeviceKind::Vdpa | DeviceKind::Ivshmem => (
                    BlockerKind::OutsideWriter,
                    true,
                    format!(
                        "{name} has guest RAM written from outside QEMU: detach it (device_del) before the move"
                    ),
                ),
                DeviceKind::HostBound => (
                    BlockerKind::HostDevice,
                    true,
                    format!("{name} belongs to this host: detach it (device_del) before the move"),
                ),
                DeviceKind::VirtioMem | DeviceKind::Pmem => (
                    BlockerKind::Ram,
                    true,
                    format!("{name} has memory of its own that vmove does not move: detach it (device_del)"),
                ),
                DeviceKind::Balloon => continue,
            };
            add(kind, &device.id, fatal, message);
        }
        for netdev in &self.netdevs {
            if matches!(netdev.kind.as_str(), "vhost-user" | "vhost-vdpa") {
                let message = format!(
                    "Network back end {} is {}: another process or device writes guest RAM; detach its NIC, or use a tap",
                    netdev.id, netdev.kind
                );
                add(BlockerKind::OutsideWriter, &netdev.id, true, message);
            }
        }
    }

    fn disk_blockers(&self, add: &mut impl FnMut(BlockerKind, &str, bool, String)) {
        for block in &self.block {
            if block.by_socket() {
                let message = format!(
                    "Disk {} ({}) comes through a socket of this host, as that of a child of a fork from another node: move the disk \
                     along (--disks), or give the guest an image of its own first (vmove move-disk)",
                    block.node, block.file
                );
                add(BlockerKind::DiskSocket, &block.node, true, message);
                continue;
            }
            let fs = block.fs.as_deref().unwrap_or("unknown");
            match (block.shared, block.read_only) {
                (Some(false), read_only) => {
                    let message = format!(
                        "Disk {} ({}) is on {fs}, which only this host sees: put it on shared storage{}",
                        block.node,
                        block.file,
                        if read_only { ", or the same file at the same path there" } else { "" }
                    );
                    // A read-only image may well be installed on both hosts.
                    add(BlockerKind::Disk, &block.node, !read_only, message);
                }
                (None, _) => {
                    let message = format!(
                        "Disk {} ({}): make sure that the destination has the same device under this path",
                        block.node, block.file
                    );
                    add(BlockerKind::Disk, &block.node, false, message);
                }
                (Some(true), _) => {}
            }
            if block.direct_io {
                let message = format!(
                    "Disk {} ({}) bypasses the page cache: pages under DMA can change unseen until the guest stops, \
                     so dirty tracking is only armed while it is stopped and drained",
                    block.node, block.file
                );
                add(BlockerKind::Disk, &block.node, false, message);
            }
        }
    }
}
