//! `vmove fleet`.

use sched_bridge::model::{Node, NodeState};
use serde_json::{Value, json};
use vmove_client::bridge::Bridge;

use super::input::{bridge, read};
use super::show;
use crate::args::clusters::{FleetAction, FleetArgs};
use crate::failure::Failure;
use crate::output::{End, say, say_either};
use crate::page;

pub async fn run(args: FleetArgs, json: bool) -> Result<(), End> {
    let bridge = bridge(&args.at)?;
    match args.action {
        FleetAction::List => say_either(&bridge.nodes().await?, json, show::nodes),
        FleetAction::Show { node } => say_either(&bridge.node(&node).await?, json, show::node),
        FleetAction::Publish { files } => {
            let mut count = 0;
            for file in files {
                let text = read(&file)?;
                let wrong = |found: &dyn std::fmt::Display| {
                    Failure::bad_request(format!("{}: {found}", file.display()))
                };
                for node in serde_json::Deserializer::from_str(&text).into_iter::<Value>() {
                    let node = node.map_err(|e| wrong(&e))?;
                    if !node["name"].is_string() {
                        return Err(wrong(&"expected inventories with a \"name\"").into());
                    }
                    let node: Node = serde_json::from_value(node).map_err(|e| wrong(&e))?;
                    bridge.publish_node(&node).await?;
                    count += 1;
                }
            }
            say_either(&json!({ "published": count }), json, |_| format!("published {count} inventories"))
        }
        FleetAction::Drain { node } => set_state(&bridge, &node, NodeState::Drained, json).await,
        FleetAction::Resume { node } => set_state(&bridge, &node, NodeState::Up, json).await,
        FleetAction::Look { node, ended } => {
            let answer = bridge.look_at_node(&node, ended).await?;
            say_either(&answer, json, |answer| format!("the bridge looks at node {} now", answer.node))
        }
        FleetAction::Glue2 { format, site } => say(&bridge.glue2(&format, &site).await?),
        FleetAction::Page(listen) => {
            let at = args.at;
            page::of_fleet(move || super::input::bridge(&at), listen, json).await.map(drop)
        }
        FleetAction::Remove { node } => {
            bridge.remove_node(&node).await?;
            say_either(&json!({ "removed": node }), json, |_| format!("node {node} is removed"))
        }
    }
}

async fn set_state(bridge: &Bridge, node: &str, state: NodeState, json: bool) -> Result<(), End> {
    let answer = bridge.set_node_state(node, state).await?;
    say_either(&answer, json, |answer| format!("node {} is {state}", answer.node.name))
}
