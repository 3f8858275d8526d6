//! Extra specs of OpenStack flavors, with the operators of Nova's scheduler filters.
//!
//! What has no influence on where a VM may run (its virtual hardware) is left to whoever starts it, with a note. What a lease cannot keep
//! (guests of several NUMA nodes, limits on rates, …) is refused by name. Nothing is dropped silently.
//!
//! After `nova/scheduler/filters/extra_specs_ops.py`: `=` means "at least", `==` `!=` `>=` `<=` compare numbers, `s==` `s!=` text,
//! `<in>` asks for a part of a text or a member of a set, `<all-in>` for several, `<or>` for one of several. Without an operator the
//! value must be equal.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::catalog::KeyMeaning;
use super::clause::clause;
use super::{Catalog, Clause, Expr, Key, Op, RequestError};

/// Keys of the virtual hardware of a VM: each gives a note.
const ELSEWHERE: [&str; 14] = [
    "hw:boot_menu",
    "hw:cpu_cores",
    "hw:cpu_max_",
    "hw:cpu_sockets",
    "hw:cpu_threads",
    "hw:hide_hypervisor_id",
    "hw:input_bus",
    "hw:maxphysaddr_",
    "hw:vif_multiqueue_enabled",
    "hw:virtio_packed_ring",
    "hw:watchdog_action",
    "hw_rng:",
    "hw_video:",
    "os:",
];

/// Keys (beginnings, if they end so) that no lease can keep: what they are for, and what there is instead.
const REFUSED: [(&str, &str, &str); 20] = [
    (
        "resources:",
        "a resource class that leases do not have",
        "resources:VCPU, PCPU, MEMORY_MB or VGPU, pci_passthrough:alias",
    ),
    (
        "resources",
        "a group of resources of its own",
        "resources:VCPU, PCPU, MEMORY_MB or VGPU, pci_passthrough:alias",
    ),
    ("trait_", "a group of traits of its own", "trait:NAME"),
    ("trait1", "a group of traits of its own", "trait:NAME"),
    ("group_policy", "a policy for groups of resources", "vf_policy"),
    ("hw:numa_cpus.", "a guest of several NUMA nodes", "hw:numa_nodes=1"),
    ("hw:numa_mem.", "a guest of several NUMA nodes", "hw:numa_nodes=1"),
    ("hw:cpu_dedicated_mask", "a guest of which only some vCPUs are dedicated", "hw:cpu_policy=dedicated"),
    ("hw:cpu_realtime", "real-time vCPUs", "hw:cpu_policy=dedicated"),
    ("hw:emulator_threads_policy", "cores for the threads of the emulator", "vcpus with a core more"),
    ("hw:locked_memory", "memory that is locked", "hw:mem_page_size=large: huge pages are never swapped"),
    ("hw:mem_encryption", "encrypted memory", "trait:NAME, and a command line with the encryption"),
    ("hw:pmem", "persistent memory", "no such key"),
    ("hw:serial_port_count", "serial ports by the compute service", "-serial in the command line"),
    ("hw:tpm_", "an emulated TPM", "-tpmdev in the command line"),
    ("quota:", "a limit on a rate, which nothing enforces", "no such key"),
    ("accel:", "a device profile of Cyborg", "pci_passthrough:alias"),
    ("vmware:", "an option of another hypervisor", "no such key"),
    ("powervm:", "an option of another hypervisor", "no such key"),
    ("hw:", "a property that is not known here", "no such key"),
];

/// A flavor as read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NovaFlavor {
    /// Its name, if it has one.
    pub name: Option<String>,
    /// Its conditions.
    pub expr: Expr,
    /// One note for each key that is left to whoever starts the VMs.
    pub notes: Vec<String>,
}

