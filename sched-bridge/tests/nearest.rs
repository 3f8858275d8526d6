//! The nearest that would fit: each answer is placed again here, and the next better one does not fit.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use proptest::prelude::*;
use sched_bridge::model::{
    Assignment, ClusterName, Device, DeviceKind, Fleet, Granted, MemoryMib, Node, NodeName, NodeState,
    NumaId, NumaShare, Occupancy, PciAddress, VmName,
};
use sched_bridge::place::{
    AntiAffinity, Change, ClusterRequest, Domain, Mode, Nearest, Options, VmGroup, nearest, place,
};
use sched_bridge::request::{Catalog, instance, lower};
use sched_bridge::topology::{Format, import};

/// Nodes of 8 cores, 4096 MiB and so many GPUs (of Hopper) below leaves of two.
fn fleet(gpus: &[u8]) -> Fleet {
    let nodes = gpus.iter().enumerate().map(|(at, gpus)| {
        let mut node = Node::plain(NodeName::new(format!("n{}", at + 1)).unwrap(), 8, MemoryMib(4096));
        for gpu in 0..*gpus {
            let address: PciAddress = format!("0000:{:02x}:00.0", gpu + 1).parse().unwrap();
            let mut device = Device::new(address, DeviceKind::Gpu, "10de:2330".parse().unwrap());
            device.arch = "hopper".into();
            node.devices.push(device);
        }
        node
    });
    let nodes: Vec<Node> = nodes.collect();
    let leaves = nodes.len().div_ceil(2);
    let mut conf: String = nodes
        .chunks(2)
        .enumerate()
        .map(|(leaf, nodes)| {
            let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
            format!("SwitchName=l{leaf} Nodes={}\n", names.join(","))
        })
        .collect();
    let all: Vec<String> = (0..leaves).map(|leaf| format!("l{leaf}")).collect();
    conf.push_str(&format!("SwitchName=s Switches={}\n", all.join(",")));
    Fleet::new(nodes, import(&conf, Format::SlurmConf, &[]).unwrap().topology).unwrap()
}

fn with_state(fleet: &Fleet, name: &str, state: NodeState) -> Fleet {
    let mut nodes = fleet.nodes().to_vec();
    nodes.iter_mut().filter(|node| node.name.as_str() == name).for_each(|node| node.state = state);
    Fleet::new(nodes, fleet.topology().clone()).unwrap()
}

fn request(count: u32, text: &str) -> ClusterRequest {
    let catalog = Catalog::default();
    let alternatives = lower::alternatives(&instance::parse(text, &catalog).unwrap(), &catalog).unwrap();
    let group = VmGroup { name: "vm".to_owned(), count, alternatives };
    ClusterRequest::new(ClusterName::new("c").unwrap(), vec![group])
}

fn tried(fleet: &Fleet, used: &Occupancy, request: &ClusterRequest) -> Nearest {
    place(fleet, used, request, &Options::default()).unwrap_err();
    let nearest = nearest(fleet, used, request, &Options::default(), &mut || true);
    assert!(nearest.complete);
    nearest
}

fn number(value: u64) -> u32 {
    u32::try_from(value).unwrap()
}

fn texts(nearest: &Nearest) -> Vec<&str> {
    nearest.fits.iter().map(|fit| fit.text.as_str()).collect()
}

#[test]
fn fewer_devices_vms_cores_or_less_memory() {
    let fleet = fleet(&[1, 3, 2, 0]);
    let used = Occupancy::new(&fleet);
    let found = tried(&fleet, &used, &request(1, "vcpus=1; memory_mb=64; gpus=4"));
    assert_eq!(texts(&found), ["fits with 3 GPUs instead of 4 on n2"]);
    let found = tried(&fleet, &used, &request(8, "vcpus=1; memory_mb=64; gpus=1"));
    assert_eq!(texts(&found), ["fits 6 of 8 VMs on n1, n2, n3", "fits with no GPUs instead of 1 on n1"]);
    let found = tried(&fleet, &used, &request(1, "vcpus=9; memory_mb=64"));
    assert_eq!(texts(&found), ["fits with 8 cores instead of 9 on n1"]);
    let found = tried(&fleet, &used, &request(1, "vcpus=1; memory_mb=8192"));
    let Change::Memory { from: 8192, to, .. } = found.fits[0].change else { panic!("{found:?}") };
    assert!((4096 - 128..=4096).contains(&to), "{to}: to within a 64th of what was asked for");
    // Nothing lets it fit.
    let found = tried(&fleet, &used, &request(1, "vcpus=9; memory_mb=8192"));
    assert_eq!(found.fits, []);
}

