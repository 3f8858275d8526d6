//! `vmove blueprint --run`: all of a blueprint runs, or nothing of it that this run has begun.

use std::collections::{BTreeMap, BTreeSet};

use sched_bridge::blueprint::{ConnectivityGroup, Network};
use sched_bridge::model::VmName;
use serde::Serialize;
use serde_json::json;
use vmove_adapter::call::{Adapter, AdapterError};
use vmove_bridge_types::adapter::{Request, State, Status};
use vmove_bridge_types::lease::LeaseId;
use vmove_bridge_types::problem::Code;
use vmove_bridge_types::requests::{LeaseInfo, LeaseRequest, StartRequest, StartVm, StartedVm, StopVms};
use vmove_client::bridge::Error;
use vmove_types::units::number_of;

use super::super::adapter::STOP_PATIENCE;
use super::super::show;
use super::stop::stop_networks;
use super::{Read, elements, handed, networks};
use crate::args::bridge::HolderArgs;
use crate::failure::Failure;
use crate::output::{End, say_either, table};
use crate::waiting::{Step, Wait};

pub async fn run(read: Read, holder: &HolderArgs, json: bool) -> Result<(), End> {
    // Before anything is started, all adapters must have a program, and be able to give what is asked of them.
    for own in read.parts.together.iter().flat_map(|t| &t.handed) {
        read.programs.named(&own.adapter).map_err(Failure::bad_request)?;
        handed::need(own, &read.catalog)?;
    }
    let network = networks::adapter(&read);
    for together in &read.parts.together {
        for own in &together.started {
            if network.is_none() && networks::is_needed(&own.command) {
                read.programs.named(networks::ADAPTER).map_err(Failure::bad_request)?;
            }
            networks::filled_in(&read, together, &own.environment, "", &own.command)?;
        }
    }
    let step = Step::default();
    let mut begun = Begun {
        step: &step,
        network,
        networks: Vec::new(),
        read: &read,
        leases: Vec::new(),
        started: Vec::new(),
        handed: Vec::new(),
        failed: BTreeMap::new(),
    };
    let left = format!(
        "what has begun of {0} goes on: `vmove blueprint status FILE` shows it, `vmove blueprint stop FILE` ends all of it",
        read.name
    );
    let wait = Wait::of_vmove(json, format!("{} starts", read.name), left);
    let done = wait.answer_of_steps(&step, start_or_undo(&mut begun, holder)).await?;
    let answer = json!({ "blueprint": read.name, "groups": read.parts.groups, "together": &done });
    say_either(&answer, json, |_| running(&done))
}

/// Starts all of it. If anything fails, what has begun is undone.
async fn start_or_undo(begun: &mut Begun<'_>, holder: &HolderArgs) -> Result<Vec<Together>, Failure> {
    let failure = match start_all(begun, holder).await {
        Ok(done) => return Ok(done),
        Err(failure) => failure,
    };
    begun.step.set(format!("what has begun of {} is undone", begun.read.name));
    let undone = begun.undo().await;
    let message = format!("{}; {undone}", failure.message);
    // What is there now, and why what failed did.
    let mut now = elements::status(begun.read).await;
    for own in &mut now.elements {
        if let Some(reason) = begun.failed.get(&own.name) {
            own.message.clone_from(reason);
        }
    }
    let details = json!({ "failed": begun.failed, "state": now.state, "elements": now.elements });
    Err(Failure { message, details: Some(details), ..failure })
}

/// What has to be undone if the rest fails.
struct Begun<'a> {
    /// What is waited for.
    step: &'a Step,
    read: &'a Read,
    /// New leases.
    leases: Vec<LeaseId>,
    /// Leases, and the VMs of each that were started.
    started: Vec<(LeaseId, Vec<VmName>)>,
    /// The adapter that makes networks, if there is one.
    network: Option<Adapter>,
    /// Networks of new leases.
    networks: Vec<Request>,
    /// Adapters and what they were asked to start.
    handed: Vec<(Adapter, Request)>,
    /// Elements that failed, and why.
    failed: BTreeMap<String, String>,
}

