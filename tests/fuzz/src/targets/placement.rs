//! Topologies and requests for virtual clusters, as text. The first byte says in which format.

use sched_bridge::blueprint;
use sched_bridge::model::NodeName;
use sched_bridge::request::{Catalog, Source, cluster, instance, lower, nova};
use sched_bridge::topology::{Format, Topology, import, labels, slurm_conf, slurm_yaml};

use super::{Target, text};

pub const TOPOLOGIES: Target = Target {
    name: "topologies",
    what: "networks in all formats (the first byte), and what is written of them",
    feed: topology,
    seeds: || text(&TOPOLOGY_TEXTS),
    words: &[
        "SwitchName=",
        "Switches=",
        "Nodes=",
        "LinkSpeed=",
        "BlockName=",
        "BlockSizes=",
        "[",
        "]",
        "[1-3]",
        "-",
        ",",
        "#",
        "\\\n",
        "- topology: ",
        "cluster_default: true",
        "tree:",
        "switches:",
        "block:",
        "flat: true",
        "children: ",
        "nodes: ",
        "Switch\t36 \"S-1\" # \"MF0;s1:M/U1\"",
        "Ca\t1 \"H-1\"",
        "[1]",
        "\"S-2\"[3]",
        "[[switches]]\nname = ",
        "metadata",
        "labels",
        "network.topology.nvidia.com/leaf",
        "{\"items\":[",
        "&a",
        "*a",
    ],
    mutations: 15_000,
};

const TOPOLOGY_TEXTS: [&str; 8] = [
    "0SwitchName=leaf1 Nodes=n[1-2] LinkSpeed=100\nSwitchName=leaf2 Nodes=n[03-04],io\nSwitchName=top Switches=leaf[1-2] # end\n",
    "0BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\nBlockSizes=4,8\n",
    "1- topology: t1\n  cluster_default: true\n  tree:\n    switches:\n    - switch: s1\n      nodes: n[1-2]\n    - switch: top\n      children: s1\n",
    "1- topology: t\n  block:\n    block_sizes: [2, 4]\n    blocks:\n    - block: b1\n      nodes: n[1-2]\n    - {block: b2, nodes: 'n[3-4]'}\n- topology: f\n  flat: true\n",
    "2switchguid=0x1\nSwitch\t36 \"S-1\"\t# \"MF0;s1:M/U1\" base port 0 lid 1\n[1]\t\"H-1\"[1](2)\t# \"n1 HCA-1\" lid 67 4xEDR\n[2]\t\"S-2\"[3]\n\nSwitch 36 \"S-2\"\nCa\t1 \"H-1\"\t# \"n1 HCA-1\"\n[1](2)\t\"S-1\"[1]\n",
    "3{\"n1\":{\"network.topology.nvidia.com/leaf\":\"l1\",\"network.topology.nvidia.com/spine\":\"s\"},\"n2\":{\"network.topology.nvidia.com/leaf\":\"l2\"}}",
    "3{\"items\":[{\"metadata\":{\"name\":\"n1\",\"labels\":{\"topology.kubernetes.io/zone\":\"z\"}}}]}",
    "4[[switches]]\nname = 's1'\nnodes = ['n1', 'n2']\n[[switches]]\nname = 't'\nswitches = ['s1']\n",
];

/// Names that a list may stand for, here: more only take time and memory.
const MOST_NAMES: u64 = 20_000;

fn topology(bytes: &[u8]) {
    let Some((format, text)) = split(bytes) else { return };
    if text.lines().map(names).fold(0_u64, u64::saturating_add) > MOST_NAMES {
        return;
    }
    let format = match format % 7 {
        0 => Format::SlurmConf,
        1 => Format::SlurmYaml,
        2 => Format::IbNetDiscover,
        3 => Format::Labels,
        4 => Format::Toml,
        _ => Format::guess("topology", text),
    };
    let all = [NodeName::new("n1").expect("a name")];
    match import(text, format, &all) {
        Ok(imported) => look(&imported.topology),
        Err(error) => drop(error.to_string()),
    }
}

fn split(bytes: &[u8]) -> Option<(u8, &str)> {
    let (first, rest) = bytes.split_first()?;
    Some((first.wrapping_sub(b'0'), std::str::from_utf8(rest).ok()?))
}

/// At least as many names as the ranges of a line stand for.
fn names(line: &str) -> u64 {
    let number = |text: &str, back: bool| -> u64 {
        let digits = |c: &char| c.is_ascii_digit();
        let found: String = match back {
            true => text.chars().rev().take_while(digits).collect::<Vec<_>>().into_iter().rev().collect(),
            false => text.chars().take_while(digits).collect(),
        };
        found.parse().unwrap_or(u64::MAX)
    };
    let brackets = line.split('[').skip(1);
    brackets.fold(1, |product, inside| {
        let mut count = 1_u64;
        for (at, _) in inside.match_indices('-') {
            let (from, to) =
                (number(inside[..at].trim_end(), true), number(inside[at + 1..].trim_start(), false));
            count = count.saturating_add(if from == u64::MAX { 0 } else { to.saturating_sub(from) });
        }
        product.saturating_mul(count.saturating_add(inside.matches(',').count() as u64))
    })
}

