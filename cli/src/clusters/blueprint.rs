//! `vmove blueprint`: splits a blueprint; with `--run`, leases what its VMs need, starts them through the daemons of their nodes, and
//! passes the rest to adapters. All of it or nothing.

use std::collections::BTreeSet;

use sched_bridge::blueprint::{
    AdapterEnvironment, ConnectivityGroup, Decomposed, Kind, Language, Network, decompose, read as parse,
};
use sched_bridge::model::{DeviceKind, VmName};
use sched_bridge::place::{Alternative, DeviceFilter};
use sched_bridge::request::{Catalog, instance, lower};
use serde::Serialize;
use serde_json::json;

use vmove_bridge_types::adapter::{Action, Environment, Request, Status, VERSION};
use vmove_bridge_types::lease::LeaseId;
use vmove_bridge_types::problem::Code;
use vmove_bridge_types::requests::{LeaseInfo, LeaseRequest, StartRequest, StartVm, StartedVm, StopVms};
use vmove_client::bridge::Bridge;
use vmove_types::problem::ProblemCode;

use super::input::{bridge, read};
use super::{adapter, show, types};
use crate::args::clusters::BlueprintArgs;
use crate::failure::Failure;
use crate::output::{End, say_either, table};

pub async fn run(args: BlueprintArgs, json: bool) -> Result<(), End> {
    let text = read(&args.file)?;
    let blueprint = parse(&text, Language::guess(&text))
        .map_err(|e| Failure::bad_request(format!("{}: {e}", args.file.display())))?;
    let bridge = bridge(&args.at)?;
    let catalog = match types::catalog(&bridge).await {
        Ok(catalog) => catalog,
        // To look at a blueprint needs no bridge, if it names what ships.
        Err(failure) if !args.run && failure.code == Code::BridgeUnreachable.word() => Catalog::default(),
        Err(failure) => return Err(failure.into()),
    };
    let parts = decompose(&blueprint, &catalog)
        .map_err(|e| Failure::bad_request(format!("{}: {e}", args.file.display())))?;
    if !args.run {
        return say_either(&parts, json, show::parts);
    }
    // Before anything is started, all adapters must have a program.
    let named: BTreeSet<&str> =
        parts.together.iter().flat_map(|t| &t.handed).map(|h| h.adapter.as_str()).collect();
    let known =
        |name: &str| args.adapter.iter().find(|(own, _)| own == name).map(|(_, command)| command.clone());
    if let Some(missing) = named.iter().find(|name| known(name).is_none()) {
        let text = format!("no adapter {missing:?}: name its program by --adapter {missing}=COMMAND");
        return Err(Failure::bad_request(text).into());
    }
    for AdapterEnvironment { environment, .. } in parts.together.iter().flat_map(|t| &t.handed) {
        need(environment.request.as_deref(), &catalog)
            .map_err(|e| Failure::bad_request(format!("environment {:?}: {e}", environment.name)))?;
    }
    let mut begun = Begun { bridge, catalog, leases: Vec::new(), started: Vec::new(), handed: Vec::new() };
    match start_all(&mut begun, &args, &blueprint.name, &parts).await {
        Ok(done) => {
            let answer = json!({ "blueprint": blueprint.name, "groups": parts.groups, "together": &done });
            say_either(&answer, json, |_| running(&done))
        }
        Err(failure) => {
            let undone = begun.undo().await;
            let message = format!("{}; {undone}", failure.message);
            Err(Failure { message, ..failure }.into())
        }
    }
}

/// What has to be undone if the rest fails.
struct Begun {
    bridge: Bridge,
    /// What requests may name there.
    catalog: Catalog,
    /// New leases.
    leases: Vec<LeaseId>,
    /// Leases, and the VMs of each that were started.
    started: Vec<(LeaseId, Vec<VmName>)>,
    /// Adapters, their commands and requests.
    handed: Vec<(String, Vec<String>, Request)>,
}

