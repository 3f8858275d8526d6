//! `vmove topology`.

use std::collections::BTreeMap;

use hyper::Method;
use sched_bridge::model::Assignment;
use sched_bridge::topology::Topology;
use serde_json::{Value, json};

use super::args::TopologyArgs;
use super::client::Client;
use super::{Said, read, say, show};
use crate::api::problem::Problem;
use crate::topology_text;

pub async fn run(args: TopologyArgs, as_json: bool) -> Said {
    let topology = match &args.import {
        Some(path) => {
            let text = read(path)?;
            let format = args.format.unwrap_or_else(|| topology_text::guess(&path.to_string_lossy(), &text));
            let topology = topology_text::import(format, &text)
                .map_err(|e| Problem::bad(format!("{}: {e}", path.display())))?;
            if args.publish {
                let body = json!({ "format": format, "text": text });
                Client::new(&args.at)?.ask(Method::PUT, "/v1/topology", Some(&body)).await?;
            }
            topology
        }
        None => {
            serde_json::from_value(Client::new(&args.at)?.get("/v1/topology").await?).map_err(Problem::bad)?
        }
    };
    if let Some(path) = &args.svg {
        let picture = topology_text::svg(&topology, &clusters(&args, &topology).await);
        std::fs::write(path, picture)
            .map_err(|e| Problem::bad(format!("could not write {}: {e}", path.display())))?;
    }
    match args.export.as_deref() {
        Some(format) => say(&topology_text::export(format, &topology).map_err(Problem::bad)?),
        None => show(&json!(topology), as_json, |_| summary(&topology)),
    }
}

fn summary(topology: &Topology) -> String {
    format!(
        "{} switches on {} levels, {} nodes",
        topology.switches().len(),
        topology.height(),
        topology.nodes().count()
    )
}

/// Who sits where; nobody, if no bridge answers: the picture is of the switches then.
async fn clusters(args: &TopologyArgs, _topology: &Topology) -> BTreeMap<String, Vec<Assignment>> {
    let Ok(client) = Client::new(&args.at) else { return BTreeMap::new() };
    let Ok(answer) = client.get("/v1/leases").await else { return BTreeMap::new() };
    let leases = answer["leases"].as_array().cloned().unwrap_or_default();
    let sits = |lease: &Value| {
        let held: Vec<Assignment> = serde_json::from_value(lease["held"].clone()).ok()?;
        Some((lease["cluster"].as_str()?.to_owned(), held))
    };
    leases.iter().filter_map(sits).collect()
}
