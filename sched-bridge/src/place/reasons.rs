//! Why a node has no room for any VM of a request.

use super::fit;
use super::pool::Pool;
use super::request::{Affinity, Alternative, DeviceFilter, DeviceNeed, NumaPolicy};
use super::task::Task;
use crate::model::{LinkLayer, NodeIndex, NodeState};

/// For each group the first constraint that the node does not meet; for a group of several alternatives, that of each.
pub(super) fn reasons(task: &Task<'_>, index: NodeIndex) -> Vec<String> {
    let node = task.fleet.node(index);
    match node.state {
        NodeState::Up => {}
        NodeState::Drained => return vec!["is drained".to_owned()],
        NodeState::Down => return vec!["is down".to_owned()],
    }
    if !task.allowed[index.usize()] {
        return vec!["is excluded by the request".to_owned()];
    }
    if task.near.as_ref().is_some_and(|near| near[index.usize()].is_none()) {
        return vec!["is too many hops from the data, or not connected to it".to_owned()];
    }
    let several_groups = task.request.groups.len() > 1;
    let mut reasons = Vec::new();
    for group in &task.request.groups {
        let unmet: Vec<String> =
            group.alternatives.iter().map(|alternative| unmet(task, index, alternative)).collect();
        let unmet = unmet.join("; or: ");
        reasons.push(if several_groups { format!("for {}: {unmet}", group.name) } else { unmet });
    }
    reasons
}

/// The first constraint of an alternative that a node does not meet.
fn unmet(task: &Task<'_>, index: NodeIndex, alternative: &Alternative) -> String {
    let node = task.fleet.node(index);
    if let Some(reason) = fit::refusal(node, alternative) {
        return reason;
    }
    let offered = fit::offered(task.fleet, task.used, index);
    for need in &alternative.devices {
        let all = node.devices.iter().filter(|device| fit::matches(&need.filter, device)).count();
        let free = offered.iter().filter(|at| fit::matches(&need.filter, &node.devices[**at])).count();
        if free < need.count as usize {
            let of = if free == all { String::new() } else { format!(" free of {all}") };
            return format!("needs {}, has {free}{of}", needed_devices(need));
        }
    }
    let free = task.used.free(task.fleet, index);
    let free = free.iter().fold(Pool::default(), |sum, share| sum.plus(Pool::of(share)));
    let need = Pool::need(alternative);
    for (what, need, free) in [
        ("cores", need.cores, free.cores),
        ("MiB of memory", need.memory, free.memory),
        ("pages of 2 MiB", need.pages_2m, free.pages_2m),
        ("pages of 1 GiB", need.pages_1g, free.pages_1g),
    ] {
        if need > free {
            return format!("needs {need} {what}, has {free} free");
        }
    }
    let whole_node = "has enough as a whole, but";
    match (alternative.numa, alternative.affinity) {
        (_, Affinity::SameRoot) => {
            "has too few pairs of a free GPU and a free HCA below one PCIe root (gpu_hca_affinity=root)"
                .to_owned()
        }
        (_, Affinity::SameNuma) => {
            "has too few pairs of a free GPU and a free HCA on one NUMA node (gpu_hca_affinity=numa)"
                .to_owned()
        }
        (NumaPolicy::Required, _) => format!("{whole_node} not on one NUMA node (numa_policy=required)"),
        (NumaPolicy::Socket, _) => format!("{whole_node} not on one socket (numa_policy=socket)"),
        _ if alternative.isolate_vfs => "has too few HCAs with free VFs (vf_policy=isolate)".to_owned(),
        _ => "has enough for each need, but not for all together".to_owned(),
    }
}

/// `4 Hopper GPUs`, `1 VF (InfiniBand, at least 100 Gb/s)`.
pub(super) fn needed_devices(need: &DeviceNeed) -> String {
    let filter = &need.filter;
    let kind = filter.kind.name();
    let plural = if need.count == 1 { "" } else { "s" };
    let mut words = vec![need.count.to_string()];
    let described = [filter.vendors.iter().map(|id| vendor(*id)).collect::<Vec<_>>(), archs(filter)];
    words.extend(described.into_iter().filter(|names| !names.is_empty()).map(|names| names.join(" or ")));
    words.push(format!("{kind}{plural}"));
    let more = more_conditions(filter);
    if !more.is_empty() {
        words.push(format!("({})", more.join(", ")));
    }
    words.join(" ")
}

fn archs(filter: &DeviceFilter) -> Vec<String> {
    let capitalized = |arch: &String| {
        let mut letters = arch.chars();
        letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
    };
    filter.archs.iter().map(capitalized).collect()
}

fn vendor(id: u16) -> String {
    match id {
        0x10de => "NVIDIA".to_owned(),
        0x1002 => "AMD".to_owned(),
        0x8086 => "Intel".to_owned(),
        other => format!("{other:04x}"),
    }
}

fn more_conditions(filter: &DeviceFilter) -> Vec<String> {
    let mut words: Vec<String> = filter.not_archs.iter().map(|arch| format!("not {arch}")).collect();
    let models: Vec<&str> = filter.models.iter().map(String::as_str).collect();
    words.extend((!models.is_empty()).then(|| models.join(" or ")));
    words.extend(filter.ids.iter().map(ToString::to_string));
    words.extend(filter.link_layer.map(|layer| match layer {
        LinkLayer::InfiniBand => "InfiniBand".to_owned(),
        LinkLayer::Ethernet => "Ethernet".to_owned(),
    }));
    if filter.min_rate_gbps > 0 {
        words.push(format!("at least {} Gb/s", filter.min_rate_gbps));
    }
    words.extend(filter.traits.iter().map(|name| format!("trait {name}")));
    if filter.live_migratable {
        words.push("live-migratable".to_owned());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::DeviceKind;

    #[test]
    fn needs_read_as_people_say_them() {
        let mut filter = DeviceFilter::kind(DeviceKind::Gpu);
        let text =
            |count, filter: &DeviceFilter| needed_devices(&DeviceNeed { count, filter: filter.clone() });
        assert_eq!(text(1, &filter), "1 GPU");
        filter.archs.insert("hopper".to_owned());
        assert_eq!(text(4, &filter), "4 Hopper GPUs");
        filter.vendors.insert(0x10de);
        filter.archs.insert("ampere".to_owned());
        assert_eq!(text(2, &filter), "2 NVIDIA Ampere or Hopper GPUs");
        let filter = DeviceFilter {
            min_rate_gbps: 100,
            link_layer: Some(LinkLayer::InfiniBand),
            live_migratable: true,
            ..DeviceFilter::kind(DeviceKind::Vf)
        };
        assert_eq!(text(1, &filter), "1 VF (InfiniBand, at least 100 Gb/s, live-migratable)");
    }
}
