//! Which nodes are further away from others than need be.

use sched_bridge::model::NodeName;

use super::Environment;
use crate::slurm::{Slurm, SlurmError};

/// Nodes that a job need not go to, as there is room for it now closer to the nodes that it is to be near to; none if there is no room
/// anywhere, or all are equally far.
pub(super) async fn too_far(slurm: &Slurm, wanted: &Environment) -> Result<Vec<String>, SlurmError> {
    let topology = slurm.topology().await?;
    let near: Vec<NodeName> = wanted.near.iter().filter_map(|name| NodeName::new(name).ok()).collect();
    // Most switches between a node and one of those; one that cannot be reached is the furthest.
    let far = |node: &NodeName| near.iter().map(|own| topology.hops(node, own).unwrap_or(u32::MAX)).max();
    let mut nodes = Vec::new();
    for room in slurm.room().await? {
        let needed = if wanted.kind == "bare-metal" { room.cpus } else { wanted.cores.max(1) };
        let fits = room.open && room.free >= needed;
        nodes.push((far(&room.node).unwrap_or(0), fits, room.node));
    }
    let least = nodes.iter().filter(|(_, fits, _)| *fits).map(|(far, ..)| *far).min();
    let Some(least) = least else { return Ok(Vec::new()) };
    Ok(nodes.into_iter().filter(|(far, ..)| *far > least).map(|(.., node)| node.to_string()).collect())
}
