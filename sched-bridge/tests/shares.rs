//! Shares of GPUs (vGPUs, MIG slices) and remote GPUs: from recorded trees of `/sys` and `/proc` to placements and plans.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use sched_bridge::inventory::{Inventory, InventoryError, read};
use sched_bridge::model::{
    Assignment, ClusterName, Device, DeviceAddress, DeviceKind, Fleet, Granted, Node, NodeName, Occupancy,
    OccupancyError, VmName,
};
use sched_bridge::moves::{PlanError, Resident, compact, evacuate, make_room, relocate};
use sched_bridge::place::{ClusterRequest, Options, PlaceError, Placement, VmGroup, explain, nearest, place};
use sched_bridge::request::{Catalog, instance, lower};
use sched_bridge::topology::{Format, Topology, import};

const SHARES: &str = include_str!("fixtures/shares.tree");

/// A node with MIG slices and vGPUs, and what its operator says of it.
fn inventory(name: &str, settings: &str) -> Result<Inventory, InventoryError> {
    let root = vmove_skip::tree::expand(SHARES, |_| false);
    let file = root.path().join("etc/vmove/inventory.toml");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, settings).unwrap();
    read(root.path(), NodeName::new(name).unwrap())
}

const REMOTE: &str = "[[remote_gpus]]\naddress = \"10.0.0.9:8308\"\nmodel = \"A100\"\ncount = 2\n";

fn node(name: &str, settings: &str) -> Node {
    inventory(name, settings).unwrap().node
}

fn of(node: &Node, kind: DeviceKind) -> Vec<&Device> {
    node.devices.iter().filter(|device| device.kind == kind).collect()
}

fn addresses(devices: &[&Device]) -> Vec<String> {
    devices.iter().map(|device| device.address.to_string()).collect()
}

fn request(name: &str, count: u32, text: &str) -> ClusterRequest {
    let expr = instance::parse(text, &Catalog::default()).unwrap();
    let alternatives = lower::alternatives(&expr, &Catalog::default()).unwrap();
    let group = VmGroup { name: "vm".to_owned(), count, alternatives };
    ClusterRequest::new(ClusterName::new(name).unwrap(), vec![group])
}

fn try_place(fleet: &Fleet, used: &Occupancy, request: &ClusterRequest) -> Result<Placement, PlaceError> {
    place(fleet, used, request, &Options::default())
}

/// Where a request goes, and that it is taken.
fn resident(fleet: &Fleet, used: &mut Occupancy, request: ClusterRequest) -> Resident {
    let assignments = try_place(fleet, used, &request).unwrap().assignments;
    assignments.iter().for_each(|one| used.take(fleet, one).unwrap());
    Resident { request, assignments, pinned: Vec::new() }
}

fn granted(node: &Node, address: &str) -> Granted {
    let address: DeviceAddress = address.parse().unwrap();
    let kind = node.devices.iter().find(|device| device.address == address).unwrap().kind;
    Granted { address, kind }
}

fn holding(vm: &str, node: &Node, address: &str) -> Assignment {
    let devices = vec![granted(node, address)];
    Assignment { vm: VmName::new(vm).unwrap(), node: node.name.clone(), devices, shares: Vec::new() }
}

#[test]
fn slices_and_vgpus_are_devices_of_their_gpu_which_is_not_leased_as_a_whole() {
    let read = inventory("n1", "").unwrap();
    assert_eq!(read.notes, Vec::<String>::new());
    let node = &read.node;
    let slices = of(node, DeviceKind::MigSlice);
    assert_eq!(addresses(&slices), ["0000:17:00.0/gi1/ci0", "0000:17:00.0/gi2/ci0", "0000:17:00.0/gi5/ci0"]);
    let gpus = of(node, DeviceKind::Gpu);
    assert_eq!(gpus.iter().map(|gpu| gpu.shares).collect::<Vec<_>>(), [3, 3, 0, 0]);
    assert_eq!(gpus[0].not_leased().unwrap(), "it has 3 slices or vGPUs, which are leased in its place");
    assert!(slices.iter().all(|slice| (slice.numa, &slice.root) == (gpus[0].numa, &gpus[0].root)));
    // One exists, so the GPU is divided into vGPUs of its type, of which two more can be made.
    let vgpus = of(node, DeviceKind::Vgpu);
    assert_eq!(vgpus.len(), 3);
    assert_eq!(vgpus[0].address.to_string(), "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001");
    assert!(
        vgpus.iter().all(|vgpu| &*vgpu.model == "nvidia-558" && vgpu.traits.contains("CUSTOM_NVIDIA_558"))
    );
    let parts: Vec<_> = read.parts.iter().map(|part| (part.kind.as_str(), part.name.as_str())).collect();
    assert_eq!(parts, [("mediated", "11111111-2222-4333-8444-555555555555")], "a serial port is no share");
}

