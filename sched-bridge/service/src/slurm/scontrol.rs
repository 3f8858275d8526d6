//! Reads the output of `scontrol`.

use std::collections::HashMap;
use std::hash::BuildHasher;

use sched_bridge::model::{Device, DeviceKind, MemoryMib, Node, NodeName, NodeState, PciAddress, PciId};
use sched_bridge::topology::{Builder, Origin, Style, SwitchName, SwitchSpec, Topology};

use super::{FROM_SLURM_LABEL, NodeCapacity, SlurmError};

/// The value of a key in a line of `scontrol -o`, up to the next blank.
pub(super) fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let mut rest = line;
    loop {
        let at = rest.find(key)?;
        let (before, after) = (&rest[..at], &rest[at + key.len()..]);
        if (before.is_empty() || before.ends_with(' ')) && after.starts_with('=') {
            return Some(after[1..].split(' ').next().unwrap_or_default());
        }
        rest = after;
    }
}

/// Nodes from `scontrol -o show node`.
pub fn nodes(text: &str) -> Result<Vec<Node>, SlurmError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(at, line)| node(at + 1, line)).collect()
}

fn node(at: usize, line: &str) -> Result<Node, SlurmError> {
    let wrong = |found: &str, expected: &str| SlurmError::Output {
        command: "scontrol -o show node",
        line: at,
        found: found.chars().take(60).collect(),
        expected: expected.to_owned(),
    };
    let name = field(line, "NodeName").ok_or_else(|| wrong(line, "NodeName=..."))?;
    let name = NodeName::new(name).map_err(|e| wrong(name, &e.to_string()))?;
    let number = |key: &str| {
        let text = field(line, key).ok_or_else(|| wrong(line, &format!("{key}=...")))?;
        text.parse::<u64>().map_err(|_| wrong(text, &format!("a number as {key}")))
    };
    let cores = u32::try_from(number("CPUTot")?).unwrap_or(u32::MAX);
    let mut node = Node::plain(name, cores, MemoryMib(number("RealMemory")?));
    node.cpu.arch = field(line, "Arch").unwrap_or_default().into();
    node.state = state(field(line, "State").ok_or_else(|| wrong(line, "State=..."))?);
    node.labels.insert(FROM_SLURM_LABEL.to_owned(), "true".to_owned());
    for (arch, count) in
        gpus(field(line, "Gres").unwrap_or_default()).map_err(|text| wrong(&text, "gpu[:TYPE]:COUNT"))?
    {
        for _ in 0..count {
            // Slurm does not know PCI addresses: consecutive numbers stand for them.
            let at = u8::try_from(node.devices.len()).map_err(|_| wrong(line, "at most 255 GPUs"))?;
            let address = PciAddress { domain: 0xffff, bus: at, device: 0, function: 0 };
            let mut device = Device::new(address, DeviceKind::Gpu, PciId { vendor: 0, device: 0 });
            device.arch = arch.as_str().into();
            node.devices.push(device);
        }
    }
    Ok(node)
}

/// Free processors from `scontrol -o show node`.
pub fn capacity(text: &str) -> Result<Vec<NodeCapacity>, SlurmError> {
    let mut capacities = Vec::new();
    for ((at, line), node) in
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).zip(nodes(text)?)
    {
        let allocated = field(line, "CPUAlloc").and_then(|text| text.parse::<u32>().ok());
        let allocated = allocated.ok_or_else(|| SlurmError::Output {
            command: "scontrol -o show node",
            line: at + 1,
            found: line.chars().take(60).collect(),
            expected: "a number as CPUAlloc".to_owned(),
        })?;
        let reserved = field(line, "State").is_some_and(|state| state.contains("RESERVED"));
        let (cpus, accepts_jobs) = (node.cores(), node.state == NodeState::Up && !reserved);
        let free_cpus = cpus.saturating_sub(allocated);
        capacities.push(NodeCapacity { node: node.name, cpus, free_cpus, accepts_jobs });
    }
    Ok(capacities)
}

/// Type and number of the GPUs in a GRES list: `gpu:8`, `gpu:h100:8(S:0-1),nic:2`, `(null)`.
pub fn gpus(gres: &str) -> Result<Vec<(String, u32)>, String> {
    let mut found = Vec::new();
    for part in gres.split(',').map(|part| part.split('(').next().unwrap_or_default()) {
        let words: Vec<&str> = part.split(':').collect();
        let (arch, count) = match words.as_slice() {
            ["gpu"] => ("", "1"),
            ["gpu", count] => ("", *count),
            ["gpu", arch, count] => (*arch, *count),
            _ => continue,
        };
        let count = count.parse().map_err(|_| part.to_owned())?;
        found.push((arch.to_lowercase(), count));
    }
    Ok(found)
}

/// The state of a node: a base state, then flags (`IDLE`, `MIXED+DRAIN`, `DOWN*`).
pub fn state(text: &str) -> NodeState {
    let text = text.to_uppercase();
    let mut words =
        text.split('+').map(|word| word.trim_end_matches(['*', '~', '#', '!', '%', '$', '@', '^', '-']));
    let base = words.next().unwrap_or_default().to_owned();
    let flags: Vec<&str> = words.collect();
    let drain = |word: &str| matches!(word, "DRAIN" | "DRAINED" | "DRAINING" | "MAINT" | "FAIL");
    if matches!(base.as_str(), "DOWN" | "UNKNOWN" | "FUTURE" | "ERROR") {
        NodeState::Down
    } else if drain(&base) || flags.into_iter().any(drain) {
        NodeState::Drained
    } else {
        NodeState::Up
    }
}

/// The hostlists of a line of `scontrol -o show topology`.
pub fn hostlists(line: &str) -> impl Iterator<Item = &str> {
    // A switch above others lists all nodes below it; only those of leaves matter.
    let nodes = if field(line, "Switches").is_some() { None } else { field(line, "Nodes") };
    [nodes, field(line, "Switches")].into_iter().flatten()
}

/// Switches from `scontrol -o show topology`. `names` has the names of each hostlist.
pub fn topology<S: BuildHasher>(
    text: &str,
    names: &HashMap<String, Vec<String>, S>,
) -> Result<Topology, SlurmError> {
    let mut builder = Builder::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |found: &str, expected: String| SlurmError::Output {
            command: "scontrol -o show topology",
            line: at + 1,
            found: found.chars().take(60).collect(),
            expected,
        };
        let name = field(line, "SwitchName").ok_or_else(|| wrong(line, "SwitchName=...".to_owned()))?;
        let switch = |text: &str| SwitchName::new(text).map_err(|e| wrong(text, e.to_string()));
        let mut spec = SwitchSpec::new(switch(name)?);
        let expand = |list: Option<&str>| list.and_then(|list| names.get(list)).into_iter().flatten();
        if field(line, "Switches").is_some() {
            for child in expand(field(line, "Switches")) {
                spec.switches.push(switch(child)?);
            }
        } else {
            for node in expand(field(line, "Nodes")) {
                spec.nodes.push(NodeName::new(node).map_err(|e| wrong(node, e.to_string()))?);
            }
        }
        builder.add(spec, Origin::line(at + 1));
    }
    builder.build(Style::Tree).map_err(|error| SlurmError::Output {
        command: "scontrol -o show topology",
        line: error.line(),
        found: String::new(),
        expected: format!("a tree of switches: {error}"),
    })
}
