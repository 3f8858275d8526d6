//! How the parts of a VM are arranged, and descriptions of devices and nodes: each left out by itself.

use std::collections::BTreeSet;

use super::{Change, Trials};
use crate::model::DeviceKind;
use crate::place::request::{Affinity, Alternative, DeviceFilter, NodeCondition, NumaPolicy, Pages};

/// Leaves something out, if the alternative has it.
type LeaveOut = fn(&mut Alternative);

const ARRANGEMENTS: [(&str, LeaveOut); 4] = [
    ("numa_policy", |own| own.numa = NumaPolicy::Preferred),
    ("gpu_hca_affinity", |own| own.affinity = Affinity::Preferred),
    ("vf_policy=isolate", |own| own.isolate_vfs = false),
    ("page_size", |own| own.pages = Pages::Normal),
];

const DESCRIPTIONS: [(&str, LeaveOut); 11] = [
    ("xpu_arch", |own| devices(own, DeviceKind::Gpu, |filter| filter.archs.clear())),
    ("xpu_arch!=", |own| devices(own, DeviceKind::Gpu, |filter| filter.not_archs.clear())),
    ("xpu_vendor", |own| devices(own, DeviceKind::Gpu, |filter| filter.vendors.clear())),
    ("vgpu_type", |own| devices(own, DeviceKind::Vgpu, |filter| filter.models.clear())),
    ("mig_profile", |own| devices(own, DeviceKind::MigSlice, |filter| filter.models.clear())),
    ("remote_gpu_model", |own| devices(own, DeviceKind::RemoteGpu, |filter| filter.models.clear())),
    ("net_arch", |own| all_devices(own, |filter| filter.link_layer = None)),
    ("net_mbps", |own| all_devices(own, |filter| filter.min_rate_gbps = 0)),
    ("live_migratable", |own| all_devices(own, |filter| filter.live_migratable = false)),
    ("traits of devices", |own| all_devices(own, |filter| filter.traits.clear())),
    ("PCI ids of devices", |own| all_devices(own, |filter| filter.ids.clear())),
];

fn devices(own: &mut Alternative, kind: DeviceKind, change: fn(&mut DeviceFilter)) {
    own.devices.iter_mut().filter(|need| need.filter.kind == kind).for_each(|need| change(&mut need.filter));
}

fn all_devices(own: &mut Alternative, change: fn(&mut DeviceFilter)) {
    own.devices.iter_mut().for_each(|need| change(&mut need.filter));
}

impl Trials<'_> {
    pub(super) fn preferences(&mut self) {
        for (condition, leave_out) in ARRANGEMENTS {
            self.each_group(condition, true, &leave_out);
        }
    }

    pub(super) fn descriptions(&mut self) {
        for (condition, leave_out) in DESCRIPTIONS {
            self.each_group(condition, false, &leave_out);
        }
        let groups = &self.request.groups;
        let all = groups.iter().flat_map(|group| &group.alternatives).flat_map(|own| &own.conditions);
        let mut conditions: Vec<&NodeCondition> = Vec::new();
        for condition in all {
            if !conditions.contains(&condition) {
                conditions.push(condition);
            }
        }
        for condition in conditions {
            self.each_group(&text(condition), false, &|own: &mut Alternative| {
                own.conditions.retain(|known| known != condition);
            });
        }
    }

    /// Each group in which this changes anything.
    fn each_group(&mut self, condition: &str, arrangement: bool, leave_out: &dyn Fn(&mut Alternative)) {
        for at in 0..self.request.groups.len() {
            let group = &self.request.groups[at];
            let mut changed = group.alternatives.clone();
            changed.iter_mut().for_each(leave_out);
            if changed == group.alternatives {
                continue;
            }
            if let Some(placement) = self.place(|request| request.groups[at].alternatives = changed) {
                let condition = condition.to_owned();
                let change = Change::Without { group: group.name.clone(), condition, arrangement };
                self.add(change, &placement);
            }
        }
    }
}

/// As in requests.
fn text(condition: &NodeCondition) -> String {
    let any = |key: &str, op: &str, words: &BTreeSet<String>| {
        format!("{key}{op}{}", words.iter().map(String::as_str).collect::<Vec<_>>().join(","))
    };
    let range = |key: &str, from: u64, to: u64| match (from, to) {
        (_, u64::MAX) => format!("{key}>={from}"),
        (0, _) => format!("{key}<={to}"),
        _ => format!("{key}={from}..{to}"),
    };
    match condition {
        NodeCondition::CpuArch(archs) => any("cpu_arch", "=", archs),
        NodeCondition::CpuArchNot(archs) => any("cpu_arch", "!=", archs),
        NodeCondition::CpuModel(model) => format!("cpu_model={model}"),
        NodeCondition::CpuFeatures(features) => any("cpu_features", "=", features),
        NodeCondition::Hypervisor(names) => any("hypervisor_type", "=", names),
        NodeCondition::HypervisorNot(names) => any("hypervisor_type", "!=", names),
        NodeCondition::Trait(name) => format!("trait:{name}=required"),
        NodeCondition::TraitNot(name) => format!("trait:{name}=forbidden"),
        NodeCondition::Label(key, values) => any(&format!("label:{key}"), "=", values),
        NodeCondition::NodeMemory(from, to) => range("node_memory_mb", *from, *to),
        NodeCondition::NodeCores(from, to) => range("node_vcpus", *from, *to),
    }
}
