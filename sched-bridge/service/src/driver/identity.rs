//! Whether the daemon that answers for a node is that node's: a command that leads elsewhere must not make one node's VMs look like another's.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use sched_bridge::model::NodeName;
use serde_json::Value;

/// By node, which other one has answered for it; `None`: none.
#[derive(Debug, Default)]
pub(super) struct Identities(Mutex<BTreeMap<NodeName, Option<String>>>);

impl Identities {
    /// Takes note of who has listed its VMs for a node. A daemon of before does not say who it is.
    pub(super) fn note(&self, asked: &NodeName, list: &Value) {
        let Some(name) = list["node"].as_str() else { return };
        let other = (!is_name_of(name, asked.as_str())).then(|| name.to_owned());
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.insert(asked.clone(), other.clone()).flatten();
        drop(known);
        match other {
            Some(other) if before.as_ref() != Some(&other) => tracing::warn!(
                node = %asked,
                answered = other,
                "another node's daemon answers for a node: its answers are not used"
            ),
            None if before.is_some() => tracing::info!(node = %asked, "a node answers for itself again"),
            _ => {}
        }
    }

    /// It has answered for itself before, and nobody else has since.
    pub(super) fn is_trusted(&self, node: &NodeName) -> bool {
        matches!(self.0.lock().unwrap_or_else(PoisonError::into_inner).get(node), Some(None))
    }

    /// Why a node must not be asked for anything: the last answer came from another.
    pub(super) fn refusal(&self, node: &NodeName) -> Option<String> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let other = known.get(node)?.as_ref()?;
        Some(format!(
            "node {node} does not answer: expected the daemon of {node}, found that of {other}. Let the [moves] command and [daemons.{node}] \
             of vbridged lead to {node}, or give its daemon that name (`node` in vmoved.toml)"
        ))
    }
}

/// Whether a daemon of this name is the node's: one of both may have no domain.
fn is_name_of(daemon: &str, node: &str) -> bool {
    let both_whole = daemon.contains('.') && node.contains('.');
    let part = |name: &str| if both_whole { name } else { name.split('.').next().unwrap_or(name) }.to_owned();
    part(daemon).eq_ignore_ascii_case(&part(node))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_lack_its_domain() {
        for (daemon, node, same) in [
            ("n1", "n1", true),
            ("n1.example.org", "n1", true),
            ("N1", "n1.example.org", true),
            ("n2", "n1", false),
            ("n1.example.org", "n1.example.net", false),
            ("", "n1", false),
        ] {
            assert_eq!(is_name_of(daemon, node), same, "{daemon} {node}");
        }
    }
}
