//! The commands of `vmove` that speak with a bridge. The `vmove` binary takes them over as they are.

pub mod args;
mod blueprint;
mod client;
mod inventory;
mod place;
mod plan;
mod show;
mod topology;

use std::io::Write;
use std::path::Path;

use hyper::Method;
use serde_json::{Value, json};

use self::args::{AccountArgs, BridgeCommand, FleetAction, FleetArgs, LeaseAction, LeaseArgs};
use self::client::{Client, segment};
use crate::api::problem::Problem;

/// What a command came to: what it says, and what the process ends with.
type Said = Result<(), Problem>;

/// Runs a command; gives the exit code of the process: 0 done, 1 failed, 2 wrong usage, 3 does not fit, 5 no bridge.
pub async fn run(command: BridgeCommand, json: bool) -> u8 {
    let said = match command {
        BridgeCommand::Inventory(args) => inventory::run(args, json).await,
        BridgeCommand::Blueprint(args) => blueprint::run(args, json).await,
        BridgeCommand::Fleet(args) => fleet(args, json).await,
        BridgeCommand::Topology(args) => topology::run(args, json).await,
        BridgeCommand::Place(args) => place::run(args, json).await,
        BridgeCommand::Lease(args) => lease(args, json).await,
        BridgeCommand::Plan(args) => plan::run(args, json).await,
        BridgeCommand::Account(args) => account(args).await,
    };
    let Err(problem) = said else { return 0 };
    let _ = writeln!(std::io::stderr().lock(), "vmove: {problem}");
    if json {
        let _ =
            say(&json!({ "error": problem.message, "code": problem.code, "exit_code": problem.exit_code })
                .to_string());
    }
    problem.exit_code
}

/// Prints to standard output. A reader that has gone (`| head`) is no error.
fn say(text: &str) -> Said {
    let mut out = std::io::stdout().lock();
    let end = if text.ends_with('\n') || text.is_empty() { "" } else { "\n" };
    match write!(out, "{text}{end}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Problem::bad(error)),
        _ => Ok(()),
    }
}

/// JSON for programs, something else for people.
fn show(value: &Value, json: bool, people: impl FnOnce(&Value) -> String) -> Said {
    if json { say(&value.to_string()) } else { say(&people(value)) }
}

/// A file, or standard input.
fn read(path: &Path) -> Result<String, Problem> {
    let text = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(path)
    };
    text.map_err(|e| Problem::bad(format!("could not read {}: {e}", path.display())))
}

async fn fleet(args: FleetArgs, json: bool) -> Said {
    let client = Client::new(&args.at)?;
    let path = |node: &str| format!("/v1/nodes/{}", segment(node));
    match args.action {
        FleetAction::List => show(&client.get("/v1/nodes").await?, json, show::nodes),
        FleetAction::Show { node } => show(&client.get(&path(&node)).await?, json, show::pretty),
        FleetAction::Publish { files } => {
            let mut count = 0;
            for file in files {
                let text = read(&file)?;
                for node in serde_json::Deserializer::from_str(&text).into_iter::<Value>() {
                    let node = node.map_err(|e| Problem::bad(format!("{}: {e}", file.display())))?;
                    let name = node["name"].as_str().ok_or_else(|| {
                        Problem::bad(format!("{}: expected inventories with a \"name\"", file.display()))
                    })?;
                    client.ask(Method::PUT, &path(name), Some(&node)).await?;
                    count += 1;
                }
            }
            show(&json!({ "published": count }), json, |_| format!("{count} inventories published"))
        }
        FleetAction::Drain { node } => state(&client, &path(&node), "drained", json).await,
        FleetAction::Resume { node } => state(&client, &path(&node), "up", json).await,
        FleetAction::Remove { node } => {
            client.ask(Method::DELETE, &path(&node), None::<&()>).await?;
            show(&json!({ "removed": node }), json, |_| format!("node {node} is forgotten"))
        }
    }
}

async fn state(client: &Client, path: &str, state: &str, json: bool) -> Said {
    let answer = client.ask(Method::PUT, &format!("{path}/state"), Some(&json!({ "state": state }))).await?;
    show(&answer, json, |answer| {
        format!("node {} is {state}", answer["node"]["name"].as_str().unwrap_or_default())
    })
}

async fn lease(args: LeaseArgs, json: bool) -> Said {
    let client = Client::new(&args.at)?;
    let path = |id: &str| format!("/v1/leases/{}", segment(id));
    match args.action {
        LeaseAction::List { holder } => {
            let query = holder.map(|holder| format!("?holder={}", segment(&holder))).unwrap_or_default();
            show(&client.get(&format!("/v1/leases{query}")).await?, json, show::leases)
        }
        LeaseAction::Show { id } => show(&client.get(&path(&id)).await?, json, show::lease),
        LeaseAction::Renew { id } => {
            let answer = client.ask(Method::POST, &format!("{}/renew", path(&id)), None::<&()>).await?;
            show(&answer, json, show::lease)
        }
        LeaseAction::Keep { id } => loop {
            let answer = client.ask(Method::POST, &format!("{}/renew", path(&id)), None::<&()>).await;
            let wait = match answer {
                Ok(lease) => lease["ttl_ms"].as_u64().unwrap_or(3000) / 3,
                // The bridge may come back in time; that the lease has ended, only a bridge can say.
                Err(problem) if problem.exit_code == 5 => 500,
                Err(problem) => return Err(problem),
            };
            tokio::time::sleep(std::time::Duration::from_millis(wait)).await;
        },
        LeaseAction::Release { id } => {
            let record = client.ask(Method::DELETE, &path(&id), None::<&()>).await?;
            show(&record, json, |r| {
                format!("given back after {:.4} GPU-hours", r["gpu_hours"].as_f64().unwrap_or(0.0))
            })
        }
    }
}

async fn account(args: AccountArgs) -> Said {
    let client = Client::new(&args.at)?;
    let mut query = format!("?format={}", if args.csv { "csv" } else { "jsonl" });
    if let Some(holder) = args.holder {
        query.push_str(&format!("&holder={}", segment(&holder)));
    }
    if let Some(since) = args.since {
        query.push_str(&format!("&since_ms={since}"));
    }
    say(&client.text(Method::GET, &format!("/v1/account{query}"), None::<&()>).await?)
}