impl Begun<'_> {
    /// Has an adapter start environments, and notes why each one failed that did.
    async fn started_by(
        &mut self,
        name: &str,
        adapter: &Adapter,
        request: &Request,
    ) -> Result<Vec<Status>, Failure> {
        let names: Vec<&str> = request.environments.iter().map(|own| own.name.as_str()).collect();
        self.step.set(format!("adapter {name} starts {}", names.join(", ")));
        let answers = adapter.start(request).await.map_err(|error| self.failed_all(name, request, &error))?;
        let not_there = answers.iter().filter(|own| matches!(own.state, State::Failed | State::Absent));
        let reasons: Vec<(String, String)> = not_there.map(|own| (own.name.clone(), why(own))).collect();
        if !reasons.is_empty() {
            let texts: Vec<String> = reasons.iter().map(|(own, why)| format!("{own} {why}")).collect();
            self.failed.extend(reasons);
            return Err(Failure::new(Code::AdapterFailed, format!("adapter {name}: {}", texts.join("; "))));
        }
        Ok(answers)
    }

    /// Notes that an adapter gave no answer for any of these environments.
    fn failed_all(&mut self, name: &str, request: &Request, error: &AdapterError) -> Failure {
        let why = format!("adapter {name}: {error}");
        self.failed.extend(request.environments.iter().map(|own| (own.name.clone(), why.clone())));
        Failure::new(Code::AdapterFailed, why)
    }

    async fn undo(&self) -> String {
        let mut left = Vec::new();
        for (adapter, request) in self.handed.iter().rev().filter(|(_, own)| !own.environments.is_empty()) {
            let names = |names: &[&str]| format!("{} of adapter {}", names.join(", "), adapter.program());
            match adapter.stop(request, STOP_PATIENCE).await {
                Ok(now) => {
                    let alive: Vec<&str> =
                        now.iter().filter(|own| own.state.is_alive()).map(|own| own.name.as_str()).collect();
                    left.extend((!alive.is_empty()).then(|| names(&alive)));
                }
                Err(error) => {
                    let all: Vec<&str> = request.environments.iter().map(|own| own.name.as_str()).collect();
                    left.push(format!("{} ({error})", names(&all)));
                }
            }
        }
        let bridge = &self.read.bridge;
        let mut held = BTreeSet::new();
        for (id, vms) in &self.started {
            let stop = StopVms { vms: vms.clone() };
            if let Err(error) = bridge.stop_vms(id.as_str(), &stop).await {
                left.push(format!("VMs of lease {id}, which is kept ({error})"));
                // VMs that may still run use what it holds.
                held.insert(id);
            }
        }
        if let Some(adapter) = self.network.as_ref().filter(|_| !self.networks.is_empty()) {
            if held.is_empty() {
                left.extend(stop_networks(adapter, &self.networks).await);
            } else {
                left.push("networks, which are kept for the VMs that may still run".to_owned());
            }
        }
        for id in self.leases.iter().filter(|id| !held.contains(id)) {
            if let Err(error) = bridge.release_lease(id.as_str()).await {
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
                vec![
                    own.name.clone(),
                    handed.adapter.clone(),
                    own.state.word().to_owned(),
                    nodes,
                    own.message.clone(),
                ]
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
    /// What the adapter says of the networks that it has made.
    made: Vec<Status>,
    vms: Vec<StartedVm>,
    adapters: Vec<Handed>,
}

/// What an adapter answered.
#[derive(Debug, Serialize)]
struct Handed {
    adapter: String,
    environments: Vec<Status>,
}

async fn start_all(begun: &mut Begun<'_>, holder: &HolderArgs) -> Result<Vec<Together>, Failure> {
    let mut done = Vec::new();
    for (number, together) in begun.read.parts.together.iter().enumerate() {
        let id = begun.read.lease_id(number)?;
        let mut lease: Option<LeaseInfo> = None;
        if let Some(request) = &together.request {
            let wanted = LeaseRequest {
                named: false,
                id: Some(id.clone()),
                holder: holder.holder.clone(),
                ttl_ms: Some(holder.ttl),
                project: holder.project.clone(),
                together: holder.together,
                what_if: false,
                explain: false,
                request: Some(request.clone()),
                text: None,
                assignments: None,
                cluster: None,
                start: None,
            };
            begun.step.set(format!("a place is found for {}", together.environments.join(", ")));
            let granted = begun.read.bridge.grant_lease(&wanted).await?;
            // A lease that existed before is not undone.
            if !granted.again {
                begun.leases.push(id.clone());
            }
            lease = granted.lease;
        }
        let held = lease.iter().flat_map(|lease| &lease.held);
        let nodes: BTreeSet<String> = held.map(|held| held.assignment.node.to_string()).collect();
        let made = make_networks(begun, together, &nodes, lease.as_ref()).await?;
        let vms = start_vms(begun, &id, together).await?;
        let adapters = hand_over(begun, together, &nodes).await?;
        if !vms.is_empty() {
            // Its VMs run: it is kept by them.
            lease = Some(begun.read.bridge.lease(id.as_str()).await?);
        }
        done.push(Together {
            environments: together.environments.clone(),
            lease,
            networks: together.networks.clone(),
            made,
            vms,
            adapters,
        });
    }
    Ok(done)
}

/// Makes the networks of a group, where its VMs have their places.
async fn make_networks(
    begun: &mut Begun<'_>,
    together: &ConnectivityGroup,
    nodes: &BTreeSet<String>,
    lease: Option<&LeaseInfo>,
) -> Result<Vec<Status>, Failure> {
    let (Some(adapter), Some(lease)) = (begun.network.clone(), lease) else { return Ok(Vec::new()) };
    let request = networks::request(begun.read, together, nodes, Some(lease))?;
    if request.environments.is_empty() {
        return Ok(Vec::new());
    }
    // Those of VMs that ran before are not undone.
    if begun.leases.contains(&lease.id) {
        begun.networks.push(request.clone());
    }
    begun.started_by(networks::ADAPTER, &adapter, &request).await
}

/// Starts the VMs that have a command. Returns the answer of the bridge: each VM and its node.
async fn start_vms(
    begun: &mut Begun<'_>,
    lease: &LeaseId,
    together: &ConnectivityGroup,
) -> Result<Vec<StartedVm>, Failure> {
    let Some(request) = together.request.as_ref().filter(|_| !together.started.is_empty()) else {
        return Ok(Vec::new());
    };
    let mut vms = Vec::new();
    for (vm, group) in request.vm_names().map_err(Failure::bad_request)? {
        let own = together.started.iter().find(|own| own.environment == request.groups[group].name);
        if let Some(own) = own {
            let command =
                networks::filled_in(begun.read, together, &own.environment, vm.as_str(), &own.command)?;
            vms.push(StartVm::by_command_line(vm, command));
        }
    }
    let request = StartRequest { vms };
    begun
        .step
        .set(format!("{} of lease {lease} are started", number_of(request.vms.len() as u64, "VM", "VMs")));
    match begun.read.bridge.start_vms(lease.as_str(), &request).await {
        Ok(answer) => {
            let new = answer.vms.iter().filter(|own| !own.again).map(|own| own.vm.clone()).collect();
            begun.started.push((lease.clone(), new));
            Ok(answer.vms)
        }
        Err(error) => {
            if let Error::Refused(problem) = &error
                && let Some(vms) = problem.details.as_ref().and_then(|details| details["vms"].as_object())
            {
                let reason = |(vm, why): (&String, &serde_json::Value)| {
                    (vm.clone(), why.as_str().unwrap_or_default().to_owned())
                };
                begun.failed.extend(vms.iter().map(reason));
            }
            // The bridge has stopped what it started, unless it was killed. In a new lease, all VMs are ours to stop.
            if begun.leases.contains(lease) {
                let names = request.vms.into_iter().map(|own| own.vm).collect();
                begun.started.push((lease.clone(), names));
            }
            Err(error.into())
        }
    }
}

/// Has the adapters of a group start their environments, close to these nodes.
async fn hand_over(
    begun: &mut Begun<'_>,
    together: &ConnectivityGroup,
    near: &BTreeSet<String>,
) -> Result<Vec<Handed>, Failure> {
    let mut answers = Vec::new();
    for own in &together.handed {
        let name = &own.adapter;
        let request = handed::request(begun.read, own, together, near)?;
        let adapter = begun.read.programs.named(name).map_err(Failure::bad_request)?;
        begun.step.set(format!("adapter {name} says what it runs already"));
        // Recorded before the call: if the answer is lost, environments may run nevertheless. What ran before is not undone.
        let before =
            adapter.status(&request).await.map_err(|error| begun.failed_all(name, &request, &error))?;
        let mut new = request.clone();
        new.environments.retain(|own| !before.iter().any(|was| was.name == own.name && was.state.is_alive()));
        begun.handed.push((adapter.clone(), new));
        let environments = begun.started_by(name, &adapter, &request).await?;
        answers.push(Handed { adapter: name.clone(), environments });
    }
    Ok(answers)
}

fn why(status: &Status) -> String {
    let state = if status.state == State::Failed { "has failed" } else { "is not there" };
    if status.message.is_empty() { state.to_owned() } else { format!("{state}: {}", status.message) }
}
