//! Reads a network, a fleet and a virtual cluster, places it, says why, and plans how to empty a node.
//!
//! `cargo run -p vmove-sched --example place`

use std::error::Error;

use sched_bridge::model::{Fleet, MemoryMib, Node, NodeName, Occupancy};
use sched_bridge::moves::{Resident, evacuate};
use sched_bridge::place::{Options, Verdict, explain, place};
use sched_bridge::request::Catalog;
use sched_bridge::request::cluster::{Language, read};
use sched_bridge::topology::{Format, import};

const NETWORK: &str = "
SwitchName=leaf1 Nodes=n[1-4]
SwitchName=leaf2 Nodes=n[5-8]
SwitchName=spine Switches=leaf[1-2]
";

const CLUSTER: &str = r#"
name = "cfd"
[compactness]
mode = "required"
level = "leaf"
[anti_affinity]
level = "node"
at_most = 2
[[vms]]
name = "worker"
count = 6
request = "m1.large; memory_mb=8K OR m1.xlarge"
"#;

fn main() -> Result<(), Box<dyn Error>> {
    let topology = import(NETWORK, Format::SlurmConf, &[])?.topology;
    let mut nodes = Vec::new();
    for number in 1..=8 {
        nodes.push(Node::plain(NodeName::new(format!("n{number}"))?, 16, MemoryMib(65536)));
    }
    let fleet = Fleet::new(nodes, topology)?;
    let request = read(CLUSTER, Language::Toml, &Catalog::default())?.request;

    let mut used = Occupancy::new(&fleet);
    let placement = place(&fleet, &used, &request, &Options::default())?;
    println!("{:?}, {:?}", placement.method, placement.score);
    for node in explain(&fleet, &used, &request, Some(&placement))?.nodes {
        match node.verdict {
            Verdict::Chosen { vms } => println!("{}: {vms:?}", node.node),
            Verdict::Possible { vms, reason } => println!("{}: room for {vms}, but {reason}", node.node),
            Verdict::Rejected { reasons } => println!("{}: {}", node.node, reasons.join("; ")),
            _ => {}
        }
    }
    for assignment in &placement.assignments {
        used.take(&fleet, assignment)?;
    }

    let first = placement.assignments[0].node.clone();
    let resident = Resident { request, assignments: placement.assignments, pinned: Vec::new() };
    let plan = evacuate(&fleet, &[resident], &first)?;
    println!(
        "to empty {first}: {} moves, {}, hops {} to {}",
        plan.steps.len(),
        plan.memory,
        plan.hops.before,
        plan.hops.after
    );
    for step in plan.steps {
        println!("  {}: {} to {}", step.from.vm, step.from.node, step.to.node);
    }
    Ok(())
}