#[test]
fn the_operator_says_what_the_kernel_does_not() {
    let settings = "[[vgpus]]\ntype = \"nvidia-557\"\ngpus = [\"0000:98:00.0\"]\ntraits = [\"CUSTOM_DESK\"]\n\
        [[migs]]\ngpu = \"0000:17:00.0\"\ngpu_instances = [1, 2]\nprofile = \"3g.20gb\"\n";
    let node = node("n1", &format!("{settings}{REMOTE}"));
    let vgpus = of(&node, DeviceKind::Vgpu);
    let desks = vgpus.iter().filter(|vgpu| vgpu.traits.contains("CUSTOM_DESK")).count();
    assert_eq!((vgpus.len(), desks), (3 + 32, 32));
    let profiles: Vec<&str> = of(&node, DeviceKind::MigSlice).iter().map(|slice| &*slice.model).collect();
    assert_eq!(profiles, ["3g.20gb", "3g.20gb", ""]);
    let remote = of(&node, DeviceKind::RemoteGpu);
    assert_eq!(addresses(&remote), ["remote:10.0.0.9:8308/0", "remote:10.0.0.9:8308/1"]);
    for (wrong, words) in [
        ("[[vgpus]]\nname = \"x\"\n", "unknown field"),
        ("[[vgpus]]\n\ntyp = \"x\"\n", "line 3"),
        (
            "[[vgpus]]\n\ntyp = \"x\"\n",
            "unknown field `typ`, expected one of `type`, `gpus`, `traits`; did you mean `type`?",
        ),
        (
            "[[vgpus]]\ntype = \"a\"\n[[vgpus]]\ntype = \"b\"\ngpus = [\"0000:98:00.0\"]\n",
            "expected GPUs that no other",
        ),
        ("[[remote_gpus]]\naddress = \"10.0.0.9:8308\"\ncount = 0\n", "count of at least 1, found 0"),
        ("[[remote_gpus]]\naddress = \"gpus:8308\"\ncount = 1\n", "line 2"),
    ] {
        let error = inventory("n1", wrong).unwrap_err().to_string();
        assert!(error.contains("etc/vmove/inventory.toml: ") && error.contains(words), "{error}");
    }
}

#[test]
fn each_share_is_given_once_and_a_request_can_name_its_type() {
    let fleet = Fleet::new(
        vec![node("n1", "[[migs]]\ngpu = \"0000:17:00.0\"\ngpu_instances = [5]\nprofile = \"1g.5gb\"\n")],
        Topology::default(),
    )
    .unwrap();
    let mut used = Occupancy::new(&fleet);
    let slices = resident(&fleet, &mut used, request("a", 3, "migs=1"));
    let all: std::collections::BTreeSet<_> = slices.assignments.iter().flat_map(|vm| &vm.devices).collect();
    assert_eq!(all.len(), 3);
    let error = try_place(&fleet, &used, &request("b", 1, "migs=1")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no room: 0 of 1 VMs would fit; node n1: needs 1 MIG slice, has 0 free of 3"
    );
    let mut used = Occupancy::new(&fleet);
    let small = resident(&fleet, &mut used, request("c", 1, "mig_profile=1g.5gb"));
    assert_eq!(small.assignments[0].devices[0].address.to_string(), "0000:17:00.0/gi5/ci0");
    let error = try_place(&fleet, &used, &request("d", 1, "mig_profile=1g.5gb")).unwrap_err().to_string();
    assert!(error.contains("needs 1 MIG slice (1g.5gb), has 0 free of 1"), "{error}");
    let two = request("e", 2, "vgpus=2; vgpu_type=nvidia-558");
    let fits = nearest(&fleet, &used, &two, &Options::default(), &mut || true);
    let texts: Vec<&str> = fits.fits.iter().map(|fit| fit.text.as_str()).collect();
    assert!(texts.contains(&"fits with 1 vGPU instead of 2 on n1"), "{texts:?}");
    assert!(texts.contains(&"fits 1 of 2 VMs on n1"), "{texts:?}");
    // Whole GPUs are those that are not divided.
    let error = try_place(&fleet, &used, &request("f", 3, "gpus=1")).unwrap_err();
    assert!(matches!(error, PlaceError::NoRoom { fit: 2, .. }), "{error}");
}

