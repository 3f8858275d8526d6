//! Small random fleets and requests, and a search that tries everything.
#![allow(dead_code, reason = "each test uses a part")]

pub mod brute;

use std::sync::Arc;

use rand::Rng;
use rand::rngs::StdRng;
use sched_bridge::model::*;
use sched_bridge::place::*;
use sched_bridge::topology::{Builder, Origin, Style, SwitchName, SwitchSpec, Topology};

pub fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

/// Up to `most` nodes below a random forest; now and then nodes right below higher switches, or below none.
pub fn random_topology(rng: &mut StdRng, nodes: u32) -> Topology {
    let leaves = rng.random_range(1..=3);
    let mut specs: Vec<SwitchSpec> =
        (0..leaves).map(|at| SwitchSpec::new(SwitchName::new(format!("l{at}")).unwrap())).collect();
    let uneven = rng.random_bool(0.3);
    let mut level: Vec<usize> = (0..specs.len()).collect();
    let mut number = 0;
    while level.len() > 1 {
        let mut above = Vec::new();
        for chunk in level.chunks(2) {
            let mut spec = SwitchSpec::new(SwitchName::new(format!("u{number}")).unwrap());
            number += 1;
            spec.switches = chunk.iter().map(|at| specs[*at].name.clone()).collect();
            above.push(specs.len());
            specs.push(spec);
        }
        level = above;
        if rng.random_bool(0.1) {
            break;
        }
    }
    for at in 0..nodes {
        if rng.random_bool(0.04) {
            continue;
        }
        let choices = if uneven { u32::try_from(specs.len()).unwrap() } else { leaves };
        let to = rng.random_range(0..choices) as usize;
        specs[to].nodes.push(name(&format!("n{at}")));
    }
    let mut builder = Builder::new();
    for spec in specs {
        builder.add(spec, Origin::default());
    }
    builder.build(Style::Tree).unwrap()
}

pub fn device(bus: u8, kind: DeviceKind, numa: u16, root: u16) -> Device {
    let address = PciAddress { domain: 0, bus, device: 0, function: 0 };
    let mut device = Device::new(address, kind, PciId { vendor: 0x10de, device: 1 });
    device.numa = Some(NumaId(numa));
    device.root = Some(PciRoot(Arc::from(format!("r{root}"))));
    device.arch = Arc::from(if bus.is_multiple_of(5) { "fermi" } else { "hopper" });
    device
}

/// Divides the first GPU, if there is one.
fn divide_a_gpu(rng: &mut StdRng, node: &mut Node) {
    let Some(gpu) = node.devices.iter().find(|device| device.kind == DeviceKind::Gpu).cloned() else {
        return;
    };
    for number in 0..rng.random_range(1..3) {
        let parent = gpu.address.pci().unwrap();
        let mut share = gpu.clone();
        share.kind = DeviceKind::MigSlice;
        share.address = DeviceAddress::Slice { gpu: parent, gpu_instance: number, compute_instance: 0 };
        share.parent = Some(parent);
        node.devices.push(share);
    }
}

/// A node with up to three GPUs, of which one may be divided, and three adapters on two sockets.
pub fn random_node(rng: &mut StdRng, at: u32) -> Node {
    let mut node = Node::plain(name(&format!("n{at}")), 0, MemoryMib(0));
    node.numa = (0..2)
        .map(|id| NumaNode {
            id: NumaId(id),
            socket: SocketId(id),
            cores: rng.random_range(0..4),
            memory: MemoryMib(rng.random_range(0..4) * 1024),
            huge: HugePages::default(),
        })
        .collect();
    let mut bus = 0;
    for kind in [DeviceKind::Gpu, DeviceKind::Hca] {
        for _ in 0..rng.random_range(0..4) {
            bus += 1;
            let root = rng.random_range(0..4);
            node.devices.push(device(bus, kind, root / 2, root));
        }
    }
    if rng.random_bool(0.35) {
        divide_a_gpu(rng, &mut node);
    }
    if rng.random_bool(0.05) {
        node.state = NodeState::Drained;
    }
    if rng.random_bool(0.7) {
        node.hypervisors.insert(Arc::from("kvm"));
    }
    node
}

pub fn random_fleet(rng: &mut StdRng, most: u32) -> Fleet {
    let nodes = rng.random_range(1..=most);
    let topology = random_topology(rng, nodes);
    let nodes = (0..nodes).map(|at| random_node(rng, at)).collect();
    Fleet::new(nodes, topology).unwrap()
}

