//! From the tree of conditions to the alternatives that a placement works with.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Clause, Expr, Key, Op, RequestError};
use crate::model::{DeviceKind, LinkLayer, MemoryMib};
use crate::place::{Affinity, Alternative, DeviceFilter, DeviceNeed, NodeCondition, NumaPolicy, Pages};

/// Most alternatives of one request.
const MOST: usize = 32;

/// Cores and memory of an instance type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flavor {
    /// Cores.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mb: u64,
    /// GPUs; usually 0.
    #[serde(default)]
    pub gpus: u32,
}

/// Instance types by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Flavors(pub BTreeMap<String, Flavor>);

impl Default for Flavors {
    /// OpenStack's former default types (`m1.*`), and the same sizes with a GPU (`cg1.*`).
    fn default() -> Self {
        let sizes = [
            ("tiny", 1, 512),
            ("small", 1, 2048),
            ("medium", 2, 4096),
            ("large", 4, 8192),
            ("xlarge", 8, 16384),
        ];
        let mut flavors = BTreeMap::new();
        for (size, vcpus, memory_mb) in sizes {
            flavors.insert(format!("m1.{size}"), Flavor { vcpus, memory_mb, gpus: 0 });
            flavors.insert(format!("cg1.{size}"), Flavor { vcpus, memory_mb, gpus: 1 });
        }
        Self(flavors)
    }
}

/// The alternatives that a request allows.
///
/// # Errors
/// Unknown instance types and values, contradictions, too many alternatives.
pub fn alternatives(expr: &Expr, flavors: &Flavors) -> Result<Vec<Alternative>, RequestError> {
    unfold(expr)?.iter().map(|clauses| lower(clauses, flavors)).collect()
}

/// The disjunctive normal form.
fn unfold(expr: &Expr) -> Result<Vec<Vec<&Clause>>, RequestError> {
    let too_many = || {
        RequestError::syntax("request", "too many combinations of OR", format!("at most {MOST} alternatives"))
    };
    let ways = match expr {
        Expr::Is(clause) => vec![vec![clause]],
        Expr::Any(parts) => {
            let mut ways = Vec::new();
            for part in parts {
                ways.extend(unfold(part)?);
            }
            ways
        }
        Expr::All(parts) => {
            let mut ways: Vec<Vec<&Clause>> = vec![Vec::new()];
            for part in parts {
                let more = unfold(part)?;
                if ways.len() * more.len() > MOST {
                    return Err(too_many());
                }
                ways = ways
                    .iter()
                    .flat_map(|way| more.iter().map(move |more| [way.as_slice(), more].concat()))
                    .collect();
            }
            ways
        }
    };
    if ways.len() > MOST { Err(too_many()) } else { Ok(ways) }
}

/// Conditions of one alternative, to be looked up by key.
struct Gathered<'a> {
    clauses: &'a [&'a Clause],
}

