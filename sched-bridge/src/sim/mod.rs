//! Fleets that do not exist, for tests, measurements and what-if questions.

mod churn;
mod plot;
mod slurm;

pub use churn::{Churn, Event};
pub use plot::plot;
pub use slurm::{SlurmTree, slurm_nodes};

use std::sync::Arc;

use crate::model::{
    Device, DeviceKind, Fleet, HugePages, LinkLayer, MemoryMib, Node, NodeName, NumaId, NumaNode, PciAddress,
    PciId, PciRoot, Port, SocketId, SwitchName,
};
use crate::place::{Alternative, ClusterRequest, Compactness, DeviceFilter, DeviceNeed, VmGroup};
use crate::topology::{Builder, Origin, Style, SwitchSpec, TopologyError};

/// Random numbers that are the same everywhere (xorshift64*, Vigna 2016).
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// From a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`; 0 if that is 0.
    pub fn below(&mut self, bound: u32) -> u32 {
        let high = self.next_u64() >> 32;
        u32::try_from((high * u64::from(bound)) >> 32).unwrap_or(0)
    }

    /// True `percent` times of a hundred.
    pub fn chance(&mut self, percent: u32) -> bool {
        self.below(100) < percent
    }
}

/// A fleet of alike nodes below a tree of switches.
#[derive(Debug, Clone)]
pub struct FleetSpec {
    /// Nodes.
    pub nodes: u32,
    /// Nodes below each leaf switch.
    pub per_leaf: u32,
    /// Switches below each switch, from the leaves up; over the last there is one root.
    pub fan_in: Vec<u32>,
    /// GPUs of each node, in halves on two sockets; each with an adapter below the same PCIe root.
    pub gpus: u32,
    /// Hardware threads of each socket.
    pub cores: u32,
    /// Memory of each socket.
    pub memory: MemoryMib,
}

impl FleetSpec {
    /// Three switch levels, 32 nodes below a leaf, 16 leaves below a spine, 8 GPUs in a node.
    #[must_use]
    pub fn three_levels(nodes: u32) -> Self {
        Self { nodes, per_leaf: 32, fan_in: vec![16], gpus: 8, cores: 64, memory: MemoryMib(1 << 20) }
    }

    /// The fleet, all of it free.
    ///
    /// # Errors
    /// None in practice: names are made to be unique.
    pub fn build(&self) -> Result<Fleet, TopologyError> {
        let mut nodes = Vec::with_capacity(self.nodes as usize);
        let width = self.nodes.max(1).to_string().len();
        for at in 0..self.nodes {
            let name = NodeName::new(format!("n{at:0width$}"))
                .map_err(|error| TopologyError::syntax(0, error.to_string(), "a name"))?;
            nodes.push(self.node(name));
        }
        let mut builder = Builder::new();
        let mut level: Vec<SwitchName> = Vec::new();
        for (at, below) in nodes.chunks(self.per_leaf.max(1) as usize).enumerate() {
            let mut spec = switch(1, at)?;
            spec.nodes = below.iter().map(|node| node.name.clone()).collect();
            level.push(spec.name.clone());
            builder.add(spec, Origin::default());
        }
        for (height, fan_in) in (2..).zip(self.fan_in.iter().copied().chain([u32::MAX])) {
            let mut above = Vec::new();
            for (at, below) in level.chunks(fan_in.max(1) as usize).enumerate() {
                let mut spec = switch(height, at)?;
                spec.switches = below.to_vec();
                above.push(spec.name.clone());
                builder.add(spec, Origin::default());
            }
            level = above;
        }
        let topology = builder.build(Style::Tree)?;
        Fleet::new(nodes, topology)
            .map_err(|error| TopologyError::syntax(0, error.to_string(), "unique names"))
    }

    fn node(&self, name: NodeName) -> Node {
        let mut node = Node::plain(name, 0, MemoryMib(0));
        let numa = |id| NumaNode {
            id: NumaId(id),
            socket: SocketId(id),
            cores: self.cores,
            memory: self.memory,
            huge: HugePages::default(),
        };
        node.numa = vec![numa(0), numa(1)];
        node.cpu.arch = Arc::from("x86_64");
        node.hypervisors.insert(Arc::from("kvm"));
        for at in 0..self.gpus {
            let bus = u8::try_from(at % 120 * 2 + 1).unwrap_or(0);
            let side = NumaId(u16::from(at >= self.gpus.div_ceil(2)));
            let root = Some(PciRoot(format!("pci0000:{bus:02x}").into()));
            let gpu = PciAddress { domain: 0, bus, device: 0, function: 0 };
            let mut gpu = Device::new(gpu, DeviceKind::Gpu, PciId { vendor: 0x10de, device: 0x2330 });
            (gpu.arch, gpu.numa, gpu.root) = (Arc::from("hopper"), Some(side), root.clone());
            let nic = PciAddress { domain: 0, bus: bus + 1, device: 0, function: 0 };
            let mut nic = Device::new(nic, DeviceKind::Hca, PciId { vendor: 0x15b3, device: 0x1021 });
            (nic.arch, nic.numa, nic.root) = (Arc::from("connectx-7"), Some(side), root);
            nic.ports.push(Port {
                number: 1,
                active: true,
                state: "ACTIVE".to_owned(),
                rate_gbps: 400,
                link_layer: LinkLayer::InfiniBand,
                lid: 0,
                guid: None,
            });
            node.devices.extend([gpu, nic]);
        }
        node
    }
}

fn switch(height: u32, at: usize) -> Result<SwitchSpec, TopologyError> {
    let name = SwitchName::new(format!("s{height}-{at}"));
    name.map(SwitchSpec::new).map_err(|error| TopologyError::syntax(0, error.to_string(), "a name"))
}

/// A cluster of alike VMs with so many GPUs and adapters each.
///
/// # Panics
/// If the name is no name.
#[must_use]
pub fn gpu_cluster(name: &str, vms: u32, gpus: u32, hcas: u32) -> ClusterRequest {
    let need = |kind, count| DeviceNeed { count, filter: DeviceFilter::kind(kind) };
    let mut devices = Vec::new();
    if gpus > 0 {
        devices.push(need(DeviceKind::Gpu, gpus));
    }
    if hcas > 0 {
        devices.push(need(DeviceKind::Hca, hcas));
    }
    let alternative =
        Alternative { vcpus: 4 * gpus.max(1), memory: MemoryMib(16384), devices, ..Alternative::default() };
    ClusterRequest {
        name: crate::model::ClusterName::new(name).expect("a literal name"),
        groups: vec![VmGroup { name: "vm".to_owned(), count: vms, alternatives: vec![alternative] }],
        compactness: Compactness::default(),
        anti_affinity: None,
        near: None,
        only_nodes: <_>::default(),
        not_nodes: <_>::default(),
    }
}