#[test]
fn limits_of_distance() {
    let fleet = fleet(&[2, 2, 2, 2]);
    let used = Occupancy::new(&fleet);
    let mut wanted = request(6, "vcpus=1; memory_mb=64; gpus=1");
    wanted.compactness.max_hops = Some(1);
    let found = tried(&fleet, &used, &wanted);
    assert_eq!(found.fits[0].text, "fits with max_hops 3 instead of max_hops 1 on n1, n2, n3");
    assert_eq!(found.fits[0].change, Change::MaxHops { from: "max_hops 1".to_owned(), to: 3 });
    assert_eq!(found.fits[1].text, "fits 4 of 6 VMs on n1, n2");
    (wanted.compactness.mode, wanted.compactness.level) = (Mode::Required, Some(Domain::LEAF));
    wanted.compactness.max_hops = None;
    assert!(
        tried(&fleet, &used, &wanted).fits[0].text.starts_with("fits with max_hops 3 instead of level leaf")
    );
    let mut wanted = request(6, "vcpus=1; memory_mb=64; gpus=1");
    wanted.compactness.max_leaf_switches = Some(1);
    assert!(
        texts(&tried(&fleet, &used, &wanted))[0].starts_with("fits with max_leaf_switches 2 instead of 1")
    );
    let mut wanted = request(6, "vcpus=1; memory_mb=64");
    wanted.anti_affinity = Some(AntiAffinity { domain: Domain::Node, at_most: 1 });
    let found = tried(&fleet, &used, &wanted);
    assert_eq!(found.fits[0].change, Change::AntiAffinity { from: 1, to: 2 });
}

#[test]
fn descriptions_and_what_others_would_have_to_do() {
    let fleet = fleet(&[2, 2, 0, 4]);
    let drained = with_state(&with_state(&fleet, "n4", NodeState::Drained), "n3", NodeState::Drained);
    let used = Occupancy::new(&drained);
    let found = tried(&drained, &used, &request(1, "vcpus=1; memory_mb=64; gpus=4"));
    assert_eq!(
        texts(&found),
        ["fits with 2 GPUs instead of 4 on n1", "fits if n4 were not drained: on n4"],
        "n3 is drained as well, but does not matter"
    );
    let found =
        tried(&fleet, &Occupancy::new(&fleet), &request(1, "vcpus=1; memory_mb=64; gpus=1; xpu_arch=fermi"));
    assert!(texts(&found).contains(&"fits without xpu_arch on n1"), "{found:?}");
    let found =
        tried(&fleet, &Occupancy::new(&fleet), &request(1, "vcpus=1; memory_mb=64; trait:X=required"));
    assert_eq!(texts(&found), ["fits without trait:X=required on n1"]);
    let mut wanted = request(1, "vcpus=1; memory_mb=64; gpus=4");
    wanted.not_nodes.insert(NodeName::new("n4").unwrap());
    let found = tried(&fleet, &Occupancy::new(&fleet), &wanted);
    assert_eq!(texts(&found)[1], "fits without only_nodes and not_nodes on n4");

    // Somebody else has a GPU of n4.
    let mut used = Occupancy::new(&fleet);
    let device = Granted { address: "0000:01:00.0".parse().unwrap(), kind: DeviceKind::Gpu };
    let share = NumaShare { numa: NumaId(0), cores: 1, memory: MemoryMib(1), huge: Default::default() };
    let vm = VmName::new("other").unwrap();
    let taken =
        Assignment { vm, node: NodeName::new("n4").unwrap(), devices: vec![device], shares: vec![share] };
    used.take(&fleet, &taken).unwrap();
    let found = tried(&fleet, &used, &request(1, "vcpus=1; memory_mb=64; gpus=4"));
    assert_eq!(
        texts(&found),
        ["fits with 3 GPUs instead of 4 on n4", "fits if nothing else were leased: on n4"]
    );
}

#[test]
fn it_ends_when_the_time_is_over() {
    let fleet = fleet(&[2, 2, 2, 2]);
    let used = Occupancy::new(&fleet);
    let wanted = request(9, "vcpus=1; memory_mb=64; gpus=1");
    let mut left = 3;
    let found = nearest(&fleet, &used, &wanted, &Options::default(), &mut || {
        left -= 1;
        left >= 0
    });
    assert_eq!((found.tried, found.complete), (3, false));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is said to fit does, and one more of it does not.
    #[test]
    fn what_is_said_is_true(gpus in proptest::collection::vec(0..5_u8, 2..7), count in 1..12_u32, each in 1..6_u32, hops in 0..4_u32) {
        let fleet = fleet(&gpus);
        let used = Occupancy::new(&fleet);
        let mut wanted = request(count, &format!("vcpus=2; memory_mb=512; gpus={each}"));
        wanted.compactness.max_hops = Some(hops).filter(|hops| *hops < 3);
        let fits = |wanted: &ClusterRequest| place(&fleet, &used, wanted, &Options::default()).is_ok();
        prop_assume!(!fits(&wanted));
        let found = nearest(&fleet, &used, &wanted, &Options::default(), &mut || true);
        for fit in &found.fits {
            let changed = |value: u64| {
                let mut wanted = wanted.clone();
                match fit.change {
                    Change::Vms { .. } => wanted.groups[0].count = number(value),
                    Change::Devices { .. } => wanted.groups[0].alternatives[0].devices[0].count = number(value),
                    Change::Cores { .. } => wanted.groups[0].alternatives[0].vcpus = number(value),
                    Change::MaxHops { .. } => wanted.compactness.max_hops = Some(number(value)),
                    _ => return None,
                }
                Some(fits(&wanted))
            };
            let (is, better) = match fit.change {
                Change::MaxHops { to, .. } => (u64::from(to), u64::from(to).checked_sub(1)),
                Change::Vms { to, .. } | Change::Devices { to, .. } | Change::Cores { to, .. } => (to, Some(to + 1)),
                _ => continue,
            };
            prop_assert_eq!(changed(is), Some(true), "{}", fit.text);
            if let Some(better) = better {
                prop_assert_eq!(changed(better), Some(false), "{}", fit.text);
            }
        }
    }
}
