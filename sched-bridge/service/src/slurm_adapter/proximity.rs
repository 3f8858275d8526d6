//! Keeps an environment close to the VMs that it is connected with.

use sched_bridge::model::NodeName;

use crate::slurm::{Slurm, SlurmError};
use vmove_bridge_types::adapter::Environment;

/// Nodes that are farther from `wanted.near` than the closest node with room for the job now. None if there is no such node, or all
/// are equally far.
pub(super) async fn nodes_too_far(slurm: &Slurm, wanted: &Environment) -> Result<Vec<String>, SlurmError> {
    let topology = slurm.topology().await?;
    let near: Vec<NodeName> = wanted.near.iter().filter_map(|name| NodeName::new(name).ok()).collect();
    // The most hops to one of them. An unreachable node is the farthest.
    let distance =
        |node: &NodeName| near.iter().map(|own| topology.hops(node, own).unwrap_or(u32::MAX)).max();
    let mut nodes = Vec::new();
    for node in slurm.capacity().await? {
        let needed = if wanted.kind == "bare-metal" { node.cpus } else { wanted.cores.max(1) };
        let fits = node.accepts_jobs && node.free_cpus >= needed;
        nodes.push((distance(&node.node).unwrap_or(0), fits, node.node));
    }
    let closest = nodes.iter().filter(|(_, fits, _)| *fits).map(|(distance, ..)| *distance).min();
    let Some(closest) = closest else { return Ok(Vec::new()) };
    let too_far = nodes.into_iter().filter(|(distance, ..)| *distance > closest);
    Ok(too_far.map(|(.., node)| node.to_string()).collect())
}
