//! What a blueprint hands over to adapters.

use std::collections::BTreeSet;

use sched_bridge::blueprint::{AdapterEnvironment, ConnectivityGroup, Kind};
use sched_bridge::model::DeviceKind;
use sched_bridge::place::{Alternative, DeviceFilter};
use sched_bridge::request::{Catalog, instance, lower};
use vmove_bridge_types::adapter::{Action, Environment, Request, VERSION};

use super::{Read, networks};
use crate::failure::Failure;

/// What an environment of an adapter needs. Adapters know cores, memory and a number of GPUs; requests for anything else are refused.
pub fn need(handed: &AdapterEnvironment, catalog: &Catalog) -> Result<Alternative, Failure> {
    let environment = &handed.environment;
    let Some(request) = &environment.request else { return Ok(Alternative::default()) };
    let wrong =
        |e: &dyn std::fmt::Display| Failure::bad_request(format!("environment {:?}: {e}", environment.name));
    let expr = instance::parse(request, catalog).map_err(|e| wrong(&e))?;
    let mut ways = lower::alternatives(&expr, catalog).map_err(|e| wrong(&e))?;
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
        _ => {
            Err(wrong(&format_args!("{request:?}: adapters take only vcpus, memory_mb and gpus, without OR")))
        }
    }
}

/// The request to an adapter for one environment of the blueprint: its instances, close to these nodes.
pub fn request(
    read: &Read,
    handed: &AdapterEnvironment,
    together: &ConnectivityGroup,
    near: &BTreeSet<String>,
) -> Result<Request, Failure> {
    let environment = &handed.environment;
    let need = need(handed, &read.catalog)?;
    let names = together.networks.iter().filter(|n| n.environments.contains(&environment.name));
    let sources: Vec<&str> = handed.artifacts.iter().map(|artifact| artifact.source.as_str()).collect();
    let one = |number: u32| Environment {
        name: environment.instance(number),
        kind: if environment.kind == Kind::BareMetal { "bare-metal" } else { "container" }.to_owned(),
        artifact: sources.join(" "),
        nodes: environment.node.iter().map(ToString::to_string).collect(),
        near: near.iter().cloned().collect(),
        namespace: networks::namespace(read, together, environment, number).unwrap_or_default(),
        cores: need.vcpus,
        memory_mib: need.memory.0,
        gpus: need.devices.iter().map(|need| need.count).sum(),
        networks: names.clone().map(|n| n.name.clone()).collect(),
        ..Environment::default()
    };
    let environments = (0..environment.count).map(one).collect();
    Ok(Request { version: VERSION, action: Action::Start, cluster: read.name.clone(), environments })
}
