//! What each element of a blueprint does: its networks and VMs, and what adapters run.

use std::collections::BTreeMap;

use sched_bridge::blueprint::ConnectivityGroup;
use serde::Serialize;
use vmove_adapter::call::Adapter;
use vmove_bridge_types::adapter::{Environment, Request, Status};
use vmove_bridge_types::cluster::ClusterVm;
use vmove_bridge_types::problem::Code;
use vmove_client::bridge::Error;

use super::super::show;
use super::{Read, handed, networks};
use crate::output::{fields, table};

/// A VM, container, machine or network of a blueprint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Element {
    /// Its name.
    pub name: String,
    /// `vm`, `container`, `bare-metal` or `network`.
    pub kind: String,
    /// The environment of the blueprint that it is an instance of; none for networks.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub environment: String,
    /// The adapter that runs it; none for VMs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// `running`, `moving`, `waiting`, `ended`, `failed`, `absent`, or `unknown` if who knows does not answer.
    pub state: String,
    /// Where it runs.
    pub nodes: Vec<String>,
    /// Why, if it failed or is not known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl Element {
    /// Whether something of it may use a node.
    pub fn may_run(&self) -> bool {
        !matches!(self.state.as_str(), "ended" | "failed" | "absent")
    }
}

/// What a blueprint does.
#[derive(Debug, Serialize)]
pub struct BlueprintStatus {
    pub blueprint: String,
    /// `running`: all of it; `stopped`: nothing; `partial`: something does not run, or is not known.
    pub state: &'static str,
    pub elements: Vec<Element>,
}

impl BlueprintStatus {
    pub fn new(blueprint: &str, elements: Vec<Element>) -> Self {
        let runs = |own: &Element| matches!(own.state.as_str(), "running" | "moving");
        let state = if elements.iter().all(runs) {
            "running"
        } else if elements.iter().any(Element::may_run) {
            "partial"
        } else {
            "stopped"
        };
        Self { blueprint: blueprint.to_owned(), state, elements }
    }
}

/// Asks the bridge and all adapters. One that does not answer makes its elements `unknown`, and no others.
pub async fn status(read: &Read) -> BlueprintStatus {
    let mut elements = Vec::new();
    let network = networks::adapter(read);
    for (number, together) in read.parts.together.iter().enumerate() {
        let near = read.near(number, together).await;
        if let Some(adapter) = &network
            && let Ok(request) = networks::request(read, together, &near, None)
            && !request.environments.is_empty()
        {
            elements.extend(of_adapter("", networks::ADAPTER, &request, &ask(adapter, &request).await));
        }
        elements.extend(vms(read, number, together).await);
        for own in &together.handed {
            // What cannot be asked for is refused when the blueprint is run.
            let Ok(request) = handed::request(read, own, together, &near) else { continue };
            let answers = match read.programs.named(&own.adapter) {
                Ok(adapter) => ask(&adapter, &request).await,
                Err(message) => Err(message),
            };
            elements.extend(of_adapter(&own.environment.name, &own.adapter, &request, &answers));
        }
    }
    BlueprintStatus::new(&read.name, elements)
}

async fn ask(adapter: &Adapter, request: &Request) -> Result<Vec<Status>, String> {
    adapter.status(request).await.map_err(|e| e.to_string())
}

/// What an adapter said of the instances of an environment, or why it said nothing.
pub fn of_adapter(
    environment: &str,
    adapter: &str,
    request: &Request,
    answers: &Result<Vec<Status>, String>,
) -> Vec<Element> {
    let element = |(number, own): (usize, &Environment)| {
        let (state, nodes, message) = match answers {
            Ok(answers) => answers.get(number).map_or_else(
                || ("unknown".to_owned(), Vec::new(), String::new()),
                |own| (own.state.word().to_owned(), own.nodes.clone(), own.message.clone()),
            ),
            Err(why) => ("unknown".to_owned(), Vec::new(), why.clone()),
        };
        Element {
            name: own.name.clone(),
            kind: own.kind.clone(),
            environment: environment.to_owned(),
            adapter: Some(adapter.to_owned()),
            state,
            nodes,
            message,
        }
    };
    request.environments.iter().enumerate().map(element).collect()
}

/// The VMs of a group, as the nodes list them.
async fn vms(read: &Read, number: usize, together: &ConnectivityGroup) -> Vec<Element> {
    let Some(request) = &together.request else { return Vec::new() };
    let Ok(names) = request.vm_names() else { return Vec::new() };
    let id = format!("{}.{number}", read.name);
    let (members, none): (BTreeMap<String, ClusterVm>, (&str, String)) = match read.bridge.cluster(&id).await
    {
        Ok(info) => (
            info.members.into_iter().map(|own| (own.vm.to_string(), own)).collect(),
            ("absent", format!("it has no place in lease {id}")),
        ),
        Err(Error::Refused(problem)) if problem.code == Code::UnknownLease => {
            (BTreeMap::new(), ("absent", format!("there is no lease {id}")))
        }
        Err(error) => (BTreeMap::new(), ("unknown", error.to_string())),
    };
    let element = |(vm, group): (sched_bridge::model::VmName, usize)| {
        let member = members.get(vm.as_str());
        let (state, message) = match member {
            Some(own) => (show::word(&own.state), own.why.clone().unwrap_or_default()),
            None => (none.0.to_owned(), none.1.clone()),
        };
        Element {
            name: vm.to_string(),
            kind: "vm".to_owned(),
            environment: request.groups[group].name.clone(),
            adapter: None,
            state,
            nodes: member.iter().map(|own| own.node.to_string()).collect(),
            message,
        }
    };
    names.into_iter().map(element).collect()
}

/// For people.
pub fn told(status: &BlueprintStatus) -> String {
    let mut out = fields(&[("blueprint", status.blueprint.clone()), ("state", status.state.to_owned())]);
    let row = |own: &Element| {
        let adapter = own.adapter.clone().unwrap_or_else(|| "-".to_owned());
        let cells = [&own.name, &own.kind, &adapter, &own.state, &own.nodes.join(", "), &own.message];
        cells.map(ToOwned::to_owned).to_vec()
    };
    let rows: Vec<Vec<String>> = status.elements.iter().map(row).collect();
    out.push_str(&table(&["ELEMENT", "KIND", "ADAPTER", "STATE", "NODES", "MESSAGE"], &rows));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blueprint_runs_if_all_of_it_does() {
        let state = |states: &[&str]| {
            let element = |state: &&str| Element {
                name: "x".to_owned(),
                kind: "vm".to_owned(),
                environment: "x".to_owned(),
                adapter: None,
                state: (*state).to_owned(),
                nodes: Vec::new(),
                message: String::new(),
            };
            BlueprintStatus::new("b", states.iter().map(element).collect()).state
        };
        assert_eq!(state(&["running", "moving"]), "running");
        assert_eq!(state(&["absent", "ended", "failed"]), "stopped");
        for partial in
            [["running", "absent"], ["running", "failed"], ["unknown", "absent"], ["waiting", "running"]]
        {
            assert_eq!(state(&partial), "partial");
        }
    }
}
