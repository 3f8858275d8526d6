//! Extra specs of OpenStack flavors, with the operators of Nova's scheduler filters.
//!
//! After `nova/scheduler/filters/extra_specs_ops.py`: `=` means "at least", `==` `!=` `>=` `<=` compare numbers, `s==` `s!=` text,
//! `<in>` asks for a part of a text or a member of a set, `<all-in>` for several, `<or>` for one of several. Without an operator the
//! value must be equal.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::instance::clause;
use super::{Clause, Expr, Key, Op, RequestError};

/// Keys for the hypervisor, which have no influence on placement: each gives a note.
const ELSEWHERE: [&str; 8] =
    ["hw:", "hw_rng:", "hw_video:", "quota:", "os:", "accel:", "aggregate_instance_extra_specs:", "vmware:"];

/// A flavor as read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NovaFlavor {
    /// Its name, if it has one.
    pub name: Option<String>,
    /// Its conditions.
    pub expr: Expr,
    /// One note for each key that has no influence on placement.
    pub notes: Vec<String>,
}

/// Device kinds by PCI alias (`[pci] alias` of Nova).
pub type Aliases = BTreeMap<String, Key>;

/// Common aliases.
#[must_use]
pub fn default_aliases() -> Aliases {
    let pairs = [
        ("gpu", Key::Gpus),
        ("a100", Key::Gpus),
        ("h100", Key::Gpus),
        ("hca", Key::Hcas),
        ("ib", Key::Hcas),
        ("vf", Key::Vfs),
        ("mlx5vf", Key::Vfs),
    ];
    pairs.into_iter().map(|(name, key)| (name.to_owned(), key)).collect()
}

