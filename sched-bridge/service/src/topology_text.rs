//! Topologies in their formats, as texts.

use std::collections::BTreeMap;

use sched_bridge::model::Assignment;
use sched_bridge::topology::{
    Format, Topology, import as read, labels, slurm_conf, slurm_yaml, svg as picture,
};

use crate::api::types::TopologyFormat;

/// Reads a topology.
///
/// # Errors
/// The line, what is wrong with it, and what was expected.
pub fn import(format: TopologyFormat, text: &str) -> Result<Topology, String> {
    let format = match format {
        TopologyFormat::Conf => Format::SlurmConf,
        TopologyFormat::Yaml => Format::SlurmYaml,
        TopologyFormat::Ibnetdiscover => Format::IbNetDiscover,
        TopologyFormat::Labels => Format::Labels,
        TopologyFormat::Toml => Format::Toml,
    };
    let imported = read(text, format, &[]).map_err(|e| e.to_string())?;
    for note in &imported.notes {
        tracing::warn!("{note}");
    }
    Ok(imported.topology)
}

/// Guesses the format by a file's name and its content.
#[must_use]
pub fn guess(name: &str, text: &str) -> TopologyFormat {
    match Format::guess(name, text) {
        Format::SlurmYaml => TopologyFormat::Yaml,
        Format::IbNetDiscover => TopologyFormat::Ibnetdiscover,
        Format::Labels => TopologyFormat::Labels,
        Format::Toml => TopologyFormat::Toml,
        _ => TopologyFormat::Conf,
    }
}

/// Writes a topology as `topology.conf`, `topology.yaml` or `labels`.
///
/// # Errors
/// The format cannot express it.
pub fn export(format: &str, topology: &Topology) -> Result<String, String> {
    match format {
        "topology.conf" => Ok(slurm_conf::write(topology)),
        "topology.yaml" => slurm_yaml::write(topology, "fabric").map_err(|e| e.to_string()),
        "labels" => Ok(labels::write(topology)),
        other => Err(format!("format {other:?}: expected topology.conf, topology.yaml or labels")),
    }
}

/// Draws switches, nodes, and who sits where.
#[must_use]
pub fn svg(topology: &Topology, clusters: &BTreeMap<String, Vec<Assignment>>) -> String {
    picture::draw(topology, clusters)
}