impl Begun {
    async fn undo(self) -> String {
        let mut left = Vec::new();
        for (name, words, request) in self.handed {
            let stop = Request { action: Action::Stop, ..request };
            if let Err(error) = adapter::call(&words, &stop).await {
                left.push(format!("environments of adapter {name} ({error})"));
            }
        }
        let mut held = BTreeSet::new();
        for (id, vms) in &self.started {
            let stop = StopVms { vms: vms.clone() };
            if let Err(error) = self.bridge.stop_vms(id.as_str(), &stop).await {
                left.push(format!("VMs of lease {id}, which is kept ({error})"));
                // VMs that may still run use what it holds.
                held.insert(id);
            }
        }
        for id in self.leases.iter().filter(|id| !held.contains(id)) {
            if let Err(error) = self.bridge.release_lease(id.as_str()).await {
                left.push(format!("lease {id} ({error})"));
            }
        }
        if left.is_empty() {
            return "everything else was undone".to_owned();
        }
        format!("everything else was undone, except {}", left.join(", "))
    }
}

/// What runs: the lease of each connected group with its VMs, and the environments of adapters.
fn running(together: &[Together]) -> String {
    let mut out = String::new();
    let mut rows = Vec::new();
    for part in together {
        out.extend(part.lease.iter().map(show::lease));
        out.push_str(&show::started(&part.vms));
        for handed in &part.adapters {
            rows.extend(handed.environments.iter().map(|own| {
                let nodes = own.nodes.join(", ");
                vec![own.name.clone(), handed.adapter.clone(), own.state.clone(), nodes, own.message.clone()]
            }));
        }
    }
    if !rows.is_empty() {
        out.push_str(&table(&["ENVIRONMENT", "ADAPTER", "STATE", "NODES", "MESSAGE"], &rows));
    }
    out
}

/// What was done with a connected group.
#[derive(Debug, Serialize)]
struct Together {
    environments: Vec<String>,
    lease: Option<LeaseInfo>,
    networks: Vec<Network>,
    vms: Vec<StartedVm>,
    adapters: Vec<Handed>,
}

/// What an adapter answered.
#[derive(Debug, Serialize)]
struct Handed {
    adapter: String,
    environments: Vec<Status>,
}

async fn start_all(
    begun: &mut Begun,
    args: &BlueprintArgs,
    name: &str,
    parts: &Decomposed,
) -> Result<Vec<Together>, Failure> {
    let mut done = Vec::new();
    for (number, together) in parts.together.iter().enumerate() {
        let id: LeaseId = format!("{name}.{number}").parse().map_err(Failure::bad_request)?;
        let mut lease: Option<LeaseInfo> = None;
        if let Some(request) = &together.request {
            let wanted = LeaseRequest {
                named: false,
                id: Some(id.clone()),
                holder: args.lease.holder.clone(),
                ttl_ms: Some(args.lease.ttl),
                project: args.lease.project.clone(),
                together: args.lease.together,
                what_if: false,
                explain: false,
                request: Some(request.clone()),
                text: None,
                assignments: None,
                cluster: None,
                start: None,
            };
            let granted = begun.bridge.grant_lease(&wanted).await?;
            // A lease that existed before is not undone.
            if !granted.again {
                begun.leases.push(id.clone());
            }
            lease = granted.lease;
        }
        let held = lease.iter().flat_map(|lease| &lease.held);
        let nodes: BTreeSet<&str> = held.map(|held| held.assignment.node.as_str()).collect();
        let vms = start_vms(begun, &id, together).await?;
        let adapters = hand_over(begun, args, name, together, &nodes).await?;
        if !vms.is_empty() {
            // Its VMs run: it is kept by them.
            lease = Some(begun.bridge.lease(id.as_str()).await?);
        }
        done.push(Together {
            environments: together.environments.clone(),
            lease,
            networks: together.networks.clone(),
            vms,
            adapters,
        });
    }
    Ok(done)
}

