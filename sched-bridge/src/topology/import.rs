//! Reads a topology in any format.

use super::build::TopologyFile;
use super::{Imported, Topology, TopologyError, ibnet, labels, slurm_conf, slurm_yaml};
use crate::ids::NodeName;
use crate::unreadable::Unreadable;

/// Format of a topology.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// Slurm's `topology.conf`.
    SlurmConf,
    /// Slurm's `topology.yaml`.
    SlurmYaml,
    /// Output of `ibnetdiscover`.
    IbNetDiscover,
    /// Kubernetes nodes with labels, as JSON.
    Labels,
    /// A list of `[[switches]]` with `name`, `switches`, `nodes` and `link_speed`.
    Toml,
}

impl Format {
    /// Guesses by the extension of the file's name, or else by the text.
    #[must_use]
    pub fn guess(file_name: &str, text: &str) -> Self {
        let end = file_name.rsplit('.').next().unwrap_or("").to_ascii_lowercase();
        let has =
            |word: &str| text.lines().any(|line| line.trim_start().to_ascii_lowercase().starts_with(word));
        match end.as_str() {
            "yaml" | "yml" => Self::SlurmYaml,
            "toml" => Self::Toml,
            "json" => Self::Labels,
            _ if has("switchname=") || has("blockname=") => Self::SlurmConf,
            _ if has("switchguid=") || has("switch\t") || has("caguid=") => Self::IbNetDiscover,
            _ if has("[[switches]]") => Self::Toml,
            _ if text.trim_start().starts_with('{') => Self::Labels,
            _ if has("- topology:") => Self::SlurmYaml,
            _ => Self::SlurmConf,
        }
    }
}

/// Reads a topology. `all_nodes` are those of the fleet: a flat `topology.yaml` names none itself.
///
/// # Errors
/// What is wrong, with its line; or there is no switch at all.
pub fn import(text: &str, format: Format, all_nodes: &[NodeName]) -> Result<Imported, TopologyError> {
    let imported = match format {
        Format::IbNetDiscover => ibnet::read(text)?,
        Format::SlurmConf => without_notes(slurm_conf::read(text)?),
        Format::SlurmYaml => without_notes(slurm_yaml::read(text, None, all_nodes)?),
        Format::Labels => without_notes(labels::read_json(text)?),
        Format::Toml => without_notes(read_toml(text)?),
    };
    // Whoever publishes it would take every node out of the network. A flat network has a switch, too.
    if imported.topology.switches().is_empty() {
        return Err(TopologyError::NoSwitch);
    }
    Ok(imported)
}

fn without_notes(topology: Topology) -> Imported {
    Imported { topology, notes: Vec::new() }
}

fn read_toml(text: &str) -> Result<Topology, TopologyError> {
    let file: TopologyFile = toml::from_str(text).map_err(|error| {
        let expected = "[[switches]] with name, and switches or nodes as lists";
        let Unreadable { line, reason, expected, .. } = Unreadable::toml(text, &error, expected);
        TopologyError::syntax(line, reason, expected)
    })?;
    file.try_into()
}