/// Reads the output of `openstack flavor show -f json`: `vcpus`, `ram` and `properties` (an object, or text like
/// `hw:cpu_policy='dedicated', gpus='2'`).
///
/// # Errors
/// JSON that is not a flavor, with its line; unknown keys and operators, with their key.
pub fn read(json: &str, aliases: &Aliases) -> Result<NovaFlavor, RequestError> {
    #[derive(Deserialize)]
    struct FlavorFile {
        name: Option<String>,
        vcpus: Option<u64>,
        ram: Option<u64>,
        #[serde(default)]
        properties: Properties,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Properties {
        Map(BTreeMap<String, serde_json::Value>),
        Text(String),
        Null(()),
    }
    impl Default for Properties {
        fn default() -> Self {
            Self::Null(())
        }
    }
    let file: FlavorFile = serde_json::from_str(json).map_err(|error| {
        let place = format!("line {} column {}", error.line(), error.column());
        RequestError::syntax(place, error.to_string(), "the output of `openstack flavor show -f json`")
    })?;
    let specs = match file.properties {
        Properties::Null(()) => BTreeMap::new(),
        Properties::Text(text) => pairs(&text)?,
        Properties::Map(map) => map
            .into_iter()
            .map(|(key, value)| (key, value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
            .collect(),
    };
    let (expr, notes) = extra_specs(&specs, aliases)?;
    let mut all = Vec::new();
    for (key, value) in [(Key::Vcpus, file.vcpus), (Key::MemoryMb, file.ram)] {
        if let Some(value) = value {
            let place = key.to_string();
            all.push(Expr::Is(Clause { key, op: Op::Within(value, value), place }));
        }
    }
    all.push(expr);
    Ok(NovaFlavor { name: file.name, expr: Expr::All(all), notes })
}

/// `key='value', key='value'`.
fn pairs(text: &str) -> Result<BTreeMap<String, String>, RequestError> {
    let mut pairs = BTreeMap::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let bad = || {
            RequestError::syntax(
                "properties",
                format!("{rest:?} is not key='value'"),
                "key='value', key='value'",
            )
        };
        let (key, after) = rest.split_once('=').ok_or_else(bad)?;
        let (value, after) = match after.strip_prefix('\'') {
            Some(quoted) => quoted.split_once('\'').ok_or_else(bad)?,
            None => after.split_once(',').unwrap_or((after, "")),
        };
        pairs.insert(key.trim().to_owned(), value.trim().to_owned());
        rest = after.trim_start().trim_start_matches(',').trim_start();
    }
    Ok(pairs)
}

/// Conditions of extra specs, and one note for each key that has no influence on placement.
///
/// # Errors
/// Unknown keys and operators.
pub fn extra_specs(
    specs: &BTreeMap<String, String>,
    aliases: &Aliases,
) -> Result<(Expr, Vec<String>), RequestError> {
    let (mut all, mut notes) = (Vec::new(), Vec::new());
    for (full, value) in specs {
        let name = full.strip_prefix("capabilities:").unwrap_or(full);
        let place = format!("key {full}");
        if name == "resources:VGPU" {
            let found = "a share of a GPU (a vendor's vGPU or a MIG slice), which no lease can be for: such shares cannot be unplugged \
                         from a running guest";
            return Err(RequestError::syntax(place, found, "pci_passthrough:alias for whole GPUs"));
        }
        if name == "pci_passthrough:alias" {
            all.extend(passthrough(value, aliases, &place)?);
        } else if let Some(key) = known(name) {
            all.push(Expr::Is(spec(key, value, place)?));
        } else if ELSEWHERE.iter().any(|prefix| name.starts_with(prefix)) {
            notes.push(format!("{full}={value} has no influence on placement and is left to the hypervisor"));
        } else {
            let expected = format!(
                "{}, pci_passthrough:alias, hw:mem_page_size, hw:pci_numa_affinity_policy",
                Key::known()
            );
            return Err(RequestError::syntax(place, format!("unknown key {name:?}"), expected));
        }
    }
    Ok((Expr::All(all), notes))
}

fn known(name: &str) -> Option<Key> {
    match name {
        "hw:pci_numa_affinity_policy" => Some(Key::NumaPolicy),
        "hw:mem_page_size" => Some(Key::PageSize),
        "hypervisor_type" => Some(Key::Hypervisor),
        _ => Key::find(name),
    }
}

/// `a:2,b:1`.
fn passthrough(value: &str, aliases: &Aliases, place: &str) -> Result<Vec<Expr>, RequestError> {
    let mut counts: BTreeMap<Key, u64> = BTreeMap::new();
    for part in value.split(',').map(str::trim) {
        let (alias, count) = part.split_once(':').unwrap_or((part, "1"));
        let known: Vec<&str> = aliases.keys().map(String::as_str).collect();
        let unknown = || {
            RequestError::syntax(
                place,
                format!("unknown alias {alias:?}"),
                format!("one of {}", known.join(", ")),
            )
        };
        let key = aliases.get(alias).ok_or_else(unknown)?;
        let count: u64 = count.trim().parse().ok().filter(|count| *count > 0).ok_or_else(|| {
            RequestError::syntax(place, format!("{part:?}"), "ALIAS:COUNT, COUNT at least 1")
        })?;
        *counts.entry(key.clone()).or_default() += count;
    }
    let clause =
        |(key, count)| Expr::Is(Clause { key, op: Op::Within(count, count), place: place.to_owned() });
    Ok(counts.into_iter().map(clause).collect())
}

fn spec(key: Key, value: &str, place: String) -> Result<Clause, RequestError> {
    let value = value.trim();
    let (first, rest) = value.split_once(char::is_whitespace).unwrap_or((value, ""));
    let rest = rest.trim();
    let words = |operator: &str| -> Vec<String> {
        let parts = value.split(operator).map(str::trim).filter(|part| !part.is_empty());
        parts.map(str::to_owned).collect()
    };
    let op = match first {
        // Nova's "=" on numbers means "at least".
        "=" if key.is_number() => return clause(key, ">=", rest, place),
        "==" | ">=" | "<=" | "!=" if key.is_number() => return clause(key, first, rest, place),
        "s==" | "=" | "==" => Op::OneOf(vec![rest.to_owned()]),
        "s!=" | "!=" => Op::NoneOf(vec![rest.to_owned()]),
        "<or>" => Op::OneOf(words("<or>")),
        "<all-in>" => {
            Op::AllOf(rest.replace("<all-in>", " ").split_whitespace().map(str::to_owned).collect())
        }
        "<in>" => Op::Contains(rest.to_owned()),
        "s>=" | "s>" | "s<=" | "s<" | ">" | "<" => {
            let expected = "=, ==, !=, >=, <=, s==, s!=, <in>, <all-in> or <or>";
            return Err(RequestError::syntax(place, format!("operator {first} for {key}"), expected));
        }
        word if word.starts_with('<') => {
            return Err(RequestError::syntax(
                place,
                format!("unknown operator {word}"),
                "<in>, <all-in> or <or>",
            ));
        }
        _ => return clause(key, "=", value, place),
    };
    if lacks_value(&op) {
        return Err(RequestError::syntax(
            place,
            format!("{first} without a value"),
            "a value after the operator",
        ));
    }
    // These operators do not give a range.
    if key.is_number() {
        return Err(RequestError::syntax(
            place,
            format!("operator {first} for the number {key}"),
            "=, ==, >= or <=",
        ));
    }
    Ok(Clause { key, op, place })
}

fn lacks_value(op: &Op) -> bool {
    match op {
        Op::OneOf(words) | Op::AllOf(words) | Op::NoneOf(words) => {
            words.is_empty() || words.iter().any(String::is_empty)
        }
        Op::Contains(word) => word.is_empty(),
        Op::Within(..) => false,
    }
}
