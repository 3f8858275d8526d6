//! `vfork join`: waits until all children of a VM have ended.

use std::time::Duration;

use tokio::time::Instant;
use vmove_client::Client;
use vmove_types::fork::ForkNode;
use vmove_types::problem::{Code, Exit, Problem};
use vmove_types::units::number_of;

use super::PROGRESS_INTERVAL;
use crate::args::vfork::Join;
use crate::failure::Failure;
use crate::output::{End, say, say_json};
use crate::waiting::{Step, Wait};

/// How often other nodes are asked.
const OTHER_NODES_INTERVAL: Duration = Duration::from_secs(1);
/// So many children are named at most.
const NAMED: usize = 4;

pub async fn join(client: &Client, args: &Join, json: bool) -> Result<Exit, End> {
    let vm = &args.vm;
    let left = format!(
        "children of {vm} go on: `vfork tree {vm}` shows them, `vfork join {vm}` waits again, `vfork kill CHILD` ends one"
    );
    let wait = Wait::of_vfork(json, format!("children of {vm} end"), left);
    let step = Step::default();
    let node = wait.answer_of_steps(&step, all_have_ended(client, args, &step)).await?;
    if json {
        say_json(&node)?;
    } else {
        say(&all_ended(node.children.len(), vm))?;
    }
    Ok(Exit::Done)
}

/// Waits until all children of a VM have ended, and says which have not.
async fn all_have_ended(client: &Client, args: &Join, step: &Step) -> Result<ForkNode, Failure> {
    let until = args.timeout.map(|ms| Instant::now() + Duration::from_millis(ms));
    loop {
        let node = client.fork_tree(&args.vm, true).await?;
        let alive: Vec<&ForkNode> = node.children.iter().filter(|child| child.status != "ended").collect();
        if alive.is_empty() {
            return Ok(node);
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            let left = alive.len();
            let (of, have) = if left == 1 { ("child of", "has") } else { ("children of", "have") };
            let text = format!("{left} {of} {:?} {have} not ended, or cannot be asked", args.vm);
            return Err(Problem::new(Code::Busy, text).into());
        }
        step.set(still_alive(&alive, &args.vm));
        let away = alive.iter().any(|child| child.status == "elsewhere");
        tokio::time::sleep(if away { OTHER_NODES_INTERVAL } else { PROGRESS_INTERVAL }).await;
    }
}

/// Which children are waited for: a few of them by name.
fn still_alive(alive: &[&ForkNode], vm: &str) -> String {
    let named: Vec<&str> = alive.iter().take(NAMED).map(|child| child.name.as_str()).collect();
    let more = alive.len() - named.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let count = number_of(alive.len() as u64, "child", "children");
    let end = if alive.len() == 1 { "ends" } else { "end" };
    format!("{count} of {vm} {end}: {}{more}", named.join(", "))
}

fn all_ended(children: usize, vm: &str) -> String {
    match children {
        0 => format!("{vm:?} has no children"),
        1 => format!("The only child of {vm:?} has ended"),
        many => format!("All {many} children of {vm:?} have ended"),
    }
}
