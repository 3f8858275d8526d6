//! `vmove topology`.

use std::collections::BTreeMap;

use sched_bridge::model::Assignment;
use sched_bridge::topology::Topology;
use vmove_bridge_types::requests::TopologyText;
use vmove_bridge_types::topology_text;
use vmove_types::units::number_of;

use super::input::{bridge, read};
use crate::args::clusters::TopologyArgs;
use crate::failure::Failure;
use crate::output::{End, say, say_either};

pub async fn run(args: TopologyArgs, json: bool) -> Result<(), End> {
    let topology = match &args.import {
        Some(path) => {
            let text = read(path)?;
            let format = args.format.unwrap_or_else(|| topology_text::guess(&path.to_string_lossy(), &text));
            let topology = topology_text::import(format, &text)
                .map_err(|e| Failure::bad_request(format!("{}: {e}", path.display())))?;
            if args.publish {
                bridge(&args.at)?.publish_topology(&TopologyText { format, text }).await?;
            }
            topology
        }
        None => bridge(&args.at)?.topology().await?,
    };
    if let Some(path) = &args.svg {
        let picture = topology_text::svg(&topology, &clusters(&args).await);
        std::fs::write(path, picture)
            .map_err(|e| Failure::bad_request(format!("could not write {}: {e}", path.display())))?;
    }
    match args.export.as_deref() {
        Some(format) => say(&topology_text::export(format, &topology).map_err(Failure::bad_request)?),
        None => say_either(&topology, json, summary),
    }
}

fn summary(topology: &Topology) -> String {
    format!(
        "{} on {}, {}",
        number_of(topology.switches().len() as u64, "switch", "switches"),
        number_of(topology.height().into(), "level", "levels"),
        number_of(topology.nodes().count() as u64, "node", "nodes")
    )
}

/// The VMs of each cluster; none if no bridge answers.
async fn clusters(args: &TopologyArgs) -> BTreeMap<String, Vec<Assignment>> {
    let Ok(bridge) = bridge(&args.at) else { return BTreeMap::new() };
    let Ok(answer) = bridge.leases(None).await else { return BTreeMap::new() };
    let places = |lease: vmove_bridge_types::requests::LeaseInfo| {
        (lease.cluster.to_string(), lease.held.into_iter().map(|held| held.assignment).collect())
    };
    answer.leases.into_iter().map(places).collect()
}