/// Takes some devices and cores away.
pub fn random_use(rng: &mut StdRng, fleet: &Fleet) -> Occupancy {
    let mut used = Occupancy::new(fleet);
    for node in fleet.nodes() {
        if !rng.random_bool(0.4) {
            continue;
        }
        for device in node.devices.iter().filter(|_| rng.random_bool(0.3)) {
            let devices = vec![Granted { address: device.address, kind: device.kind }];
            let vm = VmName::new("old").unwrap();
            let one = Assignment { vm, node: node.name.clone(), devices, shares: Vec::new() };
            match used.take(fleet, &one) {
                Ok(()) | Err(OccupancyError::Divided { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
    used
}

fn random_alternative(rng: &mut StdRng) -> Alternative {
    let mut need = |kind, most| {
        let mut filter = DeviceFilter::kind(kind);
        if rng.random_bool(0.15) {
            filter.archs.insert("hopper".to_owned());
        }
        DeviceNeed { count: rng.random_range(0..most), filter }
    };
    let mut devices = vec![need(DeviceKind::Gpu, 3), need(DeviceKind::Hca, 3)];
    let slices = need(DeviceKind::MigSlice, 3);
    if rng.random_bool(0.2) {
        // Few nodes have slices: other devices beside them would leave nothing to choose.
        devices.iter_mut().for_each(|need| need.count = need.count.min(1));
        devices.push(DeviceNeed { count: slices.count.max(1), ..slices });
    }
    let mut alternative = Alternative {
        vcpus: rng.random_range(0..3),
        memory: MemoryMib(rng.random_range(0..2) * 1024),
        devices,
        ..Alternative::default()
    };
    alternative.affinity = match rng.random_range(0..4) {
        0 => Affinity::SameRoot,
        1 => Affinity::SameNuma,
        _ => Affinity::Preferred,
    };
    if rng.random_bool(0.2) {
        alternative.conditions.push(NodeCondition::Hypervisor(["kvm".to_owned()].into()));
    }
    alternative
}

/// One VM, with one or two alternatives.
fn random_group(rng: &mut StdRng, name: &str, policy: NumaPolicy) -> VmGroup {
    let mut alternatives = vec![random_alternative(rng)];
    if rng.random_bool(0.2) {
        alternatives.push(random_alternative(rng));
    }
    for alternative in &mut alternatives {
        alternative.numa = policy;
    }
    VmGroup { name: name.to_owned(), count: 1, alternatives }
}

/// One or two groups, up to `most` VMs in all, with random limits.
pub fn random_request(rng: &mut StdRng, most: u32) -> ClusterRequest {
    let policy = if rng.random_bool(0.25) { NumaPolicy::Required } else { NumaPolicy::Preferred };
    let mut groups = vec![random_group(rng, "a", policy)];
    if rng.random_bool(0.4) {
        groups.push(random_group(rng, "b", policy));
    }
    // Together at most `most`.
    let others = u32::try_from(groups.len()).unwrap() - 1;
    groups[0].count = rng.random_range(1..=most).min(most - others);
    let mut request = bridge_lab::fleet::gpu_cluster("c", 1, 0, 0);
    request.groups = groups;
    limits(rng, &mut request);
    request
}

fn limits(rng: &mut StdRng, request: &mut ClusterRequest) {
    let compactness = &mut request.compactness;
    match rng.random_range(0..6) {
        0 => {
            compactness.mode = Mode::Required;
            compactness.level = Some(if rng.random_bool(0.2) {
                Domain::Node
            } else {
                Domain::Switch(rng.random_range(1..=2))
            });
        }
        1 => compactness.mode = Mode::Unconstrained,
        2 => compactness.max_hops = Some(rng.random_range(0..5)),
        3 => compactness.max_leaf_switches = Some(rng.random_range(1..=2)),
        _ => {}
    }
    if rng.random_bool(0.25) {
        let domain =
            if rng.random_bool(0.6) { Domain::Node } else { Domain::Switch(rng.random_range(1..=2)) };
        request.anti_affinity = Some(AntiAffinity { domain, at_most: rng.random_range(1..=2) });
    }
    if rng.random_bool(0.2) {
        let max_hops = rng.random_bool(0.5).then(|| rng.random_range(1..=3));
        request.near = Some(Near { to: NearTo::Node(name("n0")), max_hops });
    }
}
