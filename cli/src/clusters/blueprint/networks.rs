//! The networks of a blueprint, which the adapter `network` makes, if there is one.

use std::collections::{BTreeMap, BTreeSet};

use sched_bridge::blueprint::{self, ConnectivityGroup, Network, NetworkMode};
use vmove_adapter::call::Adapter;
use vmove_adapter::network::names;
use vmove_bridge_types::adapter::{Action, Environment, Member, Request, VERSION};
use vmove_bridge_types::lease::Part;
use vmove_bridge_types::requests::LeaseInfo;

use super::Read;
use crate::failure::Failure;
use crate::output::note;

/// The adapter that makes networks.
pub const ADAPTER: &str = "network";

/// The adapter, if there is one; otherwise it is said that networks are left out.
pub fn adapter(read: &Read) -> Option<Adapter> {
    if read.parts.together.iter().all(|together| of_vms(together).is_empty()) {
        return None;
    }
    let found = read.programs.named(ADAPTER);
    if let Err(reason) = &found {
        note(&format!("vmove: networks of the blueprint are left out: {reason}"));
    }
    found.ok()
}

/// The networks of a group on which VMs are. Others have no place on a node.
pub fn of_vms(together: &ConnectivityGroup) -> Vec<&Network> {
    let groups = || together.request.iter().flat_map(|request| &request.groups);
    let has_vms = |network: &&Network| groups().any(|group| network.environments.contains(&group.name));
    together.networks.iter().filter(has_vms).collect()
}

fn mode(network: &Network) -> &'static str {
    if network.mode == NetworkMode::Private { "private" } else { "public" }
}

/// The request to the adapter for the networks of a group. Without a lease nobody is on them: enough to ask for them, and to stop them.
pub fn request(
    read: &Read,
    together: &ConnectivityGroup,
    nodes: &BTreeSet<String>,
    lease: Option<&LeaseInfo>,
) -> Result<Request, Failure> {
    let mut environments = Vec::new();
    for network in of_vms(together) {
        environments.push(Environment {
            name: network.name.clone(),
            kind: "network".to_owned(),
            mode: mode(network).to_owned(),
            nodes: nodes.iter().cloned().collect(),
            members: lease
                .map(|lease| members(read, together, network, lease))
                .transpose()?
                .unwrap_or_default(),
            ..Environment::default()
        });
    }
    Ok(Request { version: VERSION, action: Action::Start, cluster: read.name.clone(), environments })
}

/// The network namespace of an instance of a container, which the adapter makes; none if it is not on a private network with VMs.
pub fn namespace(
    read: &Read,
    together: &ConnectivityGroup,
    environment: &blueprint::Environment,
    number: u32,
) -> Option<String> {
    let node = environment.node.as_ref()?;
    let is_on = |network: &&Network| {
        network.mode == NetworkMode::Private && network.environments.contains(&environment.name)
    };
    let network = of_vms(together).into_iter().find(is_on)?;
    read.programs.named(ADAPTER).ok()?;
    let own = environment.instance(number);
    Some(names::namespace(&read.name, &network.name, node.as_str(), &own))
}

/// The VMs on a network, and behind them the containers. Each has its address by its number among them.
fn members(
    read: &Read,
    together: &ConnectivityGroup,
    network: &Network,
    lease: &LeaseInfo,
) -> Result<Vec<Member>, Failure> {
    let homes = lease.held.iter().filter(|held| held.part == Part::Home);
    let homes: BTreeMap<&str, &str> =
        homes.map(|held| (held.assignment.vm.as_str(), held.assignment.node.as_str())).collect();
    let mut members = Vec::new();
    let Some(request) = &together.request else { return Ok(members) };
    for (vm, group) in request.vm_names().map_err(Failure::bad_request)? {
        let group = &request.groups[group];
        let Some(node) = homes.get(vm.as_str()).filter(|_| network.environments.contains(&group.name)) else {
            continue;
        };
        let vm = vm.as_str();
        // The name in the blueprint: solver-0, and solver if there is one only.
        let short = vm.strip_prefix(&format!("{}-", request.name)).unwrap_or(vm);
        let alone = (group.count == 1).then_some(&group.name);
        members.push(member(read, network, members.len(), (vm, short, alone), (*node).to_owned())?);
    }
    if network.mode == NetworkMode::Private {
        add_containers(read, together, network, &mut members)?;
    }
    Ok(members)
}

fn add_containers(
    read: &Read,
    together: &ConnectivityGroup,
    network: &Network,
    members: &mut Vec<Member>,
) -> Result<(), Failure> {
    let Some(request) = &together.request else { return Ok(()) };
    let on_it = together.handed.iter().filter(|own| network.environments.contains(&own.environment.name));
    for own in on_it {
        let environment = &own.environment;
        for number in 0..environment.count {
            let (Some(node), Some(namespace)) =
                (&environment.node, namespace(read, together, environment, number))
            else {
                continue;
            };
            let short = format!("{}-{number}", environment.name);
            let name = format!("{}-{short}", request.name);
            let alone = (environment.count == 1).then_some(&environment.name);
            let own = member(read, network, members.len(), (&name, &short, alone), node.to_string())?;
            members.push(Member { namespace, ..own });
        }
    }
    Ok(())
}

/// A member of a network by its number, with its names: in all, in the blueprint, and there if it is the only one.
fn member(
    read: &Read,
    network: &Network,
    number: usize,
    (name, short, alone): (&str, &str, Option<&String>),
    node: String,
) -> Result<Member, Failure> {
    let (cluster, net) = (&read.name, &network.name);
    let address = names::address(number).ok_or_else(|| {
        Failure::bad_request(format!("network {net}: expected at most {} members", names::MOST_MEMBERS))
    })?;
    Ok(Member {
        name: name.to_owned(),
        aliases: std::iter::once(short.to_owned()).chain(alone.cloned()).collect(),
        node,
        interface: names::tap(cluster, net, name),
        mac: names::mac(cluster, net, name),
        address: if network.mode == NetworkMode::Private { address.to_string() } else { String::new() },
        namespace: String::new(),
    })
}

/// A command line with what `{network:NAME}` (the tap interface of the VM) and `{mac:NAME}` stand for. NAME is `private`, `public`, or
/// the name of a network.
pub fn filled_in(
    read: &Read,
    together: &ConnectivityGroup,
    environment: &str,
    vm: &str,
    command: &[String],
) -> Result<Vec<String>, Failure> {
    let own =
        of_vms(together).into_iter().filter(|network| network.environments.iter().any(|e| e == environment));
    let mut values = Vec::new();
    for network in own {
        for name in [network.name.as_str(), mode(network)] {
            values.push((format!("{{network:{name}}}"), names::tap(&read.name, &network.name, vm)));
            values.push((format!("{{mac:{name}}}"), names::mac(&read.name, &network.name, vm)));
        }
    }
    let mut filled = Vec::new();
    for word in command {
        let text = values.iter().fold(word.clone(), |text, (from, to)| text.replace(from, to));
        if text.contains("{network:") || text.contains("{mac:") {
            let known: Vec<&str> = values.iter().map(|(name, _)| name.as_str()).collect();
            let known = if known.is_empty() {
                "no network: it has no connection".to_owned()
            } else {
                known.join(", ")
            };
            return Err(Failure::bad_request(format!(
                "environment {environment:?}: command: {word:?} names a network that it is not on; expected {known}"
            )));
        }
        filled.push(text);
    }
    Ok(filled)
}

/// Whether a command line needs a network.
pub fn is_needed(command: &[String]) -> bool {
    command.iter().any(|word| word.contains("{network:") || word.contains("{mac:"))
}
