//! From the tree of conditions to the alternatives that a placement works with.

use std::collections::{BTreeMap, BTreeSet};

use super::catalog::DEEPEST;
use super::{Catalog, Clause, Expr, Key, Op, RequestError};
use crate::model::{DeviceKind, LinkLayer, MemoryMib};
use crate::place::{Affinity, Alternative, DeviceFilter, DeviceNeed, NodeCondition, NumaPolicy, Pages};

/// Most alternatives of one request.
const MOST: usize = 32;

/// The alternatives that a request allows.
///
/// # Errors
/// Unknown instance types and values, contradictions, too many alternatives.
pub fn alternatives(expr: &Expr, catalog: &Catalog) -> Result<Vec<Alternative>, RequestError> {
    unfold(expr, catalog, 0)?.iter().map(|way| lower(&weeded(way)?)).collect()
}

/// What a VM of an instance type needs.
///
/// # Errors
/// As [`alternatives`]; none for the types of a [`Catalog`], which were checked when it was read.
pub fn of_type(catalog: &Catalog, name: &str) -> Result<Vec<Alternative>, RequestError> {
    alternatives(catalog.type_named(name, "instance type")?, catalog)
}

/// A condition, and how many instance types it is behind.
type Deep<'a> = (usize, &'a Clause);

/// The disjunctive normal form, in which instance types are followed by what they stand for.
fn unfold<'a>(
    expr: &'a Expr,
    catalog: &'a Catalog,
    depth: usize,
) -> Result<Vec<Vec<Deep<'a>>>, RequestError> {
    let too_many = || {
        RequestError::syntax("request", "too many combinations of OR", format!("at most {MOST} alternatives"))
    };
    let ways = match expr {
        Expr::Is(clause) => {
            let mut ways = vec![vec![(depth, clause)]];
            for name in expr.types() {
                let meaning = catalog.type_named(name, &clause.place)?;
                if depth >= DEEPEST {
                    return Err(RequestError::syntax(
                        &clause.place,
                        format!("instance type {name:?} stands for too many others"),
                        format!("at most {DEEPEST}, one for the other"),
                    ));
                }
                ways = combined(&ways, &unfold(meaning, catalog, depth + 1)?).ok_or_else(too_many)?;
            }
            ways
        }
        Expr::Any(parts) => {
            let mut ways = Vec::new();
            for part in parts {
                ways.extend(unfold(part, catalog, depth)?);
                if ways.len() > MOST {
                    return Err(too_many());
                }
            }
            ways
        }
        Expr::All(parts) => {
            let mut ways: Vec<Vec<Deep<'_>>> = vec![Vec::new()];
            for part in parts {
                ways = combined(&ways, &unfold(part, catalog, depth)?).ok_or_else(too_many)?;
            }
            ways
        }
    };
    Ok(ways)
}

/// Each of the ways with each of the others; none, if these are too many.
fn combined<'a>(ways: &[Vec<Deep<'a>>], more: &[Vec<Deep<'a>>]) -> Option<Vec<Vec<Deep<'a>>>> {
    if ways.len() * more.len() > MOST {
        return None;
    }
    let both = |way: &Vec<Deep<'a>>, more: &Vec<Deep<'a>>| [way.as_slice(), more].concat();
    Some(ways.iter().flat_map(|way| more.iter().map(move |more| both(way, more))).collect())
}

/// What the request itself says of a key takes the place of what its instance type says, and so on. CPU features are added.
fn weeded<'a>(way: &[Deep<'a>]) -> Result<Vec<&'a Clause>, RequestError> {
    let mut least: BTreeMap<&Key, usize> = BTreeMap::new();
    for (depth, clause) in way {
        let known = least.entry(&clause.key).or_insert(*depth);
        *known = (*known).min(*depth);
    }
    let counts = |(depth, clause): &&Deep<'a>| {
        clause.key == Key::CpuFeatures || least.get(&clause.key).is_none_or(|least| depth == least)
    };
    let kept: Vec<&Clause> = way.iter().filter(counts).map(|(_, clause)| *clause).collect();
    one_type(&kept)?;
    Ok(kept)
}

