//! Labels of Kubernetes nodes that say where a node is in the network (NVIDIA Topograph, AWS, GCP, OCI).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::names::valid;
use super::{Builder, Origin, Style, SwitchName, SwitchSpec, Topology, TopologyError};
use crate::ids::NodeName;

/// Families of labels, each from the nodes up.
const FAMILIES: [&[&str]; 5] = [
    &[
        "network.topology.nvidia.com/accelerator",
        "network.topology.nvidia.com/leaf",
        "network.topology.nvidia.com/spine",
        "network.topology.nvidia.com/core",
    ],
    &[
        "topology.k8s.aws/network-node-layer-3",
        "topology.k8s.aws/network-node-layer-2",
        "topology.k8s.aws/network-node-layer-1",
    ],
    &["cloud.google.com/gce-topology-subblock", "cloud.google.com/gce-topology-block"],
    &["oci.oraclecloud.com/host.rack_id", "oci.oraclecloud.com/host.network_block_id"],
    &["topology.kubernetes.io/zone", "topology.kubernetes.io/region"],
];

/// A tree from the labels of nodes, by the first family of which any node has a label. A level for which a node has no label is
/// skipped. Equal names on one level are one switch.
///
/// # Errors
/// No known label; a switch that is below two others.
pub fn read(nodes: &[(NodeName, BTreeMap<String, String>)]) -> Result<Topology, TopologyError> {
    let family = FAMILIES
        .iter()
        .find(|family| nodes.iter().any(|(_, labels)| family.iter().any(|key| labels.contains_key(*key))));
    let Some(family) = family else {
        let known: Vec<&str> = FAMILIES.iter().flat_map(|family| family.iter().copied()).collect();
        return Err(TopologyError::syntax(
            0,
            "no node has a label that says where it is in the network",
            known.join(", "),
        ));
    };
    let mut specs: BTreeMap<String, SwitchSpec> = BTreeMap::new();
    for (node, labels) in nodes {
        let path: Vec<String> = family
            .iter()
            .filter_map(|key| labels.get(*key).map(|value| format!("{}-{value}", short(key))))
            .collect();
        for (at, name) in path.iter().enumerate() {
            if !specs.contains_key(name) {
                specs.insert(name.clone(), SwitchSpec::new(valid(SwitchName::new(name), 0)?));
            }
            let Some(spec) = specs.get_mut(name) else { continue };
            if at == 0 {
                spec.nodes.push(node.clone());
            } else {
                let below = valid(SwitchName::new(&path[at - 1]), 0)?;
                if !spec.switches.contains(&below) {
                    spec.switches.push(below);
                }
            }
        }
    }
    let mut builder = Builder::new();
    for spec in specs.into_values() {
        builder.add(spec, Origin::default());
    }
    builder.build(Style::Tree)
}

/// The name of a level, as part of names of switches.
fn short(key: &str) -> &str {
    key.rsplit('/').next().unwrap_or(key).trim_start_matches("gce-topology-").trim_start_matches("host.")
}

/// Reads nodes and labels from `kubectl get nodes -o json`, or from a map of node names to labels.
///
/// # Errors
/// Text that is neither, with its line.
pub fn read_json(text: &str) -> Result<Topology, TopologyError> {
    #[derive(serde::Deserialize)]
    struct List {
        items: Vec<Item>,
    }
    #[derive(serde::Deserialize)]
    struct Item {
        metadata: Metadata,
    }
    #[derive(serde::Deserialize)]
    struct Metadata {
        name: NodeName,
        #[serde(default)]
        labels: BTreeMap<String, String>,
    }
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum Either {
        List(List),
        Map(BTreeMap<NodeName, BTreeMap<String, String>>),
    }
    let either: Either = serde_json::from_str(text).map_err(|error| {
        TopologyError::syntax(
            error.line(),
            error.to_string(),
            "the output of `kubectl get nodes -o json`, or {node: {label: value}}",
        )
    })?;
    let nodes: Vec<_> = match either {
        Either::List(list) => {
            list.items.into_iter().map(|item| (item.metadata.name, item.metadata.labels)).collect()
        }
        Either::Map(map) => map.into_iter().collect(),
    };
    read(&nodes)
}

/// Labels for every node: leaf, spine and core, as Topograph names them; higher levels are left out. Names of more than 63 characters,
/// which Kubernetes does not take, are replaced by their hash (FNV-1a, 64 bits).
#[must_use]
pub fn labels(topology: &Topology) -> BTreeMap<NodeName, BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for node in topology.nodes() {
        let upwards = topology.path(node).into_iter().rev();
        let keys = FAMILIES[0][1..].iter();
        let own = keys
            .zip(upwards)
            .map(|(key, id)| ((*key).to_owned(), value(topology.switch(id).name.as_str())))
            .collect();
        all.insert(node.clone(), own);
    }
    all
}

/// The labels as `kubectl label node` commands, one on each line.
#[must_use]
pub fn write(topology: &Topology) -> String {
    let mut text = String::new();
    for (node, labels) in labels(topology) {
        let words: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let _ = writeln!(text, "kubectl label node --overwrite {node} {}", words.join(" "));
    }
    text
}

fn value(name: &str) -> String {
    let plain: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect();
    let plain = plain.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    if plain.len() <= 63 && !plain.is_empty() {
        return plain.to_owned();
    }
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}
