//! Taking a blueprint apart.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Artifact, Blueprint, BlueprintError, Environment, Kind, NetworkMode};
use crate::model::ClusterName;
use crate::place::{ClusterRequest, Compactness, VmGroup};
use crate::request::{Flavors, instance, lower};

/// Environments of one kind and adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentGroup {
    /// What they are.
    pub kind: Kind,
    /// Who starts them; none for VMs.
    pub adapter: Option<String>,
    /// Their names.
    pub environments: Vec<String>,
}

/// What an adapter is given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    /// Which adapter.
    pub adapter: String,
    /// What is to be started.
    pub environment: Environment,
    /// Its artifacts, with their sources.
    pub artifacts: Vec<Artifact>,
}

/// VMs that a daemon starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// The environment; its VMs are called after it.
    pub environment: String,
    /// QEMU and its arguments, with the sources of artifacts in them.
    pub command: Vec<String>,
}

/// A network of a connectivity group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Unique in the blueprint.
    pub name: String,
    /// What it is.
    pub mode: NetworkMode,
    /// Environments on it.
    pub environments: Vec<String>,
}

/// Environments that are connected, and are placed together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Together {
    /// All of them, by name.
    pub environments: Vec<String>,
    /// The VMs among them; none if there are none.
    pub request: Option<ClusterRequest>,
    /// How those among them are started that say so.
    pub started: Vec<Started>,
    /// The others.
    pub handed: Vec<Handed>,
    /// Networks between them.
    pub networks: Vec<Network>,
}

/// A blueprint, taken apart. Every environment is in one environment group and in one connectivity group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decomposed {
    /// By kind and adapter.
    pub groups: Vec<EnvironmentGroup>,
    /// By connection.
    pub together: Vec<Together>,
}

/// Union-find over the places of environments (Tarjan 1975; path halving).
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

/// Takes a blueprint apart.
///
/// # Errors
/// Names that are there twice or nowhere, environments that lack what their kind needs, requests that are not understood.
pub fn decompose(blueprint: &Blueprint, flavors: &Flavors) -> Result<Decomposed, BlueprintError> {
    let index = check(blueprint)?;
    let mut sets = Sets((0..blueprint.environments.len()).collect());
    for connection in &blueprint.connections {
        sets.union(index[connection.from.as_str()], index[connection.to.as_str()]);
    }
    let mut members: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for at in 0..blueprint.environments.len() {
        members.entry(sets.find(at)).or_default().push(at);
    }
    let together =
        members.values().enumerate().map(|(number, own)| connected(blueprint, number, own, flavors));
    Ok(Decomposed { groups: groups(blueprint), together: together.collect::<Result<_, _>>()? })
}

