//! Whether a node or a device will do, and if not, why.

use super::request::{Alternative, DeviceFilter, NodeCondition};
use crate::model::{Device, Fleet, Node, NodeIndex, NodeState, Occupancy};

/// The first condition of an alternative that a node, even empty, does not meet.
pub(super) fn refusal(node: &Node, alternative: &Alternative) -> Option<String> {
    match node.state {
        NodeState::Up => {}
        NodeState::Drained => return Some("node is drained".to_owned()),
        NodeState::Down => return Some("node is down".to_owned()),
    }
    alternative.conditions.iter().find_map(|condition| unmet(node, condition))
}

/// Letters and digits only, in lower case: `SSE4.2` and `sse4_2` are one feature.
pub(crate) fn plain(text: &str) -> String {
    text.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

/// What people call a feature where the kernel has another word.
fn kernel_word(feature: &str) -> &str {
    match feature {
        "clmul" => "pclmulqdq",
        "sse3" => "pni",
        "vtx" => "vmx",
        "amdv" => "svm",
        other => other,
    }
}

fn among<'a>(set: impl IntoIterator<Item = &'a String>, value: &str) -> bool {
    set.into_iter().any(|item| item.eq_ignore_ascii_case(value))
}

fn list<'a>(set: impl IntoIterator<Item = &'a String>) -> String {
    set.into_iter().map(String::as_str).collect::<Vec<_>>().join("|")
}

fn has_trait(node: &Node, wanted: &str) -> bool {
    let same = |own: &std::sync::Arc<str>| own.eq_ignore_ascii_case(wanted);
    node.traits.iter().any(same) || node.devices.iter().any(|device| device.traits.iter().any(same))
}

fn unmet(node: &Node, condition: &NodeCondition) -> Option<String> {
    let (holds, message) = match condition {
        NodeCondition::CpuArch(archs) => {
            (among(archs, &node.cpu.arch), format!("cpu_arch: {} wanted, is {}", list(archs), node.cpu.arch))
        }
        NodeCondition::CpuArchNot(archs) => {
            (!among(archs, &node.cpu.arch), format!("cpu_arch: not {} wanted", list(archs)))
        }
        NodeCondition::CpuModel(part) => (
            node.cpu.model.to_ascii_lowercase().contains(&part.to_ascii_lowercase()),
            format!("cpu_model: {part} wanted, is {}", node.cpu.model),
        ),
        NodeCondition::CpuFeatures(wanted) => return missing_features(node, wanted),
        NodeCondition::Hypervisor(any) => (
            node.hypervisors.iter().any(|own| among(any, own)),
            format!("hypervisor: {} wanted, has {}", list(any), join(&node.hypervisors)),
        ),
        NodeCondition::HypervisorNot(none) => (
            !node.hypervisors.iter().any(|own| among(none, own)),
            format!("hypervisor: not {} wanted", list(none)),
        ),
        NodeCondition::Trait(wanted) => (has_trait(node, wanted), format!("trait {wanted} is missing")),
        NodeCondition::TraitNot(unwanted) => {
            (!has_trait(node, unwanted), format!("trait {unwanted} is forbidden"))
        }
        NodeCondition::Label(key, values) => return unmet_label(node, key, values),
        NodeCondition::NodeMemory(from, to) => (
            (*from..=*to).contains(&node.memory().0),
            format!("memory of the node: {from}..{to} MiB wanted, is {}", node.memory()),
        ),
        NodeCondition::NodeCores(from, to) => (
            (*from..=*to).contains(&u64::from(node.cores())),
            format!("cores of the node: {from}..{to} wanted, are {}", node.cores()),
        ),
    };
    (!holds).then_some(message)
}

fn join(set: &std::collections::BTreeSet<std::sync::Arc<str>>) -> String {
    if set.is_empty() {
        "none".to_owned()
    } else {
        set.iter().map(AsRef::as_ref).collect::<Vec<_>>().join("|")
    }
}

fn unmet_label(node: &Node, key: &str, values: &std::collections::BTreeSet<String>) -> Option<String> {
    match node.labels.get(key) {
        None => Some(format!("label {key} is missing")),
        Some(own) if values.is_empty() || values.contains(own) => None,
        Some(own) => Some(format!("label {key}: {} wanted, is {own}", list(values))),
    }
}

fn missing_features(node: &Node, wanted: &std::collections::BTreeSet<String>) -> Option<String> {
    let has = |feature: &str| {
        let plain_wanted = plain(feature);
        let word = kernel_word(&plain_wanted);
        node.cpu.features.contains(word)
            || node.cpu.features.iter().any(|own| own.len() >= word.len() && plain(own) == word)
    };
    let missing: Vec<_> = wanted.iter().filter(|feature| !has(feature)).map(String::as_str).collect();
    (!missing.is_empty()).then(|| format!("cpu_features: {} missing", missing.join(",")))
}

/// Whether a device is what a filter asks for; taken or not.
pub(super) fn matches(filter: &DeviceFilter, device: &Device) -> bool {
    device.kind == filter.kind
        && (filter.archs.is_empty() || among(&filter.archs, &device.arch))
        && !among(&filter.not_archs, &device.arch)
        && (filter.vendors.is_empty() || filter.vendors.contains(&device.id.vendor))
        && (filter.ids.is_empty() || filter.ids.contains(&device.id))
        && filter.link_layer.is_none_or(|layer| device.link_layer() == Some(layer))
        && (filter.min_rate_gbps == 0 || device.rate_gbps() >= filter.min_rate_gbps)
        && (!filter.live_migratable || device.live_migratable)
        && filter.traits.iter().all(|wanted| device.traits.iter().any(|own| own.eq_ignore_ascii_case(wanted)))
}

/// Places in [`Node::devices`] of what can be given away now. Of devices in one IOMMU group the first is offered, and none if one
/// of them is taken: they cannot be in two VMs.
pub(super) fn offered(fleet: &Fleet, used: &Occupancy, index: NodeIndex) -> Vec<usize> {
    let devices = &fleet.node(index).devices;
    let mut groups: Vec<(u32, bool)> = Vec::new();
    for (at, device) in devices.iter().enumerate() {
        if let (Some(group), true) = (device.iommu_group, used.device_taken(index, at)) {
            groups.push((group, true));
        }
    }
    let mut offered = Vec::with_capacity(devices.len());
    for (at, device) in devices.iter().enumerate() {
        if used.device_taken(index, at) || !device.is_grantable() {
            continue;
        }
        if let Some(group) = device.iommu_group {
            if groups.iter().any(|(seen, _)| *seen == group) {
                continue;
            }
            groups.push((group, false));
        }
        offered.push(at);
    }
    offered
}
