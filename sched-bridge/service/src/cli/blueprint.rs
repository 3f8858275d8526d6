//! `vmove blueprint`: takes a blueprint apart; with `--run`, leases what its VMs need, starts them through the daemons of their
//! nodes, and hands the rest to adapters. All of it or nothing.

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
    let mut begun = Begun { client, leases: Vec::new(), started: Vec::new(), handed: Vec::new() };
    match start_all(&mut begun, &args, &blueprint.name, &parts).await {
        Ok(done) => {
            let answer = json!({ "blueprint": blueprint.name, "groups": parts.groups, "together": done });
            show(&answer, as_json, super::show::pretty)
        }
        Err(problem) => {
            let said = begun.undo().await;
            Err(Problem::new(problem.code, format!("{}; {said}", problem.message)))
        }
    }
}

/// What has to be undone if the rest fails: all or nothing.
struct Begun {
    client: Client,
    /// Those that were not there before.
    leases: Vec<String>,
    /// VMs, by lease.
    started: Vec<(String, Vec<String>)>,
    handed: Vec<(String, Vec<String>, Request)>,
}

impl Begun {
    async fn undo(self) -> String {
        let mut left = Vec::new();
        for (name, words, request) in self.handed {
            let stop = Request { action: Action::Stop, ..request };
            if let Err(error) = adapter::ask(&words, &stop).await {
                left.push(format!("what adapter {name} has started ({error})"));
            }
        }
        let mut held = BTreeSet::new();
        for (id, vms) in &self.started {
            let path = format!("/v1/leases/{}/vms/stop", segment(id));
            let stop = json!({ "vms": vms });
            if let Err(error) = self.client.ask(Method::POST, &path, Some(&stop)).await {
                left.push(format!("VMs of lease {id}, which stays ({error})"));
                // What a VM may still use is not given to others.
                held.insert(id);
            }
        }
        for id in self.leases.iter().filter(|id| !held.contains(id)) {
            let path = format!("/v1/leases/{}", segment(id));
            if let Err(error) = self.client.ask(Method::DELETE, &path, None::<&()>).await {
                left.push(format!("lease {id} ({error})"));
            }
        }
        if left.is_empty() {
            return "what had been begun was undone".to_owned();
        }
        format!("what had been begun was undone, except {}", left.join(", "))
    }
}

async fn start_all(
    begun: &mut Begun,
    args: &BlueprintArgs,
    name: &str,
    parts: &Decomposed,
) -> Result<Vec<Value>, Problem> {
    let mut done = Vec::new();
    for (number, together) in parts.together.iter().enumerate() {
        let mut lease = Value::Null;
        if let Some(request) = &together.request {
            let id = format!("{name}.{number}");
            let body = json!({ "id": id, "holder": args.holder, "ttl_ms": args.ttl, "request": request });
            lease = begun.client.ask(Method::POST, "/v1/leases", Some(&body)).await?;
            // One that was there before is not ours to give back.
            if lease["again"] != true {
                begun.leases.push(id);
            }
        }
        let held = lease["lease"]["held"].as_array().into_iter().flatten();
        let nodes: BTreeSet<&str> = held.filter_map(|held| held["node"].as_str()).collect();
        let vms = start_vms(begun, &format!("{name}.{number}"), together).await?;
        let adapters = hand_over(begun, args, name, together, &nodes).await?;
        done.push(json!({ "environments": together.environments, "lease": lease["lease"], "networks": together.networks, "vms": vms, "adapters": adapters }));
    }
    Ok(done)
}

/// Starts those VMs that say how. Gives what the bridge answered: which run where.
async fn start_vms(begun: &mut Begun, lease: &str, together: &Together) -> Result<Value, Problem> {
    let Some(request) = together.request.as_ref().filter(|_| !together.started.is_empty()) else {
        return Ok(json!([]));
    };
    let mut vms = Vec::new();
    for (vm, group) in request.vm_names().map_err(|e| Problem::bad(e.to_string()))? {
        let own = together.started.iter().find(|own| own.environment == request.groups[group].name);
        vms.extend(own.map(|own| json!({ "vm": vm, "command_line": own.command })));
    }
    let names = || vms.iter().filter_map(|own| own["vm"].as_str().map(str::to_owned)).collect();
    let path = format!("/v1/leases/{}/vms", segment(lease));
    let answer = begun.client.ask(Method::POST, &path, Some(&json!({ "vms": vms }))).await;
    match answer {
        Ok(answer) => {
            let new = answer["vms"].as_array().into_iter().flatten().filter(|own| own["again"] != true);
            let new = new.filter_map(|own| own["vm"].as_str().map(str::to_owned)).collect();
            begun.started.push((lease.to_owned(), new));
            Ok(answer["vms"].clone())
        }
        Err(problem) => {
            // The bridge has undone what it began, unless it went away; in a lease that is ours alone nothing else can run.
            if begun.leases.iter().any(|own| own == lease) {
                begun.started.push((lease.to_owned(), names()));
            }
            Err(problem)
        }
    }
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
    begun: &mut Begun,
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
        // Before it is asked: what its answer would have told of may run all the same.
        begun.handed.push((name.clone(), words.clone(), request.clone()));
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