/// Reads the output of `openstack flavor show -f json`: `vcpus`, `ram` and `properties` (an object, or text like
/// `hw:cpu_policy='dedicated', gpus='2'`).
///
/// # Errors
/// JSON that is not a flavor, with its line; unknown keys and operators, and what a lease cannot keep, with their key.
pub fn read(json: &str, catalog: &Catalog) -> Result<NovaFlavor, RequestError> {
    #[derive(Deserialize)]
    struct FlavorFile {
        name: Option<String>,
        vcpus: Option<u64>,
        ram: Option<u64>,
        #[serde(default)]
        disk: u64,
        #[serde(default, rename = "OS-FLV-EXT-DATA:ephemeral")]
        ephemeral: u64,
        /// A number, or an empty text.
        #[serde(default)]
        swap: serde_json::Value,
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
    let (expr, mut notes) = extra_specs(&specs, catalog)?;
    let swap = file.swap.as_u64().unwrap_or(0);
    for (what, amount) in [("disk", file.disk), ("ephemeral", file.ephemeral), ("swap", swap)] {
        if amount > 0 {
            notes.push(format!(
                "{what}={amount}: a lease has no disks; give them in the command line of the VM"
            ));
        }
    }
    let mut all = Vec::new();
    for (key, value, replaced) in
        [(Key::Vcpus, file.vcpus, &VCPU_CLASSES[..]), (Key::MemoryMb, file.ram, &MEMORY_CLASSES[..])]
    {
        // Nova, too, takes the amount of the resource class instead of that of the flavor.
        let replaced = replaced.iter().any(|class| specs.contains_key(*class));
        if let Some(value) = value.filter(|_| !replaced) {
            let place = key.to_string();
            all.push(Expr::Is(Clause { key, op: Op::Within(value, value), place }));
        }
    }
    all.push(expr);
    Ok(NovaFlavor { name: file.name, expr: Expr::All(all), notes })
}

/// Resource classes of processors: a lease's cores are never shared.
const VCPU_CLASSES: [&str; 2] = ["resources:VCPU", "resources:PCPU"];
/// Resource classes of memory.
const MEMORY_CLASSES: [&str; 1] = ["resources:MEMORY_MB"];

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

/// Conditions of extra specs, and one note for each key that is left to whoever starts the VMs.
///
/// # Errors
/// Unknown keys and operators, and what a lease cannot keep.
pub fn extra_specs(
    specs: &BTreeMap<String, String>,
    catalog: &Catalog,
) -> Result<(Expr, Vec<String>), RequestError> {
    let (mut all, mut notes) = (Vec::new(), Vec::new());
    for (full, value) in specs {
        let name = full.strip_prefix("capabilities:").unwrap_or(full);
        let place = format!("key {full}");
        match meaning(name, value, catalog, &place)? {
            Meaning::Conditions(conditions) => all.extend(conditions),
            Meaning::Kept => {}
            Meaning::Elsewhere => {
                notes.push(format!(
                    "{full}={value} has no influence on placement: give it in the command line of the VM"
                ));
            }
            Meaning::More(what) => notes.push(format!("{full}={value}: {what}")),
        }
    }
    Ok((Expr::All(all), notes))
}

/// What an extra spec asks for.
enum Meaning {
    Conditions(Vec<Expr>),
    /// Every lease keeps it.
    Kept,
    /// Whoever starts the VM keeps it.
    Elsewhere,
    /// Every lease gives more.
    More(&'static str),
}

fn meaning(name: &str, value: &str, catalog: &Catalog, place: &str) -> Result<Meaning, RequestError> {
    let one = |expr| Ok(Meaning::Conditions(vec![expr]));
    let number = |key| clause(key, "=", value.trim(), place.to_owned()).map(Expr::Is);
    match (name, value.trim()) {
        ("pci_passthrough:alias", _) => {
            return passthrough(value, catalog, place).map(Meaning::Conditions);
        }
        ("hw:cpu_policy", "dedicated") | ("hw:cpu_thread_policy", "prefer") | ("hw:numa_nodes", "any") => {
            return Ok(Meaning::Kept);
        }
        ("hw:cpu_policy", "shared") => return Ok(Meaning::More("the cores of a lease are its own")),
        ("hw:cpu_policy", other) => return refused(place, format!("{other:?}"), "dedicated or shared"),
        ("hw:cpu_thread_policy", other) => {
            return refused(place, format!("{other:?}: leases do not choose between siblings"), "prefer");
        }
        ("hw:numa_nodes", "1") => {
            return one(Expr::Is(clause(Key::NumaPolicy, "=", "required", place.to_owned())?));
        }
        ("hw:numa_nodes", other) => {
            return refused(place, format!("{other:?}: a guest of several NUMA nodes"), "1");
        }
        ("resources:VGPU", _) => return one(number(Key::Vgpus)?),
        _ if VCPU_CLASSES.contains(&name) => return one(number(Key::Vcpus)?),
        _ if MEMORY_CLASSES.contains(&name) => return one(number(Key::MemoryMb)?),
        _ => {}
    }
    if let Some(key) = name.strip_prefix("aggregate_instance_extra_specs:").filter(|key| !key.is_empty()) {
        // What host aggregates say of their hosts is said by labels here.
        return one(Expr::Is(spec(Key::Label(key.to_owned()), value, place.to_owned())?));
    }
    if let Some(key) = known(name) {
        return one(Expr::Is(spec(key, value, place.to_owned())?));
    }
    match catalog.own_key(name) {
        Some(KeyMeaning::Key(key)) => return one(Expr::Is(spec(key.clone(), value, place.to_owned())?)),
        Some(_) => return one(catalog.condition(name, "=", value.trim(), place.to_owned())?),
        None => {}
    }
    if ELSEWHERE.iter().any(|prefix| name.starts_with(prefix)) {
        return Ok(Meaning::Elsewhere);
    }
    if let Some((_, what, expected)) = REFUSED.iter().find(|(prefix, ..)| name.starts_with(prefix)) {
        return refused(place, format!("{name:?} asks for {what}"), expected);
    }
    let expected = format!(
        "{}, pci_passthrough:alias, hw:mem_page_size, hw:numa_nodes, hw:pci_numa_affinity_policy{}",
        catalog.known_keys(),
        catalog.nearest_key(name)
    );
    refused(place, format!("unknown key {name:?}"), &expected)
}

fn refused<T>(place: &str, found: String, expected: &str) -> Result<T, RequestError> {
    Err(RequestError::syntax(place, found, expected))
}

fn known(name: &str) -> Option<Key> {
    match name {
        "hw:pci_numa_affinity_policy" => Some(Key::NumaPolicy),
        "hw:mem_page_size" => Some(Key::PageSize),
        "hypervisor_type" => Some(Key::Hypervisor),
        // Nova's is for groups of resources.
        "group_policy" => None,
        _ => Key::find(name).filter(|key| *key != Key::Flavor),
    }
}

/// `a:2,b:1`.
fn passthrough(value: &str, catalog: &Catalog, place: &str) -> Result<Vec<Expr>, RequestError> {
    let mut counts: BTreeMap<Key, u64> = BTreeMap::new();
    let mut all = Vec::new();
    for part in value.split(',').map(str::trim) {
        let (name, count) = part.split_once(':').unwrap_or((part, "1"));
        let alias = catalog.alias(name, place)?;
        let wrong = || RequestError::syntax(place, format!("{part:?}"), "ALIAS:COUNT, COUNT from 1 to 1000");
        let count = count.trim().parse::<u64>().ok().filter(|count| (1..=1000).contains(count));
        *counts.entry(alias.counts.clone()).or_default() += count.ok_or_else(wrong)?;
        all.extend(alias.with.clone().map(|with| with.at(&format!("{place}, alias {name}"))));
    }
    let clause =
        |(key, count)| Expr::Is(Clause { key, op: Op::Within(count, count), place: place.to_owned() });
    all.extend(counts.into_iter().map(clause));
    Ok(all)
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
