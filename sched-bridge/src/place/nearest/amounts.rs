//! Fewer VMs, fewer devices, fewer cores, less memory.

use super::{Change, Trials};
use crate::model::{DeviceKind, MemoryMib};
use crate::place::request::VmGroup;

/// Memory is searched to within such a share of what was asked for.
const MEMORY_STEPS: u64 = 64;

impl Trials<'_> {
    pub(super) fn amounts(&mut self) {
        for at in 0..self.request.groups.len() {
            let group = &self.request.groups[at];
            self.devices(at, group);
            self.vms(at, group);
            self.cores(at, group);
            self.memory(at, group);
        }
    }

    fn devices(&mut self, at: usize, group: &VmGroup) {
        for kind in [
            DeviceKind::Gpu,
            DeviceKind::Vgpu,
            DeviceKind::MigSlice,
            DeviceKind::RemoteGpu,
            DeviceKind::Hca,
            DeviceKind::Vf,
        ] {
            let counts = |group: &VmGroup| {
                let needs = group.alternatives.iter().flat_map(|own| &own.devices);
                needs.filter(|need| need.filter.kind == kind).map(|need| need.count).max()
            };
            let Some(from) = counts(group) else { continue };
            let fits = self.largest(0, u64::from(from), 1, |request, most| {
                let most = u32::try_from(most).unwrap_or(u32::MAX);
                for alternative in &mut request.groups[at].alternatives {
                    for need in &mut alternative.devices {
                        if need.filter.kind == kind {
                            need.count = need.count.min(most);
                        }
                    }
                    alternative.devices.retain(|need| need.count > 0);
                }
            });
            if let Some((to, placement)) = fits {
                let change = Change::Devices { group: group.name.clone(), kind, from: from.into(), to };
                self.add(change, &placement);
            }
        }
    }

    fn vms(&mut self, at: usize, group: &VmGroup) {
        let least = u64::from(self.request.groups.len() == 1);
        let fits = self.largest(least, group.count.into(), 1, |request, count| {
            request.groups[at].count = u32::try_from(count).unwrap_or(u32::MAX);
        });
        if let Some((to, placement)) = fits {
            let change = Change::Vms { group: group.name.clone(), from: group.count.into(), to };
            self.add(change, &placement);
        }
    }

    fn cores(&mut self, at: usize, group: &VmGroup) {
        let from = group.alternatives.iter().map(|own| own.vcpus).max().unwrap_or(0);
        let fits = self.largest(1, from.into(), 1, |request, most| {
            let most = u32::try_from(most).unwrap_or(u32::MAX);
            request.groups[at].alternatives.iter_mut().for_each(|own| own.vcpus = own.vcpus.min(most));
        });
        if let Some((to, placement)) = fits {
            let change = Change::Cores { group: group.name.clone(), from: from.into(), to };
            self.add(change, &placement);
        }
    }

    fn memory(&mut self, at: usize, group: &VmGroup) {
        let from = group.alternatives.iter().map(|own| own.memory.0).max().unwrap_or(0);
        let step = (from / MEMORY_STEPS).max(1);
        let fits = self.largest(step, from, step, |request, most| {
            let alternatives = request.groups[at].alternatives.iter_mut();
            alternatives.for_each(|own| own.memory = MemoryMib(own.memory.0.min(most)));
        });
        if let Some((to, placement)) = fits {
            self.add(Change::Memory { group: group.name.clone(), from, to }, &placement);
        }
    }
}
