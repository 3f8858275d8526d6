//! Decomposes a blueprint into groups.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Artifact, Blueprint, BlueprintError, Environment, Kind, NetworkMode};
use crate::model::ClusterName;
use crate::place::{ClusterRequest, VmGroup};
use crate::request::{Catalog, instance, lower};

/// Environments of one kind and adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentGroup {
    /// Their kind.
    pub kind: Kind,
    /// The adapter that starts them; none for VMs.
    pub adapter: Option<String>,
    /// Their names.
    pub environments: Vec<String>,
}

/// An environment that an adapter starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterEnvironment {
    /// The adapter.
    pub adapter: String,
    /// The environment.
    pub environment: Environment,
    /// Its artifacts, with their sources.
    pub artifacts: Vec<Artifact>,
}

/// VMs that the daemons of their nodes start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmCommand {
    /// The environment; its VMs are named after it.
    pub environment: String,
    /// QEMU and its arguments, with the sources of artifacts filled in.
    pub command: Vec<String>,
}

/// A network of a connectivity group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Unique in the blueprint.
    pub name: String,
    /// Its kind.
    pub mode: NetworkMode,
    /// Environments on it.
    pub environments: Vec<String>,
}

/// A connectivity group: environments that are connected and placed together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectivityGroup {
    /// All of them, by name.
    pub environments: Vec<String>,
    /// The VMs among them; none if it has no VMs.
    pub request: Option<ClusterRequest>,
    /// The VMs among them that have a command.
    pub started: Vec<VmCommand>,
    /// Containers and bare metal.
    pub handed: Vec<AdapterEnvironment>,
    /// Networks between them.
    pub networks: Vec<Network>,
}

/// A decomposed blueprint. Every environment is in one environment group and in one connectivity group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decomposed {
    /// By kind and adapter.
    pub groups: Vec<EnvironmentGroup>,
    /// By connection.
    pub together: Vec<ConnectivityGroup>,
}

/// Union-find over the indices of environments (Tarjan 1975; path halving).
struct Sets(Vec<usize>);

impl Sets {
    fn find(&mut self, mut at: usize) -> usize {
        while self.0[at] != at {
            self.0[at] = self.0[self.0[at]];
            at = self.0[at];
        }
        at
    }

    fn union(&mut self, a: usize, b: usize) {
        let (a, b) = (self.find(a), self.find(b));
        self.0[a.max(b)] = a.min(b);
    }
}

/// Decomposes a blueprint.
///
/// # Errors
/// Names that are used twice or not defined, environments that lack what their kind needs, requests that are refused.
pub fn decompose(blueprint: &Blueprint, catalog: &Catalog) -> Result<Decomposed, BlueprintError> {
    let index = check(blueprint)?;
    let mut sets = Sets((0..blueprint.environments.len()).collect());
    for connection in &blueprint.connections {
        sets.union(index[connection.from.as_str()], index[connection.to.as_str()]);
    }
    let mut members: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for at in 0..blueprint.environments.len() {
        members.entry(sets.find(at)).or_default().push(at);
    }
    let together = members
        .values()
        .enumerate()
        .map(|(number, members)| connectivity_group(blueprint, number, members, catalog));
    Ok(Decomposed { groups: groups(blueprint), together: together.collect::<Result<_, _>>()? })
}

/// Checks all names. Gives the index of each environment.
fn check(blueprint: &Blueprint) -> Result<BTreeMap<&str, usize>, BlueprintError> {
    let mut index = BTreeMap::new();
    let artifacts: BTreeSet<&str> =
        blueprint.artifacts.iter().map(|artifact| artifact.name.as_str()).collect();
    for (at, environment) in blueprint.environments.iter().enumerate() {
        let place = format!("environment {:?}", environment.name);
        if index.insert(environment.name.as_str(), at).is_some() {
            let reason = "is listed twice".to_owned();
            return Err(BlueprintError::Bad { place, reason, expected: "each name once" });
        }
        check_kind(environment, &place)?;
        for artifact in &environment.artifacts {
            if !artifacts.contains(artifact.as_str()) {
                let known = listed(artifacts.iter().copied());
                return Err(BlueprintError::Undefined {
                    place,
                    what: "artifact",
                    name: artifact.clone(),
                    known,
                });
            }
        }
    }
    for (number, connection) in blueprint.connections.iter().enumerate() {
        for end in [&connection.from, &connection.to] {
            if !index.contains_key(end.as_str()) {
                return Err(BlueprintError::Undefined {
                    place: format!("connection {} ({} to {})", number + 1, connection.from, connection.to),
                    what: "environment",
                    name: end.clone(),
                    known: listed(index.keys().copied()),
                });
            }
        }
    }
    Ok(index)
}

/// What an environment of its kind must and must not have.
fn check_kind(environment: &Environment, place: &str) -> Result<(), BlueprintError> {
    let (reason, expected) = match environment.kind {
        _ if environment.count == 0 => ("count is 0", "at least 1"),
        Kind::Vm if environment.request.is_none() => {
            ("a VM without a request", "request, as in \"m1.large; xpus=1\"")
        }
        Kind::Vm if environment.adapter.is_some() => {
            ("a VM with an adapter", "no adapter: daemons start VMs")
        }
        Kind::Vm | Kind::BareMetal if environment.node.is_some() => {
            ("names a node, and is no container", "no node: VMs are placed, and machines are nodes")
        }
        Kind::Container | Kind::BareMetal if environment.adapter.is_none() => {
            ("names no adapter to start it", "adapter, as in \"slurm\"")
        }
        Kind::Container | Kind::BareMetal if !environment.command.is_empty() => (
            "has a command, which its adapter would not get",
            "artifacts, which adapters run; commands are for VMs",
        ),
        _ => return Ok(()),
    };
    Err(BlueprintError::Bad { place: place.to_owned(), reason: reason.to_owned(), expected })
}

fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn groups(blueprint: &Blueprint) -> Vec<EnvironmentGroup> {
    let mut groups: BTreeMap<(Kind, Option<&String>), Vec<String>> = BTreeMap::new();
    for environment in &blueprint.environments {
        groups
            .entry((environment.kind, environment.adapter.as_ref()))
            .or_default()
            .push(environment.name.clone());
    }
    let group = |((kind, adapter), environments): ((Kind, Option<&String>), Vec<String>)| EnvironmentGroup {
        kind,
        adapter: adapter.cloned(),
        environments,
    };
    groups.into_iter().map(group).collect()
}

fn connectivity_group(
    blueprint: &Blueprint,
    number: usize,
    members: &[usize],
    catalog: &Catalog,
) -> Result<ConnectivityGroup, BlueprintError> {
    let environments: Vec<&Environment> = members.iter().map(|at| &blueprint.environments[*at]).collect();
    let (mut vms, mut starts, mut handed) = (Vec::new(), Vec::new(), Vec::new());
    for environment in &environments {
        match (&environment.request, &environment.adapter) {
            (Some(request), None) => {
                vms.push(vm_group(environment, request, catalog)?);
                if !environment.command.is_empty() {
                    starts.push(started(blueprint, environment)?);
                }
            }
            (_, adapter) => {
                let artifacts = blueprint
                    .artifacts
                    .iter()
                    .filter(|artifact| environment.artifacts.contains(&artifact.name));
                handed.push(AdapterEnvironment {
                    adapter: adapter.clone().unwrap_or_default(),
                    environment: (*environment).clone(),
                    artifacts: artifacts.cloned().collect(),
                });
            }
        }
    }
    let name = format!("{}-{number}", blueprint.name);
    let request = if vms.is_empty() {
        None
    } else {
        let cluster = ClusterName::new(&name).map_err(|error| BlueprintError::Bad {
            place: format!("blueprint {:?}", blueprint.name),
            reason: error.to_string(),
            expected: "a name that also names a cluster",
        })?;
        Some(ClusterRequest::new(cluster, vms))
    };
    let names: Vec<String> = environments.iter().map(|environment| environment.name.clone()).collect();
    Ok(ConnectivityGroup {
        networks: networks(blueprint, &name, &names),
        environments: names,
        request,
        started: starts,
        handed,
    })
}

fn vm_group(environment: &Environment, request: &str, catalog: &Catalog) -> Result<VmGroup, BlueprintError> {
    let wrong = |source| BlueprintError::Request { environment: environment.name.clone(), source };
    let expr = instance::parse(request, catalog).map_err(wrong)?;
    let alternatives = lower::alternatives(&expr, catalog).map_err(wrong)?;
    Ok(VmGroup { name: environment.name.clone(), count: environment.count, alternatives })
}

/// The command of a VM, with the sources of artifacts filled in.
fn started(blueprint: &Blueprint, environment: &Environment) -> Result<VmCommand, BlueprintError> {
    const PLACEHOLDER: &str = "{artifact:";
    let mut command = Vec::new();
    for argument in &environment.command {
        let (mut text, mut rest) = (String::new(), argument.as_str());
        while let Some((before, after)) = rest.split_once(PLACEHOLDER) {
            let (name, behind) = after.split_once('}').unwrap_or((after, ""));
            let is_listed = environment.artifacts.iter().any(|artifact| artifact == name);
            let artifact = blueprint.artifacts.iter().find(|artifact| is_listed && artifact.name == name);
            let artifact = artifact.ok_or_else(|| BlueprintError::Undefined {
                place: format!("environment {:?}: command", environment.name),
                what: "artifact",
                name: name.to_owned(),
                known: environment.artifacts.join(", "),
            })?;
            text.push_str(before);
            text.push_str(&artifact.source);
            rest = behind;
        }
        text.push_str(rest);
        command.push(text);
    }
    Ok(VmCommand { environment: environment.name.clone(), command })
}

/// One network for each kind that connections of the group ask for.
fn networks(blueprint: &Blueprint, prefix: &str, members: &[String]) -> Vec<Network> {
    let mut by_mode: BTreeMap<NetworkMode, BTreeSet<String>> = BTreeMap::new();
    for connection in blueprint.connections.iter().filter(|connection| members.contains(&connection.from)) {
        by_mode
            .entry(connection.network)
            .or_default()
            .extend([connection.from.clone(), connection.to.clone()]);
    }
    let network = |(mode, environments): (NetworkMode, BTreeSet<String>)| Network {
        name: format!("{prefix}-{}", if mode == NetworkMode::Private { "private" } else { "bridge" }),
        mode,
        environments: environments.into_iter().collect(),
    };
    by_mode.into_iter().map(network).collect()
}
