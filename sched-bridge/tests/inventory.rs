//! Recorded trees of `/sys` and `/proc`.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use std::path::Path;

use sched_bridge::inventory::{Inventory, InventoryError, glue2, read};
use sched_bridge::model::{
    ClusterName, Device, DeviceKind, Fleet, LinkLayer, MemoryMib, NodeName, NumaId, Occupancy,
};
use sched_bridge::place::{Affinity, ClusterRequest, Options, PlaceError, VmGroup, explain, place};
use sched_bridge::request::{Catalog, instance, lower};
use sched_bridge::topology::Topology;
use vmove_skip::tree::expand;

const DGX: &str = include_str!("fixtures/dgx.tree");
const PLAIN: &str = include_str!("fixtures/plain.tree");
const VFS: &str = include_str!("fixtures/vfs.tree");

fn inventory(manifest: &str) -> Inventory {
    let root = expand(manifest, |_| false);
    read(root.path(), NodeName::new("node1").unwrap()).unwrap()
}

fn of(inventory: &Inventory, kind: DeviceKind) -> Vec<&Device> {
    inventory.node.devices.iter().filter(|device| device.kind == kind).collect()
}

#[test]
fn a_dgx_has_eight_gpus_each_beside_an_adapter() {
    let dgx = inventory(DGX);
    assert_eq!(dgx.notes, Vec::<String>::new());
    let (gpus, hcas) = (of(&dgx, DeviceKind::Gpu), of(&dgx, DeviceKind::Hca));
    assert_eq!((gpus.len(), hcas.len(), dgx.node.devices.len()), (8, 8, 16));
    for (gpu, hca) in gpus.iter().zip(&hcas) {
        assert_eq!((gpu.arch.as_ref(), hca.arch.as_ref()), ("hopper", "connectx-7"));
        assert!(gpu.root.is_some() && gpu.root == hca.root && gpu.numa == hca.numa, "{gpu:?} {hca:?}");
        assert!(gpu.iommu_group.is_some() && gpu.driver.as_deref() == Some("nvidia"));
        assert_eq!((hca.vfs_enabled, hca.vfs_total), (0, 16));
    }
    assert_eq!(gpus.iter().filter(|gpu| gpu.numa == Some(NumaId(1))).count(), 4);
    assert_eq!(hcas.iter().filter(|hca| hca.rate_gbps() == 400).count(), 7, "one port is down");
    assert_eq!(hcas[0].guid.as_deref(), Some("a088:c203:00a1:0000"));
    assert_eq!(hcas[0].ports[0].lid, 10);
    let node = &dgx.node;
    assert_eq!((node.cores(), node.numa.len(), node.cpu.arch.as_ref()), (224, 2, "x86_64"));
    assert!(
        node.cpu.features.contains("amx_tile")
            && node.hypervisors.contains("kvm")
            && node.hypervisors.contains("qemu")
    );
}

#[test]
fn a_plain_node_has_nothing_special() {
    let plain = inventory(PLAIN);
    assert!(plain.node.devices.is_empty() && plain.node.hypervisors.is_empty(), "{plain:?}");
    assert_eq!((plain.node.cores(), plain.node.memory()), (8, MemoryMib(16000)));
    assert_eq!(plain.node.cpu.arch.as_ref(), "x86_64", "guessed from cpuinfo");
}

#[test]
fn virtual_functions_belong_to_their_adapter() {
    let vfs = inventory(VFS);
    let (own, hcas) = (of(&vfs, DeviceKind::Vf), of(&vfs, DeviceKind::Hca));
    assert_eq!((own.len(), hcas.len()), (4, 2));
    assert!(
        own.iter()
            .all(|vf| vf.parent == hcas[0].address.pci() && vf.link_layer() == Some(LinkLayer::Ethernet))
    );
    assert_eq!(own.iter().filter(|vf| vf.live_migratable).count(), 2);
    assert!(
        !hcas[0].is_grantable() && hcas[1].is_grantable(),
        "an adapter whose VFs are on is not given away"
    );
    assert_eq!((hcas[0].vfs_enabled, hcas[0].vfs_total, hcas[1].rate_gbps()), (4, 64, 200));
    let numa = &vfs.node.numa[1];
    assert_eq!((numa.huge.pages_2m, numa.huge.pages_1g), (1024, 16));
    assert_eq!(numa.memory, MemoryMib(128_000 - 2048 - 16384));
}

