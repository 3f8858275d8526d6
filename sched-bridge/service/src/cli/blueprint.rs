//! `vmove blueprint`: takes a blueprint apart; with `--run`, leases what its VMs need and hands the rest to adapters.

use std::collections::BTreeSet;

use hyper::Method;
use sched_bridge::blueprint::{Decomposed, Handed, Kind, Language, Together, decompose, read as parse};
use sched_bridge::model::DeviceKind;
use sched_bridge::place::{Alternative, DeviceFilter};
use sched_bridge::request::{Flavors, instance, lower};
use serde_json::{Value, json};

use super::args::BlueprintArgs;
use super::client::{Client, segment};
use super::{Said, read, show};
use crate::adapter::{self, Action, Environment, Request, VERSION};
use crate::api::problem::{Code, Problem};

pub async fn run(args: BlueprintArgs, as_json: bool) -> Said {
    let text = read(&args.file)?;
    let blueprint = parse(&text, Language::guess(&text))
        .map_err(|e| Problem::bad(format!("{}: {e}", args.file.display())))?;
    let parts = decompose(&blueprint, &Flavors::default())
        .map_err(|e| Problem::bad(format!("{}: {e}", args.file.display())))?;
    if !args.run {
        return show(&json!(parts), as_json, super::show::pretty);
    }
    // Whoever would be asked must be there before anything is begun.
    let named: BTreeSet<&str> =
        parts.together.iter().flat_map(|t| &t.handed).map(|h| h.adapter.as_str()).collect();
    let known =
        |name: &str| args.adapter.iter().find(|(own, _)| own == name).map(|(_, command)| command.clone());
    if let Some(missing) = named.iter().find(|name| known(name).is_none()) {
        return Err(Problem::bad(format!(
            "no adapter {missing:?}: name its program by --adapter {missing}=COMMAND"
        )));
    }
    for Handed { environment, .. } in parts.together.iter().flat_map(|t| &t.handed) {
        need(environment.request.as_deref())
            .map_err(|e| Problem::bad(format!("environment {:?}: {e}", environment.name)))?;
    }
    let client = Client::new(&args.at)?;
    let (mut done, mut leases) = (Vec::new(), Vec::new());
    let ended = start_all(&client, &args, &blueprint.name, &parts, &mut done, &mut leases).await;
    if let Err(problem) = ended {
        // All or nothing, as far as leases go; what adapters have started is named.
        for id in &leases {
            let _ = client.ask(Method::DELETE, &format!("/v1/leases/{}", segment(id)), None::<&()>).await;
        }
        let started: Vec<String> = done
            .iter()
            .flat_map(|d: &Value| d["adapters"].as_array().cloned())
            .flatten()
            .map(|a| a.to_string())
            .collect();
        let left = if started.is_empty() {
            String::new()
        } else {
            format!("; adapters have started: {}", started.join(", "))
        };
        return Err(Problem::new(
            problem.code,
            format!("{}; its leases were given back{left}", problem.message),
        ));
    }
    show(
        &json!({ "blueprint": blueprint.name, "groups": parts.groups, "together": done }),
        as_json,
        super::show::pretty,
    )
}

async fn start_all(
    client: &Client,
    args: &BlueprintArgs,
    name: &str,
    parts: &Decomposed,
    done: &mut Vec<Value>,
    leases: &mut Vec<String>,
) -> Result<(), Problem> {
    for (number, together) in parts.together.iter().enumerate() {
        let mut lease = Value::Null;
        if let Some(request) = &together.request {
            let id = format!("{name}.{number}");
            let body = json!({ "id": id, "holder": args.holder, "ttl_ms": args.ttl, "request": request });
            lease = client.ask(Method::POST, "/v1/leases", Some(&body)).await?;
            leases.push(id);
        }
        let nodes: BTreeSet<&str> = lease["lease"]["held"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|h| h["node"].as_str())
            .collect();
        let adapters = hand_over(args, name, together, &nodes).await?;
        done.push(json!({ "environments": together.environments, "lease": lease["lease"], "networks": together.networks, "adapters": adapters }));
    }
    Ok(())
}

/// What an environment that an adapter starts needs. Adapters know cores, memory and a number of GPUs; anything else would be
/// lost on the way, and is refused.
fn need(request: Option<&str>) -> Result<Alternative, String> {
    let Some(request) = request else { return Ok(Alternative::default()) };
    let expr = instance::parse(request).map_err(|e| e.to_string())?;
    let mut ways = lower::alternatives(&expr, &Flavors::default()).map_err(|e| e.to_string())?;
    let plain = |need: &Alternative| {
        let gpus = need.devices.iter().all(|own| own.filter == DeviceFilter::kind(DeviceKind::Gpu));
        let rest = Alternative {
            vcpus: need.vcpus,
            memory: need.memory,
            devices: need.devices.clone(),
            ..Alternative::default()
        };
        gpus && *need == rest
    };
    match ways.pop() {
        Some(way) if ways.is_empty() && plain(&way) => Ok(way),
        _ => Err(format!(
            "{request:?} asks for more than adapters can be told; expected no more than vcpus, memory_mb and gpus, without OR"
        )),
    }
}

async fn hand_over(
    args: &BlueprintArgs,
    cluster: &str,
    together: &Together,
    near: &BTreeSet<&str>,
) -> Result<Vec<Value>, Problem> {
    let mut told = Vec::new();
    for Handed { adapter: name, environment, artifacts } in &together.handed {
        let need = need(environment.request.as_deref())
            .map_err(|e| Problem::bad(format!("environment {:?}: {e}", environment.name)))?;
        let command = args
            .adapter
            .iter()
            .find(|(own, _)| own == name)
            .map(|(_, command)| command.as_str())
            .unwrap_or_default();
        let networks = together.networks.iter().filter(|n| n.environments.contains(&environment.name));
        let sources: Vec<&str> = artifacts.iter().map(|artifact| artifact.source.as_str()).collect();
        let one = |number: u32| Environment {
            name: if environment.count == 1 {
                environment.name.clone()
            } else {
                format!("{}-{number}", environment.name)
            },
            kind: if environment.kind == Kind::BareMetal { "bare-metal" } else { "container" }.to_owned(),
            artifact: sources.join(" "),
            near: near.iter().map(|node| (*node).to_owned()).collect(),
            cores: need.vcpus,
            memory_mib: need.memory.0,
            gpus: need.devices.iter().map(|need| need.count).sum(),
            networks: networks.clone().map(|n| n.name.clone()).collect(),
            ..Environment::default()
        };
        let environments: Vec<Environment> = (0..environment.count).map(one).collect();
        let request =
            Request { version: VERSION, action: Action::Start, cluster: cluster.to_owned(), environments };
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        let answer =
            adapter::ask(&words, &request).await.map_err(|e| Problem::new(Code::Internal, e.to_string()))?;
        if let Some(failed) = answer.environments.iter().find(|e| e.state == "failed") {
            return Err(Problem::new(
                Code::Internal,
                format!("adapter {name}: {} has failed: {}", failed.name, failed.message),
            ));
        }
        told.push(json!({ "adapter": name, "environments": answer.environments }));
    }
    Ok(told)
}
