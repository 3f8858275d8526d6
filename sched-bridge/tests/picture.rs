//! Pictures of fleets.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use sched_bridge::model::{Assignment, DeviceKind, Granted, NodeName, NodeState, VmName};
use sched_bridge::picture::{Fleet, NodeSeen, draw};
use sched_bridge::topology::{Topology, slurm_conf};
use vmove_picture::check::faults;

const CONF: &str = "
SwitchName=S-ec0d9a0300ec81e0 Nodes=gpu-node-rack10-[0036-0041].cluster.example.org
SwitchName=MF0-ib-leaf-rack13-MQM8700-U1-with-a-name-that-goes-on-and-on-and-on-and-on Nodes=gpu-node-rack13-[0036-0039].cluster.example.org
SwitchName=spine Switches=S-ec0d9a0300ec81e0,MF0-ib-leaf-rack13-MQM8700-U1-with-a-name-that-goes-on-and-on-and-on-and-on
";

fn node(name: &str, state: NodeState, gpus: (usize, usize), adapters: (usize, usize)) -> NodeSeen {
    NodeSeen {
        name: NodeName::new(format!("{name}.cluster.example.org")).unwrap(),
        state,
        gpus: gpus.1,
        gpus_free: gpus.0,
        adapters: adapters.1,
        adapters_free: adapters.0,
        cores: 64,
        cores_free: 32,
    }
}

fn vm(vm: &str, node: &str, gpus: u16) -> Assignment {
    let device = |number| Granted {
        address: format!("0000:{number:02x}:00.0").parse().unwrap(),
        kind: DeviceKind::Gpu,
    };
    Assignment {
        vm: VmName::new(vm).unwrap(),
        node: NodeName::new(format!("{node}.cluster.example.org")).unwrap(),
        devices: (1..=gpus).map(device).collect(),
        shares: Vec::new(),
    }
}

/// Three clusters on one node that is drained, two leases of one name, a node that others use, one without an inventory, and one
/// below no switch.
fn fleet() -> (Topology, Fleet) {
    let mut nodes = vec![
        node("gpu-node-rack10-0036", NodeState::Drained, (0, 4), (2, 2)),
        node("gpu-node-rack10-0037", NodeState::Up, (1, 4), (1, 2)),
        node("gpu-node-rack10-0038", NodeState::Down, (4, 4), (2, 2)),
        node("gpu-node-rack10-0039", NodeState::Up, (4, 4), (2, 2)),
        node("gpu-node-rack10-0040", NodeState::Up, (6, 8), (60, 64)),
    ];
    nodes.extend((36..40).map(|at| node(&format!("gpu-node-rack13-00{at}"), NodeState::Up, (4, 4), (2, 2))));
    nodes.push(node("gpu-node-spare", NodeState::Up, (4, 4), (0, 0)));
    let train = vec![
        vm("train-0", "gpu-node-rack10-0036", 2),
        vm("train-1", "gpu-node-rack10-0037", 2),
        // It moves: both places are held.
        vm("train-1", "gpu-node-rack10-0040", 2),
    ];
    let clusters = [
        ("train".to_owned(), train),
        ("web".to_owned(), vec![vm("web-0", "gpu-node-rack10-0036", 1)]),
        (
            "a-cluster-with-a-name-that-is-far-too-long-for-a-third-of-it".to_owned(),
            vec![vm("long-0", "gpu-node-rack10-0036", 1)],
        ),
    ];
    (slurm_conf::read(CONF).unwrap(), Fleet { nodes, clusters: clusters.into() })
}

#[test]
fn switches_nodes_devices_and_clusters_are_shown() {
    let (topology, fleet) = fleet();
    let svg = draw(&topology, Some(&fleet));
    assert_eq!(faults(&svg), Vec::<String>::new());
    for words in [
        "S-ec0d9a0300ec81e0",
        "11 nodes, 35 of 44 GPUs free, 75 of 80 adapters free, 1 drained, 1 down, 1 without an inventory",
        "names of nodes without .cluster.example.org",
        "\ngpu-node-rack10-0036\n",
        "\ndrained\n",
        "\ndown\n",
        "\nno inventory\n",
        "\nA B C\n",
        "\n60/64\n",
        "A  train, 2 VMs",
        "web, 1 VM\n",
        "train: train-1",
        "below no switch",
    ] {
        assert!(svg.contains(words), "{words}\n{svg}");
    }
    let of = |class: &str| svg.matches(&format!("class=\"{class}\"")).count();
    // Of train six GPUs and its place in the legend; of others one GPU and one adapter, and those of many as one.
    assert_eq!((of("v-c0"), of("v-others"), of("v-drained")), (2 + 2 + 2 + 1, 1 + 1 + 1, 1));
}

#[test]
fn without_a_bridge_nothing_is_shown_as_free() {
    let (topology, _) = fleet();
    let svg = draw(&topology, None);
    assert_eq!(faults(&svg), Vec::<String>::new());
    assert!(svg.contains("no bridge answered: what is taken is not known"));
    assert!(!svg.contains("class=\"v-free\"") && !svg.contains("no inventory"), "{svg}");
}

#[test]
fn many_nodes_are_squares() {
    let topology = slurm_conf::read("SwitchName=s Nodes=n[0-499]").unwrap();
    let nodes = (0..500).map(|at| NodeSeen {
        name: NodeName::new(format!("n{at}")).unwrap(),
        ..node("n", NodeState::Up, (at % 5, 4), (0, 0))
    });
    let fleet = Fleet { nodes: nodes.collect(), ..Fleet::default() };
    let svg = draw(&topology, Some(&fleet));
    assert_eq!(faults(&svg), Vec::<String>::new());
    // The legend has one of each, too.
    assert_eq!(svg.matches("v-cell v-use4").count(), 101);
    assert!(svg.contains("n499: up"));
}

#[test]
fn any_fleet_has_a_picture() {
    let deep: String = (0..12).map(|at| format!("SwitchName=s{at} Switches=s{}\n", at + 1)).collect();
    for (conf, fleet) in [("", None), ("", Some(Fleet::default())), (deep.as_str(), Some(Fleet::default()))] {
        let text =
            if conf.is_empty() { String::new() } else { format!("{conf}SwitchName=s12 Nodes=n[1-9]\n") };
        let topology = if text.is_empty() { Topology::default() } else { slurm_conf::read(&text).unwrap() };
        assert_eq!(faults(&draw(&topology, fleet.as_ref())), Vec::<String>::new());
    }
}