/// Starts the VMs that have a command. Returns the answer of the bridge: each VM and its node.
async fn start_vms(
    begun: &mut Begun,
    lease: &LeaseId,
    together: &ConnectivityGroup,
) -> Result<Vec<StartedVm>, Failure> {
    let Some(request) = together.request.as_ref().filter(|_| !together.started.is_empty()) else {
        return Ok(Vec::new());
    };
    let mut vms = Vec::new();
    for (vm, group) in request.vm_names().map_err(Failure::bad_request)? {
        let own = together.started.iter().find(|own| own.environment == request.groups[group].name);
        vms.extend(own.map(|own| StartVm::by_command_line(vm, own.command.clone())));
    }
    let request = StartRequest { vms };
    match begun.bridge.start_vms(lease.as_str(), &request).await {
        Ok(answer) => {
            let new = answer.vms.iter().filter(|own| !own.again).map(|own| own.vm.clone()).collect();
            begun.started.push((lease.clone(), new));
            Ok(answer.vms)
        }
        Err(error) => {
            // The bridge has stopped what it started, unless it was killed. In a new lease, all VMs are ours to stop.
            if begun.leases.contains(lease) {
                let names = request.vms.into_iter().map(|own| own.vm).collect();
                begun.started.push((lease.clone(), names));
            }
            Err(error.into())
        }
    }
}

/// What an environment of an adapter needs. Adapters know cores, memory and a number of GPUs; requests for anything else are refused.
fn need(request: Option<&str>, catalog: &Catalog) -> Result<Alternative, String> {
    let Some(request) = request else { return Ok(Alternative::default()) };
    let expr = instance::parse(request, catalog).map_err(|e| e.to_string())?;
    let mut ways = lower::alternatives(&expr, catalog).map_err(|e| e.to_string())?;
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
        _ => Err(format!("{request:?}: adapters take only vcpus, memory_mb and gpus, without OR")),
    }
}

async fn hand_over(
    begun: &mut Begun,
    args: &BlueprintArgs,
    cluster: &str,
    together: &ConnectivityGroup,
    near: &BTreeSet<&str>,
) -> Result<Vec<Handed>, Failure> {
    let mut answers = Vec::new();
    for handed in &together.handed {
        let name = &handed.adapter;
        let environments = adapter_environments(handed, together, near, &begun.catalog)?;
        let command = args.adapter.iter().find(|(own, _)| own == name);
        let command = command.map(|(_, command)| command.as_str()).unwrap_or_default();
        let request =
            Request { version: VERSION, action: Action::Start, cluster: cluster.to_owned(), environments };
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        // Recorded before the call: if the answer is lost, environments may run nevertheless.
        begun.handed.push((name.clone(), words.clone(), request.clone()));
        let answer =
            adapter::call(&words, &request).await.map_err(|e| Failure::new(Code::Internal, e.to_string()))?;
        if let Some(failed) = answer.environments.iter().find(|e| e.state == "failed") {
            return Err(Failure::new(
                Code::Internal,
                format!("adapter {name}: {} has failed: {}", failed.name, failed.message),
            ));
        }
        answers.push(Handed { adapter: name.clone(), environments: answer.environments });
    }
    Ok(answers)
}

/// The environments that an adapter is to start for one environment of the blueprint.
fn adapter_environments(
    handed: &AdapterEnvironment,
    together: &ConnectivityGroup,
    near: &BTreeSet<&str>,
    catalog: &Catalog,
) -> Result<Vec<Environment>, Failure> {
    let environment = &handed.environment;
    let need = need(environment.request.as_deref(), catalog)
        .map_err(|e| Failure::bad_request(format!("environment {:?}: {e}", environment.name)))?;
    let networks = together.networks.iter().filter(|n| n.environments.contains(&environment.name));
    let sources: Vec<&str> = handed.artifacts.iter().map(|artifact| artifact.source.as_str()).collect();
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
    Ok((0..environment.count).map(one).collect())
}
