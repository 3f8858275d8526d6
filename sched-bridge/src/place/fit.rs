//! Whether a node or a device meets the conditions of a request, and if not, why.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::request::{Alternative, DeviceFilter, NodeCondition};
use crate::model::{Device, DeviceKind, Fleet, Node, NodeIndex, NodeState, Occupancy, overlaps_taken};

/// The first condition of an alternative that a node does not meet, even if all of it is free.
pub(super) fn refusal(node: &Node, alternative: &Alternative) -> Option<String> {
    match node.state {
        NodeState::Up => {}
        NodeState::Drained => return Some("is drained".to_owned()),
        NodeState::Down => return Some("is down".to_owned()),
    }
    alternative.conditions.iter().find_map(|condition| unmet(node, condition))
}

fn unmet(node: &Node, condition: &NodeCondition) -> Option<String> {
    let (holds, message) = match condition {
        NodeCondition::CpuArch(archs) => (
            contains(archs, &node.cpu.arch),
            format!("needs CPU architecture {}, has {}", either(archs), node.cpu.arch),
        ),
        NodeCondition::CpuArchNot(archs) => (
            !contains(archs, &node.cpu.arch),
            format!("has CPU architecture {}, which the request forbids", node.cpu.arch),
        ),
        NodeCondition::CpuModel(part) => (
            node.cpu.model.to_ascii_lowercase().contains(&part.to_ascii_lowercase()),
            format!("needs CPU model {part}, has {}", node.cpu.model),
        ),
        NodeCondition::CpuFeatures(wanted) => return missing_features(node, wanted),
        NodeCondition::Hypervisor(any) => (
            node.hypervisors.iter().any(|hypervisor| contains(any, hypervisor)),
            format!("needs hypervisor {}, has {}", either(any), all(&node.hypervisors)),
        ),
        NodeCondition::HypervisorNot(none) => (
            !node.hypervisors.iter().any(|hypervisor| contains(none, hypervisor)),
            format!("has hypervisor {}, which the request forbids", all(&node.hypervisors)),
        ),
        NodeCondition::Trait(wanted) => (has_trait(node, wanted), format!("lacks trait {wanted}")),
        NodeCondition::TraitNot(unwanted) => {
            (!has_trait(node, unwanted), format!("has trait {unwanted}, which the request forbids"))
        }
        NodeCondition::Label(key, values) => return unmet_label(node, key, values),
        NodeCondition::NodeMemory(from, to) => (
            (*from..=*to).contains(&node.memory().0),
            format!("needs {} MiB of memory in all, has {}", range(*from, *to), node.memory().0),
        ),
        NodeCondition::NodeCores(from, to) => (
            (*from..=*to).contains(&u64::from(node.cores())),
            format!("needs {} cores in all, has {}", range(*from, *to), node.cores()),
        ),
    };
    (!holds).then_some(message)
}

/// Letters and digits only, in lower case: `SSE4.2` and `sse4_2` are one feature.
fn plain(text: &str) -> String {
    text.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

/// The kernel's name of a feature that has another name elsewhere.
fn kernel_name(feature: &str) -> &str {
    match feature {
        "clmul" => "pclmulqdq",
        "sse3" => "pni",
        "vtx" => "vmx",
        "amdv" => "svm",
        other => other,
    }
}

fn contains(set: &BTreeSet<String>, value: &str) -> bool {
    set.iter().any(|item| item.eq_ignore_ascii_case(value))
}

/// `a or b`.
fn either(set: &BTreeSet<String>) -> String {
    set.iter().map(String::as_str).collect::<Vec<_>>().join(" or ")
}

/// `a, b`, or `none`.
fn all(set: &BTreeSet<Arc<str>>) -> String {
    if set.is_empty() {
        return "none".to_owned();
    }
    set.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ")
}

/// `4 to 8`, `at least 4` or `at most 8`.
fn range(from: u64, to: u64) -> String {
    match (from, to) {
        (_, u64::MAX) => format!("at least {from}"),
        (0, _) => format!("at most {to}"),
        _ if from == to => from.to_string(),
        _ => format!("{from} to {to}"),
    }
}

fn has_trait(node: &Node, wanted: &str) -> bool {
    let is_wanted = |name: &Arc<str>| name.eq_ignore_ascii_case(wanted);
    node.traits.iter().any(is_wanted) || node.devices.iter().any(|device| device.traits.iter().any(is_wanted))
}

fn unmet_label(node: &Node, key: &str, values: &BTreeSet<String>) -> Option<String> {
    match node.labels.get(key) {
        None => Some(format!("lacks label {key}")),
        Some(value) if values.is_empty() || values.contains(value) => None,
        Some(value) => Some(format!("needs label {key} to be {}, has {value}", either(values))),
    }
}

fn missing_features(node: &Node, wanted: &BTreeSet<String>) -> Option<String> {
    let has = |feature: &str| {
        let wanted = plain(feature);
        let name = kernel_name(&wanted);
        let features = &node.cpu.features;
        features.contains(name)
            || features.iter().any(|known| known.len() >= name.len() && plain(known) == name)
    };
    let missing: Vec<_> = wanted.iter().filter(|feature| !has(feature)).map(String::as_str).collect();
    (!missing.is_empty()).then(|| format!("lacks CPU features {}", missing.join(", ")))
}

/// Whether a device, taken or not, is one that a filter asks for.
pub(super) fn matches(filter: &DeviceFilter, device: &Device) -> bool {
    let has_trait = |wanted: &String| device.traits.iter().any(|name| name.eq_ignore_ascii_case(wanted));
    device.kind == filter.kind
        && (filter.archs.is_empty() || contains(&filter.archs, &device.arch))
        && !contains(&filter.not_archs, &device.arch)
        && (filter.models.is_empty() || contains(&filter.models, &device.model))
        && (filter.vendors.is_empty() || filter.vendors.contains(&device.id.vendor))
        && (filter.ids.is_empty() || filter.ids.contains(&device.id))
        && filter.link_layer.is_none_or(|layer| device.link_layer() == Some(layer))
        && (filter.min_rate_gbps == 0 || device.rate_gbps() >= filter.min_rate_gbps)
        && (!filter.live_migratable || device.live_migratable)
        && filter.traits.iter().all(has_trait)
}

/// Indices in [`Node::devices`] of what can be given to VMs now. Devices of one IOMMU group cannot be in two VMs: the first of them is
/// offered, and none if one of them is taken. Remote GPUs are of no node.
pub(super) fn offered(fleet: &Fleet, used: &Occupancy, index: NodeIndex) -> Vec<usize> {
    let node = fleet.node(index);
    let devices = &node.devices;
    let is_taken = |at: usize| used.device_taken(index, at);
    let mut closed_groups: Vec<u32> = devices
        .iter()
        .enumerate()
        .filter(|(at, _)| is_taken(*at))
        .filter_map(|(_, device)| device.iommu_group)
        .collect();
    let mut offered = Vec::with_capacity(devices.len());
    for (at, device) in devices.iter().enumerate() {
        if is_taken(at) || !device.is_grantable() || device.kind == DeviceKind::RemoteGpu {
            continue;
        }
        // The whole GPU may have been leased before it was divided.
        if device.kind.is_share() && overlaps_taken(node, at, is_taken) {
            continue;
        }
        if let Some(group) = device.iommu_group {
            if closed_groups.contains(&group) {
                continue;
            }
            closed_groups.push(group);
        }
        offered.push(at);
    }
    offered
}
