//! `vmove blueprint stop`: ends what adapters run, VMs, leases, and networks. What cannot be stopped does not keep the rest from it.

use serde_json::json;
use vmove_adapter::call::Adapter;
use vmove_bridge_types::adapter::{Request, State};
use vmove_bridge_types::problem::Code;
use vmove_bridge_types::requests::StopVms;
use vmove_client::bridge::Error;
use vmove_types::problem::ProblemCode;

use super::super::adapter::STOP_PATIENCE;
use super::{Read, elements, handed, networks};
use crate::failure::Failure;
use crate::output::{End, say, say_either};

pub async fn run(read: &Read, json: bool) -> Result<(), End> {
    let (network, mut requests) = (networks::adapter(read), Vec::new());
    for (number, together) in read.parts.together.iter().enumerate() {
        // While there is a lease, it says where the networks are.
        let nodes = read.near(number, together).await;
        requests.push(networks::request(read, together, &nodes, None)?);
    }
    let mut left = stop_handed(read).await;
    let leases = stop_leases(read).await?;
    let vms_may_run = !leases.is_empty();
    left.extend(leases);
    match network {
        Some(_) if vms_may_run => {
            left.push("networks, which are kept for the VMs that may still run".to_owned());
        }
        Some(adapter) => left.extend(stop_networks(&adapter, &requests).await),
        None => {}
    }
    let status = elements::status(read).await;
    if left.is_empty() {
        return say_either(&status, json, elements::told);
    }
    if !json {
        say(&elements::told(&status))?;
    }
    let message = format!(
        "not all of blueprint {} is stopped: {}; repeat the command when these answer",
        read.name,
        left.join("; ")
    );
    let details = json!({ "left": left, "state": status.state, "elements": status.elements });
    Err(Failure { details: Some(details), ..Failure::new(Code::NotStopped, message) }.into())
}

/// What adapters run, in the reverse sequence of its start. Returns what is left.
async fn stop_handed(read: &Read) -> Vec<String> {
    let mut left = Vec::new();
    for (number, together) in read.parts.together.iter().enumerate().rev() {
        let near = read.near(number, together).await;
        for own in together.handed.iter().rev() {
            let name = &own.environment.name;
            let request = match handed::request(read, own, together, &near) {
                Ok(request) => request,
                Err(failure) => {
                    left.push(failure.message);
                    continue;
                }
            };
            let stopped = match read.programs.named(&own.adapter) {
                Ok(adapter) => adapter.stop(&request, STOP_PATIENCE).await.map_err(|e| e.to_string()),
                Err(message) => Err(message),
            };
            match stopped {
                Ok(now) => left.extend(now.iter().filter(|own| own.state.is_alive()).map(|status| {
                    format!(
                        "{} is {} after adapter {} stopped it",
                        status.name,
                        status.state.word(),
                        own.adapter
                    )
                })),
                Err(why) => left.push(format!("environment {name}: {why}")),
            }
        }
    }
    left
}

/// Networks on which no VM is any more. Returns what is left.
pub(super) async fn stop_networks(adapter: &Adapter, requests: &[Request]) -> Vec<String> {
    let mut left = Vec::new();
    for request in requests.iter().filter(|request| !request.environments.is_empty()) {
        match adapter.stop(request, STOP_PATIENCE).await {
            // One that has lost a part is failed, and still there.
            Ok(now) => left.extend(
                now.iter()
                    .filter(|own| own.state != State::Absent)
                    .map(|own| format!("network {} is {}: {}", own.name, own.state.word(), own.message)),
            ),
            Err(error) => left.push(format!("networks: {error}")),
        }
    }
    left
}

/// The VMs of all leases of the blueprint, and the leases: also those of groups that it has no more. Returns what is left.
async fn stop_leases(read: &Read) -> Result<Vec<String>, Failure> {
    let of_blueprint = |id: &str| {
        let number = id.strip_prefix(&read.name).and_then(|rest| rest.strip_prefix('.'));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    let leases = read.bridge.leases(None).await?.leases;
    let mut left = Vec::new();
    for lease in leases.iter().filter(|lease| of_blueprint(lease.id.as_str())) {
        let id = lease.id.as_str();
        let stopped = async {
            read.bridge.stop_vms(id, &StopVms { vms: Vec::new() }).await?;
            read.bridge.release_lease(id).await
        };
        match stopped.await {
            Ok(_) => {}
            // It has ended with its last VM.
            Err(Error::Refused(problem)) if problem.code == Code::UnknownLease => {}
            Err(Error::Refused(problem)) => {
                left.push(format!("lease {id}: {} ({})", problem.message, problem.code.word()));
            }
            Err(error) => left.push(format!("lease {id}: {error}")),
        }
    }
    Ok(left)
}