fn look(topology: &Topology) {
    let nodes: Vec<&NodeName> = topology.nodes().take(8).collect();
    for one in &nodes {
        for other in &nodes {
            assert_eq!(topology.hops(one, other), topology.hops(other, one));
        }
    }
    drop(slurm_conf::write(topology));
    drop(slurm_yaml::write(topology, "t"));
    drop(labels::write(topology));
    let json = serde_json::to_string(topology).expect("it is data");
    let again: Topology = serde_json::from_str(&json).expect("it was one");
    assert_eq!(again.switches(), topology.switches());
}

pub const REQUESTS: Target = Target {
    name: "requests",
    what: "requests for VMs and clusters, and blueprints, in all formats (the first byte)",
    feed: request,
    seeds: || text(&REQUEST_TEXTS),
    words: &[
        "; ",
        " OR ",
        "(",
        ")",
        "=",
        "!=",
        ">=",
        "<",
        "..",
        "vcpus",
        "memory_mb",
        "xpus",
        "xpu_arch",
        "hcas",
        "vfs",
        "net_mbps",
        "cpu_features",
        "numa_policy=socket",
        "gpu_hca_affinity=root",
        "page_size=2MB",
        "trait:X",
        "label:zone",
        "m1.large",
        "16K",
        "\n[[vms]]\n",
        "count = ",
        "request = '",
        "name: ",
        "environments:\n- ",
        "kind: vm",
        "adapter: slurm",
        "connections:",
        "<environment name=\"a\" kind=\"vm\">",
        "</environment>",
        "<artifact>",
        "{artifact:",
        "&a",
        "*a",
        "&lt;",
        "<![CDATA[",
        "{\"properties\":",
        "<in>",
        "<all-in>",
        "<or>",
        "s==",
    ],
    mutations: 150_000,
};

const REQUEST_TEXTS: [&str; 8] = [
    "0cg1.small; xpus>=2; xpu_arch=fermi; cpu_features=SSE4.2,CLMUL; (vcpus=4..8 OR hcas=1); trait:X=required; label:zone!=a",
    "1{\"name\":\"f\",\"vcpus\":4,\"ram\":8192,\"properties\":{\"hw:cpu_policy\":\"dedicated\",\"gpus\":\"2\",\"capabilities:cpu_info:features\":\"<all-in> a b\",\"pci_passthrough:alias\":\"h100:2\"}}",
    "6[types.a]\nrequest = \"m1.large; xpus=2; k=fast\"\n[types.b]\nrequest = \"a; (vcpus=2 OR vcpus=4)\"\n[keys.k]\nvalues = { fast = \"net_mbps>=100\" }\n[keys.r]\nlabel = \"rack\"\n[aliases.x]\ncounts = \"xpus\"\nwith = \"xpu_arch=ada\"\n",
    "1{\"vcpus\":1,\"ram\":512,\"properties\":\"hw:mem_page_size='large', gpus='<or> 1 <or> 2'\"}",
    "2name = 'cfd'\nnear = { node = 's1', max_hops = 3 }\n[compactness]\nmode = 'required'\nlevel = 'leaf'\n[anti_affinity]\nlevel = 'node'\nat_most = 8\n[[vms]]\nname = 'w'\ncount = 16\nrequest = 'm1.large; xpus=1'\n",
    "3name: c\nvms:\n- {count: 2, request: m1.small}\n- name: x\n  extra_specs: {gpus: '2'}\n",
    "4name: app\nenvironments:\n- {name: solver, kind: vm, count: 8, request: m1.large, artifacts: [i], command: [q, 'file={artifact:i}']}\n- {name: view, kind: container, adapter: slurm}\nartifacts:\n- {name: i, source: /i}\nconnections:\n- {from: solver, to: view}\n",
    "5<blueprint name=\"p\"><environment name=\"s\" kind=\"vm\" count=\"8\"><request>m1.large; xpus=1</request><artifact>i</artifact><argument>q</argument><argument>file={artifact:i}</argument></environment><artifact name=\"i\" source=\"/s\"/><connection from=\"s\" to=\"s\" network=\"bridge\"/></blueprint>",
];

fn request(bytes: &[u8]) {
    let Some((format, text)) = split(bytes) else { return };
    let catalog = Catalog::default();
    // Whatever is refused says why.
    let refused = match format % 7 {
        0 => instance::parse(text, &catalog).and_then(|expr| lower::alternatives(&expr, &catalog)).map(drop),
        1 => nova::read(text, &catalog).and_then(|read| lower::alternatives(&read.expr, &catalog)).map(drop),
        2 => cluster::read(text, cluster::Language::Toml, &catalog).map(drop),
        3 => cluster::read(text, cluster::Language::Yaml, &catalog).map(drop),
        4 => return planned(text, blueprint::Language::Yaml, &catalog),
        5 => return planned(text, blueprint::Language::Xml, &catalog),
        _ => {
            let file = Source { name: Some("types.toml".to_owned()), text: text.to_owned() };
            return drop(
                Catalog::read(&[file]).map_err(|mistakes| assert!(!mistakes.to_string().is_empty())),
            );
        }
    };
    drop(refused.map_err(|error| error.to_string()));
}

fn planned(text: &str, language: blueprint::Language, catalog: &Catalog) {
    let read = blueprint::read(text, language);
    let done = read.and_then(|blueprint| blueprint::decompose(&blueprint, catalog).map(drop));
    drop(done.map_err(|error| error.to_string()));
}
