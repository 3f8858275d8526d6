//! A file for a whole virtual cluster, in TOML or YAML.
//!
//! ```toml
//! name = "cfd"
//! near = { node = "storage1", max_hops = 3 }
//! [compactness]
//! mode = "required"
//! level = "leaf"
//! [anti_affinity]
//! level = "node"
//! at_most = 8
//! [[vms]]
//! name = "worker"
//! count = 16
//! request = "m1.large; xpus=1; hcas=1; gpu_hca_affinity=root"
//! ```

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::nova::extra_specs;
use super::{Catalog, Expr, RequestError, instance, lower};
use crate::model::{ClusterName, NodeName, SwitchName};
use crate::place::{AntiAffinity, ClusterRequest, Compactness, Domain, Mode, Near, NearTo, VmGroup};
use crate::unreadable::Unreadable;

/// A virtual cluster: all its VMs get their places at once, or none does.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Cluster))]
#[serde(deny_unknown_fields)]
struct ClusterFile {
    /// Its name; that of its VMs begins with it.
    #[cfg_attr(test, schema(value_type = String))]
    name: ClusterName,
    /// How close together it must be; as close as possible, if it is not given.
    #[serde(default)]
    compactness: CompactnessTable,
    /// A limit on VMs in one place.
    anti_affinity: Option<AntiAffinityTable>,
    /// What it should be close to, such as its data.
    near: Option<NearTable>,
    /// Only these nodes; all, if none is named.
    #[cfg_attr(test, schema(value_type = Vec<String>))]
    #[serde(default)]
    only_nodes: BTreeSet<NodeName>,
    /// None of these nodes.
    #[cfg_attr(test, schema(value_type = Vec<String>))]
    #[serde(default)]
    not_nodes: BTreeSet<NodeName>,
    /// Groups of VMs that are alike.
    vms: Vec<VmsTable>,
}

/// How close together a cluster must be.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Compactness))]
#[serde(deny_unknown_fields)]
struct CompactnessTable {
    /// How much that matters; `preferred`, if it is not given.
    #[serde(default)]
    mode: Mode,
    /// With `required`: all VMs are on one `node`, or below one `leaf`, `spine` or `core` switch, or below one of this height (a number from 1).
    level: Option<String>,
    /// Most hops between any two VMs.
    max_hops: Option<u32>,
    /// Most leaf switches in use (`--switches` of Slurm).
    max_leaf_switches: Option<u32>,
}

/// A limit on the VMs of a cluster in one place, so that what fails there takes few along.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = AntiAffinity))]
#[serde(deny_unknown_fields)]
struct AntiAffinityTable {
    /// What counts as one place: `node`, `leaf`, `spine`, `core`, or the height of a switch (a number from 1).
    level: String,
    /// Most VMs in one such place; 1, if it is not given.
    #[serde(default = "one")]
    at_most: u32,
}

/// What a cluster should be close to: exactly one of `node` and `switch`.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Near))]
#[serde(deny_unknown_fields)]
struct NearTable {
    /// This node.
    #[cfg_attr(test, schema(value_type = Option<String>))]
    node: Option<NodeName>,
    /// What is below this switch.
    #[cfg_attr(test, schema(value_type = Option<String>))]
    switch: Option<SwitchName>,
    /// Most hops between it and any VM; as near as possible, if it is not given.
    max_hops: Option<u32>,
}

/// VMs that are alike.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Vms))]
#[serde(deny_unknown_fields)]
struct VmsTable {
    /// Name of the group; `vm`, if it is not given. Its VMs are called CLUSTER-NAME-0, CLUSTER-NAME-1 and so on.
    #[serde(default = "vm")]
    name: String,
    /// How many; 1, if it is not given.
    #[serde(default = "one")]
    count: u32,
    /// What each needs, as an instance type: `vcpus=4; memory_mb=8192; gpus=1`.
    #[serde(default)]
    request: Option<String>,
    /// The same in the words of OpenStack's flavors (`hw:cpu_cores` and others); both together must hold.
    #[serde(default)]
    extra_specs: BTreeMap<String, String>,
}

fn one() -> u32 {
    1
}

fn vm() -> String {
    "vm".to_owned()
}

/// Language of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// TOML.
    Toml,
    /// YAML.
    Yaml,
}

impl Language {
    /// By the extension of a file's name: YAML for `.yaml` and `.yml`, else TOML.
    #[must_use]
    pub fn of(file_name: &str) -> Self {
        let name = file_name.to_ascii_lowercase();
        if name.ends_with(".yaml") || name.ends_with(".yml") { Self::Yaml } else { Self::Toml }
    }
}

/// A request that was read from a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadCluster {
    /// The request.
    pub request: ClusterRequest,
    /// What of the request is left to whoever starts the VMs.
    pub notes: Vec<String>,
}