fn check(blueprint: &Blueprint) -> Result<BTreeMap<&str, usize>, BlueprintError> {
    let bad = |place: &str, reason: String, expected| {
        Err(BlueprintError::Bad { place: format!("environment {place:?}"), reason, expected })
    };
    let mut index = BTreeMap::new();
    let artifacts: BTreeSet<&str> = blueprint.artifacts.iter().map(|own| own.name.as_str()).collect();
    let list = |known: Vec<&str>| if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    for (at, environment) in blueprint.environments.iter().enumerate() {
        let name = environment.name.as_str();
        if index.insert(name, at).is_some() {
            return bad(name, "is there twice".to_owned(), "each name once");
        }
        if environment.count == 0 {
            return bad(name, "count is 0".to_owned(), "at least 1");
        }
        match environment.kind {
            Kind::Vm if environment.request.is_none() => {
                return bad(name, "a VM without a request".to_owned(), "request, as in \"m1.large; xpus=1\"");
            }
            Kind::Vm if environment.adapter.is_some() => {
                return bad(name, "a VM with an adapter".to_owned(), "no adapter: VMs go to the daemons");
            }
            Kind::Container | Kind::BareMetal if environment.adapter.is_none() => {
                return bad(name, "names nobody to start it".to_owned(), "adapter, as in \"slurm\"");
            }
            Kind::Container | Kind::BareMetal if !environment.command.is_empty() => {
                let reason = "a command that its adapter would not see".to_owned();
                return bad(name, reason, "artifacts, which adapters run; a command only for VMs");
            }
            _ => {}
        }
        for artifact in &environment.artifacts {
            if !artifacts.contains(artifact.as_str()) {
                return Err(BlueprintError::Nowhere {
                    place: format!("environment {name:?}"),
                    what: "artifact",
                    name: artifact.clone(),
                    known: list(artifacts.iter().copied().collect()),
                });
            }
        }
    }
    for (number, connection) in blueprint.connections.iter().enumerate() {
        for end in [&connection.from, &connection.to] {
            if !index.contains_key(end.as_str()) {
                return Err(BlueprintError::Nowhere {
                    place: format!("connection {} ({} to {})", number + 1, connection.from, connection.to),
                    what: "environment",
                    name: end.clone(),
                    known: list(index.keys().copied().collect()),
                });
            }
        }
    }
    Ok(index)
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

fn connected(
    blueprint: &Blueprint,
    number: usize,
    members: &[usize],
    flavors: &Flavors,
) -> Result<Together, BlueprintError> {
    let environments: Vec<&Environment> = members.iter().map(|at| &blueprint.environments[*at]).collect();
    let (mut vms, mut started, mut handed) = (Vec::new(), Vec::new(), Vec::new());
    for environment in &environments {
        match (&environment.request, &environment.adapter) {
            (Some(request), None) => {
                vms.push(group(environment, request, flavors)?);
                if !environment.command.is_empty() {
                    started.push(start(blueprint, environment)?);
                }
            }
            (_, adapter) => {
                let artifacts =
                    blueprint.artifacts.iter().filter(|own| environment.artifacts.contains(&own.name));
                handed.push(Handed {
                    adapter: adapter.clone().unwrap_or_default(),
                    environment: (*environment).clone(),
                    artifacts: artifacts.cloned().collect(),
                });
            }
        }
    }
    let name = format!("{}-{number}", blueprint.name);
    let request = match vms.is_empty() {
        true => None,
        false => Some(ClusterRequest {
            name: ClusterName::new(&name).map_err(|error| BlueprintError::Bad {
                place: format!("blueprint {:?}", blueprint.name),
                reason: error.to_string(),
                expected: "a name without white space",
            })?,
            groups: vms,
            compactness: Compactness::default(),
            anti_affinity: None,
            near: None,
            only_nodes: BTreeSet::new(),
            not_nodes: BTreeSet::new(),
        }),
    };
    let names: Vec<String> = environments.iter().map(|own| own.name.clone()).collect();
    Ok(Together {
        networks: networks(blueprint, &name, &names),
        environments: names,
        request,
        started,
        handed,
    })
}

fn group(environment: &Environment, request: &str, flavors: &Flavors) -> Result<VmGroup, BlueprintError> {
    let wrong = |source| BlueprintError::Request { environment: environment.name.clone(), source };
    let expr = instance::parse(request).map_err(wrong)?;
    let alternatives = lower::alternatives(&expr, flavors).map_err(wrong)?;
    Ok(VmGroup { name: environment.name.clone(), count: environment.count, alternatives })
}

/// The command of a VM, with sources in the places of artifacts.
fn start(blueprint: &Blueprint, environment: &Environment) -> Result<Started, BlueprintError> {
    const MARK: &str = "{artifact:";
    let mut command = Vec::new();
    for argument in &environment.command {
        let (mut text, mut rest) = (String::new(), argument.as_str());
        while let Some((before, after)) = rest.split_once(MARK) {
            let (name, behind) = after.split_once('}').unwrap_or((after, ""));
            let own = environment.artifacts.iter().any(|artifact| artifact == name);
            let source = blueprint.artifacts.iter().find(|artifact| own && artifact.name == name);
            let source = source.ok_or_else(|| BlueprintError::Nowhere {
                place: format!("environment {:?}: command", environment.name),
                what: "artifact",
                name: name.to_owned(),
                known: environment.artifacts.join(", "),
            })?;
            text.push_str(before);
            text.push_str(&source.source);
            rest = behind;
        }
        text.push_str(rest);
        command.push(text);
    }
    Ok(Started { environment: environment.name.clone(), command })
}

/// One network of each mode that connections of the group ask for.
fn networks(blueprint: &Blueprint, prefix: &str, members: &[String]) -> Vec<Network> {
    let mut by_mode: BTreeMap<NetworkMode, BTreeSet<String>> = BTreeMap::new();
    for connection in blueprint.connections.iter().filter(|own| members.contains(&own.from)) {
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