#[test]
fn missing_and_strange_files_become_notes() {
    for (skip, words) in [
        ("proc/cpuinfo", "proc/cpuinfo"),
        ("node1/meminfo", "node1/meminfo"),
        ("0000:19:00.0/vendor", "0000:19:00.0/vendor"),
        ("mlx5_0/ports/1/state", "mlx5_0/ports/1/state"),
        ("mlx5_0/ports/1/link_layer", "expected InfiniBand or Ethernet"),
        ("iommu_group", "IOMMU"),
    ] {
        let root = expand(DGX, |line| line.contains(skip));
        let read = read(root.path(), NodeName::new("n").unwrap()).unwrap();
        assert!(read.notes.iter().any(|note| note.contains(words)), "{skip}: {:?}", read.notes);
        assert!(read.node.devices.len() >= 15, "{skip}");
    }
    let root = expand(DGX, |_| false);
    std::fs::write(root.path().join("sys/class/infiniband/mlx5_1/ports/1/rate"), "fast").unwrap();
    std::fs::write(root.path().join("sys/devices/system/node/node0/cpulist"), "0-3,x").unwrap();
    let read = read(root.path(), NodeName::new("n").unwrap()).unwrap();
    assert!(read.notes.iter().any(|note| note.contains("100 Gb/sec")), "{:?}", read.notes);
    assert!(read.notes.iter().any(|note| note.contains("not a range of processors")), "{:?}", read.notes);
}

#[test]
fn a_root_without_processors_is_refused() {
    let empty = tempfile::tempdir().unwrap();
    let error = read(empty.path(), NodeName::new("n").unwrap()).unwrap_err();
    assert!(matches!(error, InventoryError::NoProcessors { .. }));
    assert!(error.to_string().contains("cpu/online"), "{error}");
}

#[test]
fn this_machine_can_be_read() {
    let own = read(Path::new("/"), NodeName::new("self").unwrap()).unwrap();
    assert!(own.node.cores() > 0 && own.node.memory().0 > 0, "{own:?}");
}

#[test]
fn glue2_names_cpus_and_accelerators() {
    let text = glue2(&inventory(DGX).node);
    for line in [
        "objectClass: GLUE2ExecutionEnvironment",
        "GLUE2ExecutionEnvironmentPlatform: amd64",
        "GLUE2ExecutionEnvironmentPhysicalCPUs: 2",
        "GLUE2ExecutionEnvironmentLogicalCPUs: 224",
        "GLUE2ExecutionEnvironmentNetworkInfo: infiniband",
        "GLUE2AcceleratorEnvironmentPhysicalAccelerators: 8",
        "GLUE2AcceleratorEnvironmentModel: hopper 10de:2330",
    ] {
        assert!(text.lines().any(|own| own == line), "{line}\n{text}");
    }
    assert_eq!(text.matches("\n\ndn: ").count(), 1);
}

/// From a recorded tree to devices of VMs: pairs below one PCIe root.
#[test]
fn vms_on_a_dgx_get_neighbours() {
    let fleet = Fleet::new(vec![inventory(DGX).node], Topology::default()).unwrap();
    let used = Occupancy::new(&fleet);
    let expr =
        instance::parse("vcpus=4; memory_mb=16K; gpus=1; hcas=1; gpu_hca_affinity=root", &Catalog::default())
            .unwrap();
    let alternatives = lower::alternatives(&expr, &Catalog::default()).unwrap();
    assert_eq!(alternatives[0].affinity, Affinity::SameRoot);
    let group = VmGroup { name: "vm".to_owned(), count: 8, alternatives };
    let mut request = ClusterRequest::new(ClusterName::new("c").unwrap(), vec![group]);
    let placement = place(&fleet, &used, &request, &Options::default()).unwrap();
    assert_eq!((placement.score.device_distance, placement.score.max_hops), (0, 0));
    request.groups[0].count = 9;
    let error = place(&fleet, &used, &request, &Options::default()).unwrap_err();
    assert!(matches!(error, PlaceError::NoRoom { fit: 8, .. }), "{error}");
    request.groups[0].count = 1;
    request.groups[0].alternatives[0].devices[0].filter.archs.insert("fermi".to_owned());
    let error = place(&fleet, &used, &request, &Options::default()).unwrap_err();
    assert_eq!(error.to_string(), "no room: 0 of 1 VMs would fit; node node1: needs 1 Fermi GPU, has 0");
    let why = explain(&fleet, &used, &request, None).unwrap();
    let text = serde_json::to_string(&why).unwrap();
    assert!(text.contains("needs 1 Fermi GPU, has 0"), "{text}");
}