/// A VM is of one instance type.
fn one_type(clauses: &[&Clause]) -> Result<(), RequestError> {
    let mut named: Vec<(&str, &str)> = Vec::new();
    for clause in clauses.iter().filter(|clause| clause.key == Key::Flavor) {
        match &clause.op {
            Op::OneOf(names) | Op::AllOf(names) => {
                named.extend(names.iter().map(|name| (name.as_str(), clause.place.as_str())));
            }
            _ => {
                let found = "a condition on the instance type";
                return Err(RequestError::syntax(&clause.place, found, "the name of one"));
            }
        }
    }
    match named.as_slice() {
        [] | [_] => Ok(()),
        [(first, _), (second, place), ..] => {
            Err(RequestError::contradiction(*place, format!("instance types {first} and {second}")))
        }
    }
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

fn lower(clauses: &[&Clause]) -> Result<Alternative, RequestError> {
    let gathered = Gathered { clauses };
    let mut alternative = Alternative::default();
    alternative.vcpus = gathered.least(&Key::Vcpus)?.unwrap_or(alternative.vcpus);
    if let Some((least, _)) = gathered.range(&Key::MemoryMb)? {
        alternative.memory = MemoryMib(least);
    }
    alternative.pages = pages(&gathered)?;
    alternative.devices = devices(&gathered)?;
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

fn devices(gathered: &Gathered<'_>) -> Result<Vec<DeviceNeed>, RequestError> {
    let mut needs = Vec::new();
    let live_migratable = matches!(gathered.single(&Key::LiveMigratable)?, Some((value, _)) if value == "yes" || value == "true");
    let (archs, not_archs) = gathered.choice(&Key::GpuArch)?;
    let vendors = vendors(gathered)?;
    let described = !archs.is_empty() || !vendors.is_empty();
    // A request that names an architecture wants at least one GPU.
    let gpus = gathered.least(&Key::Gpus)?.unwrap_or(u32::from(described));
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
    needs.extend(shares(gathered, live_migratable)?);
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

/// vGPUs, MIG slices and remote GPUs: how many, and of which types.
fn shares(gathered: &Gathered<'_>, live_migratable: bool) -> Result<Vec<DeviceNeed>, RequestError> {
    const KINDS: [(DeviceKind, Key, Key); 3] = [
        (DeviceKind::Vgpu, Key::Vgpus, Key::VgpuType),
        (DeviceKind::MigSlice, Key::Migs, Key::MigProfile),
        (DeviceKind::RemoteGpu, Key::RemoteGpus, Key::RemoteGpuModel),
    ];
    let mut needs = Vec::new();
    for (kind, number, model) in &KINDS {
        let (models, none) = gathered.choice(model)?;
        if !none.is_empty() {
            let found = format!("{model}!={}", none.into_iter().collect::<Vec<_>>().join(","));
            return Err(RequestError::syntax(
                "request",
                found,
                format!("{model}= with one or several of them"),
            ));
        }
        // A request that names a type wants at least one.
        let count = gathered.least(number)?.unwrap_or(u32::from(!models.is_empty()));
        if count == 0 && !models.is_empty() {
            return Err(RequestError::contradiction("request", format!("{number}=0 beside a {model}")));
        }
        if count > 0 {
            let traits = if *kind == DeviceKind::Vgpu { own_traits(gathered) } else { BTreeSet::new() };
            let live_migratable = live_migratable && kind.stays().is_some();
            let filter = DeviceFilter { models, traits, live_migratable, ..DeviceFilter::kind(*kind) };
            needs.push(DeviceNeed { count, filter });
        }
    }
    Ok(needs)
}

/// Traits of a site that a request with vGPUs requires: as with Nova, they are those of the vGPU, not of any device of the node.
fn own_traits(gathered: &Gathered<'_>) -> BTreeSet<String> {
    let required = |op: &Op| matches!(op, Op::AllOf(words) | Op::OneOf(words) if words == &["required"]);
    let name = |clause: &&Clause| match &clause.key {
        Key::Trait(name) if name.starts_with("CUSTOM_") && required(&clause.op) => Some(name.clone()),
        _ => None,
    };
    gathered.clauses.iter().filter_map(name).collect()
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
