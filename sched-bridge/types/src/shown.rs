//! What pictures show of a fleet.

use sched_bridge::model::NodeName;
use sched_bridge::picture::{Fleet, NodeSeen};

use crate::requests::{LeaseInfo, NodeSummary};

/// What pictures show of nodes and leases. A cluster may have several leases.
#[must_use]
pub fn fleet(nodes: &[NodeSummary], leases: Vec<LeaseInfo>) -> Fleet {
    let mut fleet = Fleet { nodes: nodes.iter().filter_map(seen).collect(), ..Fleet::default() };
    for lease in leases {
        let held = lease.held.into_iter().map(|held| held.assignment);
        fleet.clusters.entry(lease.cluster.to_string()).or_default().extend(held);
    }
    fleet
}

fn seen(node: &NodeSummary) -> Option<NodeSeen> {
    Some(NodeSeen {
        name: NodeName::new(node.name.as_str()).ok()?,
        state: node.state,
        gpus: node.gpus,
        gpus_free: node.gpus_free,
        adapters: node.adapters,
        adapters_free: node.adapters_free,
        cores: node.cores,
        cores_free: node.cores_free,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_with_two_leases_has_the_vms_of_both() {
        let lease = |id: &str, vm: &str| -> LeaseInfo {
            serde_json::from_value(serde_json::json!({
                "id": id, "holder": "alice", "cluster": "train", "ttl_ms": 1, "beats": 0, "granted_wall_ms": 0,
                "usage": {"held_ms": 0, "gpu_ms": 0, "adapter_ms": 0, "core_ms": 0, "memory_mib_ms": 0},
                "held": [{"vm": vm, "node": "n1"}],
            }))
            .unwrap()
        };
        let fleet = fleet(&[], vec![lease("a", "train-0"), lease("b", "train-1")]);
        assert_eq!(fleet.clusters["train"].len(), 2);
    }
}
