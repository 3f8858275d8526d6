//! Reads a topology in any format.

use super::{Imported, Topology, TopologyError, ibnet, labels, slurm_conf, slurm_yaml};
use crate::ids::NodeName;

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
/// What is wrong, with its line.
pub fn import(text: &str, format: Format, all_nodes: &[NodeName]) -> Result<Imported, TopologyError> {
    let topology = match format {
        Format::IbNetDiscover => return ibnet::read(text),
        Format::SlurmConf => slurm_conf::read(text)?,
        Format::SlurmYaml => slurm_yaml::read(text, None, all_nodes)?,
        Format::Labels => labels::read_json(text)?,
        Format::Toml => toml::from_str::<Topology>(text).map_err(|error| {
            let line =
                error.span().map_or(0, |span| text[..span.start.min(text.len())].lines().count().max(1));
            TopologyError::syntax(
                line,
                error.message().to_owned(),
                "[[switches]] with name, and switches or nodes as lists",
            )
        })?,
    };
    Ok(Imported { topology, notes: Vec::new() })
}
