//! Slurm's `topology.yaml`: several topologies, each a tree, blocks, or flat.

use serde::{Deserialize, Serialize};

use super::hostlist::compress;
use super::names::{node_names, switch_names, texts, valid};
use super::{Builder, Origin, Style, SwitchName, SwitchSpec, Topology, TopologyError, block};
use crate::ids::NodeName;
use crate::unreadable::Unreadable;

/// One topology of the file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    topology: String,
    #[serde(default)]
    cluster_default: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tree: Option<Tree>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    block: Option<Blocks>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    flat: Option<bool>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tree {
    switches: Vec<TreeSwitch>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TreeSwitch {
    switch: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    children: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nodes: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Blocks {
    #[serde(default)]
    block_sizes: Vec<u32>,
    blocks: Vec<Block>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Block {
    block: String,
    nodes: String,
}

/// Reads one topology of a `topology.yaml`: the named one, or else the cluster's default, or else the first. A flat topology names no
/// nodes: `all_nodes` are put below one switch.
///
/// # Errors
/// What is wrong, with its line.
pub fn read(text: &str, name: Option<&str>, all_nodes: &[NodeName]) -> Result<Topology, TopologyError> {
    let entries: Vec<Entry> = serde_yaml_ng::from_str(text).map_err(|error| {
        let expected = "a list of topologies, each with tree, block or flat";
        let Unreadable { line, reason, expected, .. } = Unreadable::yaml(&error, expected);
        TopologyError::syntax(line, reason, expected)
    })?;
    let chosen = match name {
        Some(name) => entries.iter().find(|entry| entry.topology == name),
        None => entries.iter().find(|entry| entry.cluster_default).or(entries.first()),
    };
    let names: Vec<&str> = entries.iter().map(|entry| entry.topology.as_str()).collect();
    let entry = chosen.ok_or_else(|| {
        TopologyError::syntax(
            0,
            format!("no topology {}", name.unwrap_or("at all")),
            format!("one of: {}", names.join(", ")),
        )
    })?;
    let line = line_of(text, &entry.topology);
    match (&entry.tree, &entry.block, entry.flat) {
        (Some(tree), None, None | Some(false)) => read_tree(tree, text, line),
        (None, Some(blocks), None | Some(false)) => read_blocks(blocks, text, line),
        (None, None, Some(true)) => flat(all_nodes),
        _ => Err(TopologyError::syntax(
            line,
            format!("topology {} must have one kind", entry.topology),
            "exactly one of tree, block and flat: true",
        )),
    }
}

/// Line of the first occurrence of a word; 0 if there is none.
fn line_of(text: &str, word: &str) -> usize {
    text.lines().position(|line| line.contains(word)).map_or(0, |at| at + 1)
}

fn read_tree(tree: &Tree, text: &str, line: usize) -> Result<Topology, TopologyError> {
    let mut builder = Builder::new();
    for described in &tree.switches {
        let line = line_of(text, &format!("switch: {}", described.switch)).max(line);
        let mut spec = SwitchSpec::new(valid(SwitchName::new(&described.switch), line)?);
        if let Some(children) = &described.children {
            spec.switches = switch_names(children, line)?;
        }
        if let Some(nodes) = &described.nodes {
            spec.nodes = node_names(nodes, line)?;
        }
        if spec.switches.is_empty() && spec.nodes.is_empty() {
            let reason = format!("switch {} has nothing below it", described.switch);
            return Err(TopologyError::syntax(line, reason, "children: or nodes:"));
        }
        builder.add(spec, Origin::line(line));
    }
    builder.build(Style::Tree)
}

fn read_blocks(blocks: &Blocks, text: &str, line: usize) -> Result<Topology, TopologyError> {
    let mut specs = Vec::new();
    for described in &blocks.blocks {
        let line = line_of(text, &format!("block: {}", described.block)).max(line);
        let mut spec = SwitchSpec::new(valid(SwitchName::new(&described.block), line)?);
        spec.nodes = node_names(&described.nodes, line)?;
        specs.push((spec, line));
    }
    if blocks.block_sizes.contains(&0) {
        return Err(TopologyError::syntax(line, "block size 0", "numbers of nodes, at least 1"));
    }
    let sizes = block::check(blocks.block_sizes.clone(), line)?;
    block::build(specs, (!sizes.is_empty()).then_some((sizes, line)))
}

fn flat(nodes: &[NodeName]) -> Result<Topology, TopologyError> {
    let mut spec = SwitchSpec::new(valid(SwitchName::new("flat"), 0)?);
    spec.nodes = nodes.to_vec();
    let mut builder = Builder::new();
    builder.add(spec, Origin::default());
    builder.build(Style::Flat)
}

/// Writes a `topology.yaml` with one topology of this name, which is the cluster's default.
///
/// # Errors
/// None in practice: every topology can be written as YAML.
pub fn write(topology: &Topology, name: &str) -> Result<String, TopologyError> {
    let mut entry =
        Entry { topology: name.to_owned(), cluster_default: true, tree: None, block: None, flat: None };
    match topology.style() {
        Style::Flat => entry.flat = Some(true),
        Style::Block { sizes } => {
            let of = |id| {
                let switch = topology.switch(id);
                Block { block: switch.name.to_string(), nodes: compress(&texts(&switch.nodes)) }
            };
            let blocks = block::blocks(topology).map(of).collect();
            entry.block = Some(Blocks { block_sizes: sizes.clone(), blocks });
        }
        Style::Tree => {
            let of = |id| {
                let switch = topology.switch(id);
                let children: Vec<&str> =
                    switch.children.iter().map(|id| topology.switch(*id).name.as_str()).collect();
                TreeSwitch {
                    switch: switch.name.to_string(),
                    children: (!children.is_empty()).then(|| compress(&children)),
                    nodes: (!switch.nodes.is_empty()).then(|| compress(&texts(&switch.nodes))),
                }
            };
            entry.tree = Some(Tree { switches: topology.ids().map(of).collect() });
        }
    }
    serde_yaml_ng::to_string(&[entry])
        .map_err(|error| TopologyError::syntax(0, error.to_string(), "a topology that can be written"))
}