impl<'a> Gathered<'a> {
    fn of(&self, key: &'a Key) -> impl Iterator<Item = &'a Clause> {
        self.clauses.iter().copied().filter(move |clause| clause.key == *key)
    }

    /// The intersection of all ranges of a number.
    fn range(&self, key: &'a Key) -> Result<Option<(u64, u64)>, RequestError> {
        let mut range: Option<(u64, u64)> = None;
        for clause in self.of(key) {
            let Op::Within(from, to) = clause.op else { continue };
            let (low, high) = range.unwrap_or((0, u64::MAX));
            let both = (low.max(from), high.min(to));
            if both.0 > both.1 {
                return Err(RequestError::contradiction(
                    &clause.place,
                    format!("{key} must be {low}..{high} and {from}..{to}"),
                ));
            }
            range = Some(both);
        }
        Ok(range)
    }

    /// The smallest allowed value of a number.
    fn least(&self, key: &'a Key) -> Result<Option<u32>, RequestError> {
        let Some((least, _)) = self.range(key)? else { return Ok(None) };
        let place = self.of(key).next().map_or("request", |clause| clause.place.as_str());
        let least = u32::try_from(least);
        least
            .map(Some)
            .map_err(|_| RequestError::syntax(place, format!("{key} above 2^32"), "a smaller number"))
    }

    /// Allowed values (any, if the set is empty) and forbidden ones.
    fn choice(&self, key: &'a Key) -> Result<(BTreeSet<String>, BTreeSet<String>), RequestError> {
        let mut any: Option<BTreeSet<String>> = None;
        let mut none = BTreeSet::new();
        for clause in self.of(key) {
            let lower = |words: &[String]| -> BTreeSet<String> {
                words.iter().map(|word| word.to_ascii_lowercase()).collect()
            };
            let own = match &clause.op {
                Op::AllOf(words) if lower(words).len() > 1 => {
                    let reason = format!("{key} cannot be {} at once", words.join(" and "));
                    return Err(RequestError::contradiction(&clause.place, reason));
                }
                Op::AllOf(words) | Op::OneOf(words) => lower(words),
                Op::Contains(word) => lower(std::slice::from_ref(word)),
                Op::NoneOf(words) => {
                    none.extend(lower(words));
                    continue;
                }
                Op::Within(..) => continue,
            };
            let both: BTreeSet<String> = match &any {
                Some(before) => before.intersection(&own).cloned().collect(),
                None => own,
            };
            if both.is_empty() {
                return Err(RequestError::contradiction(
                    &clause.place,
                    format!("no value of {key} meets all conditions"),
                ));
            }
            any = Some(both);
        }
        let any = any.map(|any| any.difference(&none).cloned().collect::<BTreeSet<_>>());
        if any.as_ref().is_some_and(BTreeSet::is_empty) {
            return Err(RequestError::contradiction(
                "request",
                format!("{key} must be and must not be {}", none.into_iter().collect::<Vec<_>>().join(", ")),
            ));
        }
        Ok((any.unwrap_or_default(), none))
    }

    /// The value of a key that has one.
    fn single(&self, key: &'a Key) -> Result<Option<(String, &'a str)>, RequestError> {
        let (any, _) = self.choice(key)?;
        let place = self.of(key).next().map_or("request", |clause| clause.place.as_str());
        Ok(any.into_iter().next().map(|value| (value, place)))
    }
}

fn lower(clauses: &[&Clause], flavors: &Flavors) -> Result<Alternative, RequestError> {
    let gathered = Gathered { clauses };
    let mut alternative = Alternative::default();
    let flavor = flavor(&gathered, flavors)?;
    if let Some(flavor) = flavor {
        alternative.vcpus = flavor.vcpus;
        alternative.memory = MemoryMib(flavor.memory_mb);
    }
    alternative.vcpus = gathered.least(&Key::Vcpus)?.unwrap_or(alternative.vcpus);
    if let Some((least, _)) = gathered.range(&Key::MemoryMb)? {
        alternative.memory = MemoryMib(least);
    }
    alternative.pages = pages(&gathered)?;
    alternative.devices = devices(&gathered, flavor.map_or(0, |flavor| flavor.gpus))?;
    alternative.numa = numa(&gathered)?;
    alternative.affinity = affinity(&gathered)?;
    alternative.isolate_vfs = isolate_vfs(&gathered)?;
    alternative.conditions = conditions(&gathered)?;
    if alternative.vcpus == 0 && alternative.memory.0 == 0 && alternative.devices.is_empty() {
        return Err(RequestError::syntax(
            "request",
            "the request asks for no cores, no memory and no devices",
            "an instance type, or vcpus and memory_mb",
        ));
    }
    Ok(alternative)
}

/// The instance type, if one is named.
fn flavor<'a>(gathered: &Gathered<'_>, flavors: &'a Flavors) -> Result<Option<&'a Flavor>, RequestError> {
    let mut named: Vec<(&str, &str)> = Vec::new();
    for clause in gathered.of(&Key::Flavor) {
        if let Op::OneOf(names) | Op::AllOf(names) = &clause.op {
            named.extend(names.iter().map(|name| (name.as_str(), clause.place.as_str())));
        }
    }
    match named.as_slice() {
        [] => Ok(None),
        [(name, place)] => flavors.0.get(*name).map(Some).ok_or_else(|| {
            let known: Vec<&str> = flavors.0.keys().map(String::as_str).collect();
            RequestError::syntax(
                *place,
                format!("unknown instance type {name:?}"),
                format!("one of {}", known.join(", ")),
            )
        }),
        [(first, _), (second, place), ..] => {
            Err(RequestError::contradiction(*place, format!("instance types {first} and {second}")))
        }
    }
}

fn isolate_vfs(gathered: &Gathered<'_>) -> Result<bool, RequestError> {
    let Some((value, place)) = gathered.single(&Key::VfPolicy)? else { return Ok(false) };
    match value.as_str() {
        "isolate" => Ok(true),
        "none" => Ok(false),
        other => Err(RequestError::syntax(place, format!("{other:?} as vf_policy"), "isolate or none")),
    }
}

fn pages(gathered: &Gathered<'_>) -> Result<Pages, RequestError> {
    let Some((value, place)) = gathered.single(&Key::PageSize)? else { return Ok(Pages::Normal) };
    match value.as_str() {
        "small" | "any" | "4kb" | "4k" => Ok(Pages::Normal),
        "large" | "2mb" | "2m" | "2048" => Ok(Pages::Huge2M),
        "1gb" | "1g" | "1048576" => Ok(Pages::Huge1G),
        other => {
            Err(RequestError::syntax(place, format!("{other:?} as page_size"), "small, large, 2MB or 1GB"))
        }
    }
}

fn numa(gathered: &Gathered<'_>) -> Result<NumaPolicy, RequestError> {
    let Some((value, place)) = gathered.single(&Key::NumaPolicy)? else { return Ok(NumaPolicy::Preferred) };
    match value.as_str() {
        "required" => Ok(NumaPolicy::Required),
        "socket" => Ok(NumaPolicy::Socket),
        // Nova's `legacy` is strict if the NUMA node of the device is known, and else ignored.
        "preferred" | "legacy" => Ok(NumaPolicy::Preferred),
        other => Err(RequestError::syntax(
            place,
            format!("{other:?} as numa_policy"),
            "required, preferred, legacy or socket",
        )),
    }
}

fn affinity(gathered: &Gathered<'_>) -> Result<Affinity, RequestError> {
    let Some((value, place)) = gathered.single(&Key::GpuHcaAffinity)? else { return Ok(Affinity::Preferred) };
    match value.as_str() {
        "root" | "same_root" => Ok(Affinity::SameRoot),
        "numa" | "same_numa" => Ok(Affinity::SameNuma),
        "preferred" | "none" => Ok(Affinity::Preferred),
        other => Err(RequestError::syntax(
            place,
            format!("{other:?} as gpu_hca_affinity"),
            "root, numa or preferred",
        )),
    }
}

fn devices(gathered: &Gathered<'_>, flavor_gpus: u32) -> Result<Vec<DeviceNeed>, RequestError> {
    let mut needs = Vec::new();
    let live_migratable = matches!(gathered.single(&Key::LiveMigratable)?, Some((value, _)) if value == "yes" || value == "true");
    let (archs, not_archs) = gathered.choice(&Key::GpuArch)?;
    let vendors = vendors(gathered)?;
    let described = !archs.is_empty() || !vendors.is_empty();
    // A request that names an architecture wants at least one GPU.
    let gpus = gathered.least(&Key::Gpus)?.unwrap_or(flavor_gpus.max(u32::from(described)));
    if gpus == 0 && described {
        return Err(RequestError::contradiction("request", "xpus=0 beside an xpu_arch or xpu_vendor"));
    }
    if gpus > 0 {
        let filter = DeviceFilter {
            archs,
            not_archs,
            vendors,
            live_migratable,
            ..DeviceFilter::kind(DeviceKind::Gpu)
        };
        needs.push(DeviceNeed { count: gpus, filter });
    }
    let link_layer = match gathered.single(&Key::NetArch)? {
        None => None,
        Some((value, place)) => match value.as_str() {
            "infiniband" => Some(LinkLayer::InfiniBand),
            "ethernet" | "roce" => Some(LinkLayer::Ethernet),
            other => {
                return Err(RequestError::syntax(
                    place,
                    format!("{other:?} as net_arch"),
                    "infiniband or ethernet",
                ));
            }
        },
    };
    let mbps = gathered.least(&Key::NetMbps)?;
    let vfs = gathered.least(&Key::Vfs)?.unwrap_or(0);
    let wants_net = link_layer.is_some() || mbps.is_some();
    let hcas = gathered.least(&Key::Hcas)?.unwrap_or(u32::from(wants_net && vfs == 0));
    for (kind, count) in [(DeviceKind::Hca, hcas), (DeviceKind::Vf, vfs)] {
        if count > 0 {
            let min_rate_gbps = mbps.unwrap_or(0).div_ceil(1000);
            let filter =
                DeviceFilter { link_layer, min_rate_gbps, live_migratable, ..DeviceFilter::kind(kind) };
            needs.push(DeviceNeed { count, filter });
        }
    }
    Ok(needs)
}

fn vendors(gathered: &Gathered<'_>) -> Result<BTreeSet<u16>, RequestError> {
    let (any, _) = gathered.choice(&Key::GpuVendor)?;
    let place = gathered.of(&Key::GpuVendor).next().map_or("request", |clause| clause.place.as_str());
    let id = |word: &String| match word.as_str() {
        "nvidia" => Ok(0x10de),
        "amd" => Ok(0x1002),
        "intel" => Ok(0x8086),
        hex => u16::from_str_radix(hex.trim_start_matches("0x"), 16).map_err(|_| {
            RequestError::syntax(
                place,
                format!("{hex:?} as xpu_vendor"),
                "nvidia, amd, intel or a PCI vendor id",
            )
        }),
    };
    any.iter().map(id).collect()
}

fn conditions(gathered: &Gathered<'_>) -> Result<Vec<NodeCondition>, RequestError> {
    let mut conditions = Vec::new();
    let mut choice =
        |key, is: fn(BTreeSet<String>) -> NodeCondition, not: fn(BTreeSet<String>) -> NodeCondition| {
            let (any, none) = gathered.choice(key)?;
            conditions.extend((!any.is_empty()).then(|| is(any)));
            conditions.extend((!none.is_empty()).then(|| not(none)));
            Ok::<(), RequestError>(())
        };
    choice(&Key::CpuArch, NodeCondition::CpuArch, NodeCondition::CpuArchNot)?;
    choice(&Key::Hypervisor, NodeCondition::Hypervisor, NodeCondition::HypervisorNot)?;
    if let Some((from, to)) = gathered.range(&Key::NodeMemoryMb)? {
        conditions.push(NodeCondition::NodeMemory(from, to));
    }
    if let Some((from, to)) = gathered.range(&Key::NodeVcpus)? {
        conditions.push(NodeCondition::NodeCores(from, to));
    }
    for clause in gathered.clauses {
        let words = match &clause.op {
            Op::AllOf(words) | Op::OneOf(words) | Op::NoneOf(words) => words.clone(),
            Op::Contains(word) => vec![word.clone()],
            Op::Within(..) => continue,
        };
        let unsupported = || {
            RequestError::syntax(
                &clause.place,
                format!("{} does not support this comparison", clause.key),
                "= with values",
            )
        };
        match (&clause.key, &clause.op) {
            (Key::CpuModel, Op::NoneOf(_)) | (Key::CpuFeatures, Op::NoneOf(_)) => return Err(unsupported()),
            (Key::CpuModel, _) => conditions.extend(words.into_iter().map(NodeCondition::CpuModel)),
            (Key::CpuFeatures, Op::OneOf(many)) if many.len() > 1 => return Err(unsupported()),
            (Key::CpuFeatures, _) => conditions.push(NodeCondition::CpuFeatures(words.into_iter().collect())),
            (Key::Trait(name), _) => conditions.push(trait_condition(name, &words, clause)?),
            (Key::Label(name), Op::AllOf(_) | Op::OneOf(_)) => {
                conditions.push(NodeCondition::Label(name.clone(), words.into_iter().collect()));
            }
            (Key::Label(_), _) => return Err(unsupported()),
            _ => {}
        }
    }
    for condition in &conditions {
        let NodeCondition::TraitNot(name) = condition else { continue };
        if conditions.contains(&NodeCondition::Trait(name.clone())) {
            return Err(RequestError::contradiction(
                "request",
                format!("trait {name} is both required and forbidden"),
            ));
        }
    }
    Ok(conditions)
}

fn trait_condition(name: &str, words: &[String], clause: &Clause) -> Result<NodeCondition, RequestError> {
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["required"] => Ok(NodeCondition::Trait(name.to_owned())),
        ["forbidden"] => Ok(NodeCondition::TraitNot(name.to_owned())),
        other => Err(RequestError::syntax(
            &clause.place,
            format!("{} as trait:{name}", other.join(",")),
            "required or forbidden",
        )),
    }
}