#[test]
fn a_gpu_and_its_shares_are_never_both_taken() {
    let node = node("n1", "");
    let fleet = Fleet::new(vec![node.clone()], Topology::default()).unwrap();
    for (whole, share) in
        [("0000:17:00.0", "0000:17:00.0/gi2/ci0"), ("0000:65:00.0", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001")]
    {
        for (first, second) in [(whole, share), (share, whole)] {
            let mut used = Occupancy::new(&fleet);
            let (first, second) = (holding("a", &node, first), holding("b", &node, second));
            used.take(&fleet, &first).unwrap();
            let refused = used.take(&fleet, &second).unwrap_err();
            assert!(matches!(refused, OccupancyError::Divided { .. }), "{refused}");
            used.release(&fleet, &first).unwrap();
            used.take(&fleet, &second).unwrap();
        }
        let mut both = holding("a", &node, whole);
        both.devices.push(granted(&node, share));
        Occupancy::new(&fleet).take(&fleet, &both).unwrap_err();
    }
    // A GPU that was leased before it was divided keeps its slices from others.
    let mut used = Occupancy::new(&fleet);
    used.take(&fleet, &holding("a", &node, "0000:17:00.0")).unwrap();
    let error = try_place(&fleet, &used, &request("b", 1, "migs=1")).unwrap_err().to_string();
    assert!(error.contains("needs 1 MIG slice, has 0 free of 3"), "{error}");
}

#[test]
fn a_remote_gpu_is_the_same_one_for_all_nodes() {
    let fleet = || {
        let nodes = vec![node("n1", REMOTE), node("n2", REMOTE), node("n3", "")];
        let topology = import("SwitchName=leaf Nodes=n[1-3]\n", Format::SlurmConf, &[]).unwrap().topology;
        Fleet::new(nodes, topology).unwrap()
    };
    let fleet = fleet();
    assert_eq!(fleet.remote_gpus().count(), 2);
    let mut used = Occupancy::new(&fleet);
    // Nodes that do not list it reach it, too.
    let mut wanted = request("a", 1, "vcpus=1; memory_mb=64; remote_gpus=1; remote_gpu_model=a100");
    wanted.only_nodes.insert(NodeName::new("n3").unwrap());
    let first = resident(&fleet, &mut used, wanted);
    assert_eq!(first.assignments[0].devices[0].address.to_string(), "remote:10.0.0.9:8308/0");
    let two = request("b", 2, "vcpus=1; memory_mb=64; remote_gpus=1");
    let error = try_place(&fleet, &used, &two).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no room: 1 of 2 VMs would fit; each VM needs 1 remote GPU, and of 2 in the fleet 1 are free"
    );
    let why = explain(&fleet, &used, &two, None).unwrap();
    assert!(serde_json::to_string(&why).unwrap().contains("of 2 in the fleet 1 are free"), "{why:?}");
    let fits = nearest(&fleet, &used, &two, &Options::default(), &mut || true);
    assert!(fits.fits.iter().any(|fit| fit.text.starts_with("fits 1 of 2 VMs")), "{fits:?}");
    resident(&fleet, &mut used, request("c", 1, "vcpus=1; memory_mb=64; remote_gpus=1"));
    let again =
        used.take(&fleet, &holding("x", fleet.node(fleet.find("n1").unwrap()), "remote:10.0.0.9:8308/1"));
    assert!(matches!(again, Err(OccupancyError::DeviceTaken { .. })), "{again:?}");
    let before = used.clone();
    used.release(&fleet, &first.assignments[0]).unwrap();
    used.take(&fleet, &first.assignments[0]).unwrap();
    assert_eq!(used, before);
}

#[test]
fn who_needs_a_certain_remote_gpu_gets_it_though_others_could_take_it() {
    let remote = "[[remote_gpus]]\naddress = \"10.0.0.8:8308\"\nmodel = \"t4\"\ncount = 1\n[[remote_gpus]]\naddress = \"10.0.0.9:8308\"\nmodel = \"a100\"\ncount = 1\n";
    let fleet = Fleet::new(vec![node("n1", remote)], Topology::default()).unwrap();
    let mut both = request("a", 1, "vcpus=1; memory_mb=64; remote_gpus=1");
    let mut second = request("a", 1, "vcpus=1; memory_mb=64; remote_gpu_model=t4").groups.remove(0);
    second.name = "t4".to_owned();
    both.groups.push(second);
    let placed = try_place(&fleet, &Occupancy::new(&fleet), &both).unwrap();
    let given: Vec<String> = placed.assignments.iter().map(|vm| vm.devices[0].address.to_string()).collect();
    assert_eq!(given, ["remote:10.0.0.9:8308/0", "remote:10.0.0.8:8308/0"]);
}

#[test]
fn plans_leave_vms_with_shares_and_move_those_with_remote_gpus() {
    let topology = import("SwitchName=leaf Nodes=n[1-3]\n", Format::SlurmConf, &[]).unwrap().topology;
    let nodes = vec![node("n1", REMOTE), node("n2", ""), node("n3", "")];
    let fleet = Fleet::new(nodes, topology).unwrap();
    let mut used = Occupancy::new(&fleet);
    let on = |name: &str, count: u32, text: &str| {
        let mut wanted = request(name, count, &format!("vcpus=1; memory_mb=64; {text}"));
        wanted.only_nodes.insert(NodeName::new("n1").unwrap());
        wanted
    };
    let mut residents = vec![
        resident(&fleet, &mut used, on("vgpu", 1, "vgpus=1")),
        resident(&fleet, &mut used, on("mig", 1, "migs=1")),
        resident(&fleet, &mut used, on("remote", 2, "remote_gpus=1")),
        resident(&fleet, &mut used, on("plain", 1, "gpus=1")),
    ];
    residents.iter_mut().for_each(|own| own.request.only_nodes.clear());
    let n1 = NodeName::new("n1").unwrap();
    let plan = evacuate(&fleet, &residents, &n1).unwrap();
    let moved: Vec<&str> = plan.steps.iter().map(|step| step.cluster.as_str()).collect();
    assert_eq!(moved, ["plain", "remote", "remote"]);
    let notes = plan.notes.join("\n");
    assert!(notes.contains("VM vgpu-vm-0 stays on n1: its vGPU cannot be unplugged"), "{notes}");
    assert!(notes.contains("VM mig-vm-0 stays on n1: its MIG slice"), "{notes}");
    // Remote GPUs stay the same ones, also where the VMs of a node move together.
    for step in plan.steps.iter().filter(|step| step.cluster.as_str() == "remote") {
        assert!(step.from.node != step.to.node && step.from.devices == step.to.devices, "{step:?}");
    }
    let relocated = relocate(&fleet, &residents, "remote", std::slice::from_ref(&n1)).unwrap();
    assert!(relocated.steps.iter().all(|step| step.from.devices == step.to.devices), "{relocated:?}");
    assert_eq!(relocated.steps.len(), 2);
    let refused = relocate(&fleet, &residents, "vgpu", std::slice::from_ref(&n1)).unwrap_err();
    assert!(
        matches!(refused, PlanError::Stuck { .. }) && refused.to_string().contains("its vGPU"),
        "{refused}"
    );
    let plan = compact(&fleet, &residents, Some("vgpu")).unwrap();
    assert!(
        plan.steps.is_empty() && plan.notes.join("\n").contains("cluster vgpu stays as it is"),
        "{plan:?}"
    );
    let mut all = request("all", 1, "vcpus=1; memory_mb=64; vgpus=3");
    all.only_nodes.insert(n1);
    let refused = make_room(&fleet, &residents, &all).unwrap_err().to_string();
    assert!(refused.contains("no room: 0 of 1 VMs"), "{refused}");
}
