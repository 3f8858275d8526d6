//! What every session of a daemon shares.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::disk_holds::DiskMoves;
use crate::past::Past;
use crate::visits::Visits;
use crate::vmm::Vmm;
use vmove_node::admission::Admission;
use vmove_node::devices::Devices;
use vmove_node::disk::Disk;
use vmove_node::latency::Latencies;
use vmove_node::layout::{self, memory_dir};
use vmove_node::peer::{Dialer, PeerPolicy};
use vmove_node::record::VmRecord;
use vmove_node::reservations::Reservations;
use vmove_node::store::{VmStore, VmStoreError};
use vmove_qmp::RunLayout;
use vmove_qmp::confine::Confinement;
use vmove_types::Backing;

/// Settings of the engine.
pub struct EngineConfig {
    /// Name of this node.
    pub node: String,
    /// Journals and page maps of sessions.
    pub sessions_dir: PathBuf,
    /// Runtime folders of VMs (`vm_dir` is made below it).
    pub run_dir: PathBuf,
    /// RAM files of VMs, by backing, are made below it.
    pub memory_dir: PathBuf,
    /// Memory that guests on their way here were promised, shared with the rest of the daemon.
    pub reservations: Arc<Reservations>,
    /// With which rights QEMUs run here.
    pub confinement: Confinement,
    /// What other nodes may do here.
    pub peers: Arc<PeerPolicy>,
    /// Which VMs this node takes.
    pub admission: Arc<dyn Admission>,
    /// QEMUs of this node.
    pub vmm: Arc<dyn Vmm>,
    /// Devices of this node that VMs own.
    pub devices: Arc<dyn Devices>,
    /// Journals are on it, and what is made and removed beside guest memory.
    pub disk: Arc<dyn Disk>,
    /// Opens connections to peers.
    pub dialer: Arc<dyn Dialer>,
    /// Port by which peers reach this node. `None`: they cannot, and no guest comes back to it by itself.
    pub port: Option<u16>,
    /// Bulk connections per session.
    pub bulk_connections: u8,
    /// How long a session that lost its peer after the hand-over goes on trying.
    pub reconnect_for: Duration,
    /// Migrations of the past that are remembered; older ones are forgotten once nobody can ask for them.
    pub keep_migrations: usize,
}

impl std::fmt::Debug for EngineConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineConfig").field("node", &self.node).finish_non_exhaustive()
    }
}

/// Settings and registry of this daemon.
#[derive(Debug)]
pub(crate) struct Node {
    pub config: EngineConfig,
    pub vms: Arc<VmStore>,
    /// Of all guests that came here in the life of this process.
    pub fault_latencies: Arc<Latencies>,
    /// What earlier migrations to each node have measured.
    pub past: Arc<Past>,
    /// Guests that came for a visit.
    pub visits: Visits,
    /// Disks that get other images on this node.
    pub disk_moves: DiskMoves,
}

impl Node {
    /// Where a VM's files are here.
    pub(crate) fn layout(&self, name: &str, backing: Backing) -> RunLayout {
        let config = &self.config;
        layout::of_vm(&config.run_dir, &config.memory_dir, name, backing, &config.confinement)
    }

    /// The disk that journals are on.
    pub(crate) fn disk(&self) -> &dyn Disk {
        &*self.config.disk
    }

    /// Folder of a session's journal.
    pub(crate) fn session_dir(&self, id: impl std::fmt::Display) -> PathBuf {
        self.config.sessions_dir.join(id.to_string())
    }

    /// Journal of a session to here.
    pub(crate) fn destination_journal(&self, id: impl std::fmt::Display) -> PathBuf {
        self.session_dir(id).join("destination.jsonl")
    }

    /// Whether an operator has ended a VM of a migration whose journal could not be written then: its QEMU has ended, and its record is
    /// gone. The record of one that ended by itself stays as long as a migration holds it.
    pub(crate) fn was_ended(&self, vm: &VmRecord) -> bool {
        if vm.libvirt.is_some() {
            // libvirt ends it when the guest has left: that is no operator's word.
            return false;
        }
        let gone = match self.vms.get(&vm.name) {
            Ok(found) => (found.pid, found.pid_start) != (vm.pid, vm.pid_start),
            Err(error) => matches!(error, VmStoreError::Unknown(_)),
        };
        gone && !self.config.vmm.is_there(vm)
    }

    /// Page maps live on tmpfs, beside guest memory: writing one must never wait for a disk.
    pub(crate) fn page_map_dir(&self) -> PathBuf {
        memory_dir(&self.config.memory_dir, Backing::Thp)
    }
}
