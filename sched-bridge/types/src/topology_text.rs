//! Topologies as text, in any format.

use sched_bridge::picture::{self, Fleet};
use sched_bridge::topology::{Format, Topology, import as read, labels, slurm_conf, slurm_yaml};

use serde::{Deserialize, Serialize};

/// A format of topologies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum TopologyFormat {
    /// Slurm's `topology.conf`.
    #[serde(rename = "topology.conf")]
    #[cfg_attr(feature = "clap", value(name = "topology.conf"))]
    Conf,
    /// Slurm's `topology.yaml`.
    #[serde(rename = "topology.yaml")]
    #[cfg_attr(feature = "clap", value(name = "topology.yaml"))]
    Yaml,
    /// Output of `ibnetdiscover`.
    #[serde(rename = "ibnetdiscover")]
    #[cfg_attr(feature = "clap", value(name = "ibnetdiscover"))]
    Ibnetdiscover,
    /// Labels of Kubernetes nodes (`kubectl get nodes -o json`).
    #[serde(rename = "labels")]
    #[cfg_attr(feature = "clap", value(name = "labels"))]
    Labels,
    /// Plain TOML.
    #[serde(rename = "toml")]
    #[cfg_attr(feature = "clap", value(name = "toml"))]
    Toml,
}

impl From<TopologyFormat> for Format {
    fn from(format: TopologyFormat) -> Self {
        match format {
            TopologyFormat::Conf => Self::SlurmConf,
            TopologyFormat::Yaml => Self::SlurmYaml,
            TopologyFormat::Ibnetdiscover => Self::IbNetDiscover,
            TopologyFormat::Labels => Self::Labels,
            TopologyFormat::Toml => Self::Toml,
        }
    }
}

/// Reads a topology.
///
/// # Errors
/// The line, what is wrong with it, and what was expected.
pub fn import(format: TopologyFormat, text: &str) -> Result<Topology, String> {
    let imported = read(text, format.into(), &[]).map_err(|e| e.to_string())?;
    for note in &imported.notes {
        tracing::warn!("{note}");
    }
    Ok(imported.topology)
}

/// Guesses the format by the name of a file and its content.
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

/// Draws switches, nodes, their devices and who has them; without a fleet, what is taken is not known.
#[must_use]
pub fn svg(topology: &Topology, fleet: Option<&Fleet>) -> String {
    picture::draw(topology, fleet)
}
