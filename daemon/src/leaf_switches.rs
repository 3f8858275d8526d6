//! Which leaf switch each node hangs on, out of the cluster's topology.

use std::path::Path;

use sched_bridge::topology::{Format, Imported, import};

use crate::config::{Config, ConfigError, Place};

/// Gives nodes that have no leaf switch of their own in the configuration that of the topology in `path`, in any format that
/// `vmove topology` reads. Nodes are known there by the same names.
///
/// # Errors
/// The file cannot be read, says nothing, or knows none of the nodes.
pub fn fill(config: &mut Config, path: &Path) -> Result<(), ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let wrong = |why: String| ConfigError::Value {
        place: Place::default(),
        key: "fork.topology".to_owned(),
        why: format!("{}: {why}", path.display()),
    };
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let format = Format::guess(name, &text);
    let Imported { topology, notes } =
        import(&text, format, &[]).map_err(|error| wrong(error.to_string()))?;
    for note in notes {
        tracing::warn!("{}: {note}", path.display());
    }
    let leaf = |node: &str| topology.leaf_of(node).map(|id| topology.switch(id).name.to_string());
    let mut known = false;
    let places = config.nodes.iter_mut().map(|(name, node)| (name.as_str(), &mut node.leaf));
    for (name, place) in places.chain([(config.node.as_str(), &mut config.fork.leaf)]) {
        let found = leaf(name);
        known |= found.is_some();
        if place.is_none() {
            *place = found;
        }
    }
    if known {
        return Ok(());
    }
    let mut some: Vec<&str> = topology.nodes().map(|node| node.as_str()).collect();
    some.sort_unstable();
    some.truncate(3);
    Err(wrong(format!(
        "expected the name of this node ({}) or of one in [nodes], found others only ({}, ...)",
        config.node,
        some.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::configured;

    const CONF: &str =
        "SwitchName=leaf1 Nodes=a,b\nSwitchName=leaf2 Nodes=c,d\nSwitchName=top Switches=leaf[1-2]\n";

    fn filled(name: &str, text: &str, settings: &str) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let mut config = configured(settings);
        fill(&mut config, &path).map(|()| config).map_err(|error| error.to_string())
    }

    #[test]
    fn leaves_come_from_the_topology_unless_they_are_given() {
        let nodes =
            "node = 'a'\n[nodes]\nb = 'h:1'\nc = 'h:2'\nd = { address = 'h:3', leaf = 'mine' }\nx = 'h:4'";
        let config = filled("topology.conf", CONF, nodes).unwrap();
        let leaf = |node: &str| config.nodes[node].leaf.as_deref();
        assert_eq!(config.fork.leaf.as_deref(), Some("leaf1"));
        assert_eq!(
            [leaf("b"), leaf("c"), leaf("d"), leaf("x")],
            [Some("leaf1"), Some("leaf2"), Some("mine"), None]
        );
    }

    #[test]
    fn a_topology_that_cannot_be_meant_is_explained() {
        let other = filled("topology.conf", CONF, "node = 'z'").unwrap_err();
        assert!(
            other.contains("fork.topology") && other.contains("(z)") && other.contains("(a, b, c, ...)"),
            "{other}"
        );
        let damaged = filled("topology.conf", "SwitchName=leaf1 Nodes=a[\n", "node = 'a'").unwrap_err();
        assert!(damaged.contains("fork.topology") && damaged.contains("topology.conf"), "{damaged}");
        let mut config = configured("");
        let missing = fill(&mut config, Path::new("/nowhere/topology.conf")).unwrap_err().to_string();
        assert!(missing.contains("/nowhere/topology.conf"), "{missing}");
    }
}
