//! Lists of names in files.

use super::TopologyError;
use super::hostlist::expand;
use crate::ids::{IdError, NodeName, SwitchName};

/// The nodes of a hostlist.
pub(super) fn node_names(list: &str, line: usize) -> Result<Vec<NodeName>, TopologyError> {
    expand(list, line)?.into_iter().map(|name| valid(NodeName::new(name), line)).collect()
}

/// The switches of a hostlist.
pub(super) fn switch_names(list: &str, line: usize) -> Result<Vec<SwitchName>, TopologyError> {
    expand(list, line)?.into_iter().map(|name| valid(SwitchName::new(name), line)).collect()
}

/// A name that stands in this line.
pub(super) fn valid<T>(name: Result<T, IdError>, line: usize) -> Result<T, TopologyError> {
    name.map_err(|error| TopologyError::syntax(line, error.to_string(), "a name"))
}

/// Names as text.
pub(super) fn texts(names: &[NodeName]) -> Vec<&str> {
    names.iter().map(NodeName::as_str).collect()
}