/// Reads a file with a virtual cluster.
///
/// # Errors
/// What is wrong, with line and column, or with the group and the column of its request.
pub fn read(text: &str, language: Language, catalog: &Catalog) -> Result<ReadCluster, RequestError> {
    let expected = "a virtual cluster: name, [[vms]] with count and request, and optionally compactness, anti_affinity, near";
    let file: ClusterFile = match language {
        Language::Toml => {
            toml::from_str(text).map_err(|error| unreadable(Unreadable::toml(text, &error, expected)))?
        }
        Language::Yaml => {
            serde_yaml_ng::from_str(text).map_err(|error| unreadable(Unreadable::yaml(&error, expected)))?
        }
    };
    build(file, text, catalog)
}

fn unreadable(wrong: Unreadable) -> RequestError {
    RequestError::syntax(wrong.place(), wrong.reason, wrong.expected)
}

/// The line of a request in a file, if it is on one line there.
fn line_of(text: &str, request: &str) -> Option<usize> {
    let has = |words: &[&str]| {
        text.lines().position(|line| {
            !line.trim_start().starts_with('#') && words.iter().all(|word| line.contains(word))
        })
    };
    has(&["request", request]).or_else(|| has(&[request])).map(|at| at + 1)
}

fn build(file: ClusterFile, text: &str, catalog: &Catalog) -> Result<ReadCluster, RequestError> {
    let (mut groups, mut notes) = (Vec::new(), Vec::new());
    for vms in file.vms {
        let outer = format!("vms {:?}", vms.name);
        let line = vms.request.as_deref().and_then(|request| line_of(text, request));
        let wrong = |error: RequestError| match line {
            // A column of the request.
            Some(line) if error.to_string().starts_with("column ") => {
                error.within(&format!("line {line}, {outer}"))
            }
            _ => error.within(&outer),
        };
        let mut all = Vec::new();
        if let Some(request) = &vms.request {
            all.push(instance::parse(request, catalog).map_err(wrong)?);
        }
        let (expr, ignored) = extra_specs(&vms.extra_specs, catalog).map_err(wrong)?;
        all.push(expr);
        notes.extend(ignored.into_iter().map(|note| format!("{outer}: {note}")));
        let alternatives = lower::alternatives(&Expr::All(all), catalog).map_err(wrong)?;
        groups.push(VmGroup { name: vms.name, count: vms.count, alternatives });
    }
    let level = file.compactness.level.as_deref();
    let compactness = Compactness {
        mode: file.compactness.mode,
        level: level.map(|level| domain("compactness.level", level)).transpose()?,
        max_hops: file.compactness.max_hops,
        max_leaf_switches: file.compactness.max_leaf_switches,
    };
    let anti_affinity = match &file.anti_affinity {
        None => None,
        Some(anti) => {
            Some(AntiAffinity { domain: domain("anti_affinity.level", &anti.level)?, at_most: anti.at_most })
        }
    };
    let near = file.near.map(near).transpose()?;
    let (only_nodes, not_nodes) = (file.only_nodes, file.not_nodes);
    let request =
        ClusterRequest { name: file.name, groups, compactness, anti_affinity, near, only_nodes, not_nodes };
    request.check()?;
    Ok(ReadCluster { request, notes })
}

fn near(near: NearTable) -> Result<Near, RequestError> {
    let to = match (near.node, near.switch) {
        (Some(node), None) => NearTo::Node(node),
        (None, Some(switch)) => NearTo::Switch(switch),
        _ => return Err(RequestError::syntax("near", "needs one place", "exactly one of node and switch")),
    };
    Ok(Near { to, max_hops: near.max_hops })
}

/// `node`, `leaf`, `spine`, `core`, or the height of a switch.
fn domain(place: &str, word: &str) -> Result<Domain, RequestError> {
    match word.to_ascii_lowercase().as_str() {
        "node" | "host" | "0" => Ok(Domain::Node),
        "leaf" => Ok(Domain::LEAF),
        "spine" => Ok(Domain::SPINE),
        "core" => Ok(Domain::CORE),
        other => other.parse().map(Domain::Switch).map_err(|_| {
            RequestError::syntax(
                place,
                format!("{word:?} is not a level"),
                "node, leaf, spine, core or a height from 1",
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use vmove_skip::installed::is_current;
    use vmove_skip::reference::{keys_page, type_named};

    use super::*;

    /// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-sched --lib the_checked_in` writes it.
    #[test]
    fn the_checked_in_page_of_keys_is_current() {
        let types = [
            type_named::<ClusterFile>(),
            type_named::<VmsTable>(),
            type_named::<CompactnessTable>(),
            type_named::<Mode>(),
            type_named::<AntiAffinityTable>(),
            type_named::<NearTable>(),
        ];
        let about = "A file for `vmove place` and `vmove cluster start`, in YAML (`.yaml`, `.yml`) or TOML: [Place and lease](../sched-bridge.md#place-and-lease), \
            [examples](../../examples/cluster). The file is a [Cluster](#cluster).";
        let page = keys_page("Keys of virtual clusters", about, &types);
        is_current("docs/reference/cluster-files.md", page.as_bytes(), "vmove-sched");
    }
}
