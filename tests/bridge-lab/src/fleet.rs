//! Fleets and requests that are made up.

use std::sync::Arc;

use sched_bridge::model::{
    ClusterName, Device, DeviceKind, Fleet, HugePages, LinkLayer, MemoryMib, Node, NodeName, NumaId,
    NumaNode, PciAddress, PciId, PciRoot, Port, SocketId, SwitchName,
};
use sched_bridge::place::{Alternative, ClusterRequest, DeviceFilter, DeviceNeed, VmGroup};
use sched_bridge::topology::{Builder, Origin, Style, SwitchSpec};

/// A fleet of equal nodes below a tree of switches.
#[derive(Debug, Clone)]
pub struct FleetSpec {
    /// Nodes.
    pub nodes: u32,
    /// Nodes below each leaf switch.
    pub per_leaf: u32,
    /// Switches below each switch, from the leaves up; one root is above the last of them.
    pub fan_in: Vec<u32>,
    /// GPUs of each node, one half on each of two sockets; each with an adapter below the same PCIe root.
    pub gpus: u32,
    /// Hardware threads of each socket.
    pub cores: u32,
    /// Memory of each socket.
    pub memory: MemoryMib,
}

impl FleetSpec {
    /// Three levels of switches, 32 nodes below a leaf, 16 leaves below a spine, 8 GPUs in a node.
    #[must_use]
    pub fn three_levels(nodes: u32) -> Self {
        Self { nodes, per_leaf: 32, fan_in: vec![16], gpus: 8, cores: 64, memory: MemoryMib(1 << 20) }
    }

    /// The fleet, all of it free.
    ///
    /// # Errors
    /// None in practice: generated names are valid and unique.
    pub fn build(&self) -> anyhow::Result<Fleet> {
        let width = self.nodes.max(1).to_string().len();
        let mut nodes = Vec::with_capacity(self.nodes as usize);
        for number in 0..self.nodes {
            nodes.push(self.node(NodeName::new(format!("n{number:0width$}"))?));
        }
        let mut builder = Builder::new();
        let mut level: Vec<SwitchName> = Vec::new();
        for (number, below) in nodes.chunks(self.per_leaf.max(1) as usize).enumerate() {
            let mut leaf = switch(1, number)?;
            leaf.nodes = below.iter().map(|node| node.name.clone()).collect();
            level.push(leaf.name.clone());
            builder.add(leaf, Origin::default());
        }
        for (height, fan_in) in (2..).zip(self.fan_in.iter().copied().chain([u32::MAX])) {
            let mut above = Vec::new();
            for (number, below) in level.chunks(fan_in.max(1) as usize).enumerate() {
                let mut upper = switch(height, number)?;
                upper.switches = below.to_vec();
                above.push(upper.name.clone());
                builder.add(upper, Origin::default());
            }
            level = above;
        }
        Ok(Fleet::new(nodes, builder.build(Style::Tree)?)?)
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
        for number in 0..self.gpus {
            let bus = u8::try_from(number % 120 * 2 + 1).unwrap_or(0);
            let numa = NumaId(u16::from(number >= self.gpus.div_ceil(2)));
            node.devices.extend(gpu_and_adapter(bus, numa));
        }
        node
    }
}

/// A GPU and an adapter on two buses below one PCIe root.
fn gpu_and_adapter(bus: u8, numa: NumaId) -> [Device; 2] {
    let root = PciRoot(format!("pci0000:{bus:02x}").into());
    let device = |bus, kind, id, arch: &str| {
        let address = PciAddress { domain: 0, bus, device: 0, function: 0 };
        let mut device = Device::new(address, kind, id);
        (device.arch, device.numa, device.root) = (Arc::from(arch), Some(numa), Some(root.clone()));
        device
    };
    let gpu = device(bus, DeviceKind::Gpu, PciId { vendor: 0x10de, device: 0x2330 }, "hopper");
    let mut adapter =
        device(bus + 1, DeviceKind::Hca, PciId { vendor: 0x15b3, device: 0x1021 }, "connectx-7");
    adapter.ports.push(Port {
        number: 1,
        active: true,
        state: "ACTIVE".to_owned(),
        rate_gbps: 400,
        link_layer: LinkLayer::InfiniBand,
        lid: 0,
        guid: None,
    });
    [gpu, adapter]
}

fn switch(height: u32, number: usize) -> anyhow::Result<SwitchSpec> {
    Ok(SwitchSpec::new(SwitchName::new(format!("s{height}-{number}"))?))
}

/// A cluster of `vms` equal VMs with so many GPUs and adapters each.
///
/// # Panics
/// If the name is not valid.
#[must_use]
pub fn gpu_cluster(name: &str, vms: u32, gpus: u32, adapters: u32) -> ClusterRequest {
    let need = |kind, count| DeviceNeed { count, filter: DeviceFilter::kind(kind) };
    let mut devices = Vec::new();
    if gpus > 0 {
        devices.push(need(DeviceKind::Gpu, gpus));
    }
    if adapters > 0 {
        devices.push(need(DeviceKind::Hca, adapters));
    }
    let memory = MemoryMib(16384);
    cluster(name, vms, Alternative { vcpus: 4 * gpus.max(1), memory, devices, ..Alternative::default() })
}

/// A cluster of `vms` VMs with 8 GPUs each, so that each fills a node of [`test_servers::SlurmCluster`].
///
/// # Panics
/// If the name is not valid.
#[must_use]
pub fn whole_nodes(name: &str, vms: u32) -> ClusterRequest {
    let gpus = DeviceNeed { count: 8, filter: DeviceFilter::kind(DeviceKind::Gpu) };
    let memory = MemoryMib(1024);
    cluster(name, vms, Alternative { vcpus: 8, memory, devices: vec![gpus], ..Alternative::default() })
}

fn cluster(name: &str, vms: u32, needs: Alternative) -> ClusterRequest {
    let group = VmGroup { name: "vm".to_owned(), count: vms, alternatives: vec![needs] };
    ClusterRequest::new(ClusterName::new(name).expect("a valid name"), vec![group])
}
