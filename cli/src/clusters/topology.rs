//! `vmove topology`.

use sched_bridge::picture::Fleet;
use sched_bridge::topology::Topology;
use vmove_bridge_types::requests::TopologyText;
use vmove_bridge_types::{shown, topology_text};
use vmove_client::bridge::{Bridge, Error};
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
        let picture = topology_text::svg(&topology, fleet(&args).await?.as_ref());
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

/// What the bridge knows. A topology from a file is drawn without a bridge, too; the picture then says so.
async fn fleet(args: &TopologyArgs) -> Result<Option<Fleet>, Failure> {
    match ask(&bridge(&args.at)?).await {
        Ok(fleet) => Ok(Some(fleet)),
        Err(Error::Unreachable { .. }) if args.import.is_some() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

async fn ask(bridge: &Bridge) -> Result<Fleet, Error> {
    let nodes = bridge.nodes().await?.nodes;
    Ok(shown::fleet(&nodes, bridge.leases(None).await?.leases))
}
