//! What is to be packed onto nodes: alternatives of some groups of VMs, with their device needs as bits.

use super::PlaceError;
use super::devices::{Wants, fungible};
use super::fit;
use super::pool::Pool;
use super::request::{Alternative, DeviceFilter, NumaPolicy, VmGroup};
use crate::model::{Device, Node};

/// An alternative of one of the groups that are to be packed.
#[derive(Debug)]
pub(super) struct Alt<'a> {
    /// Index among the groups to be packed.
    pub group: usize,
    pub alternative: &'a Alternative,
    pub wants: Wants,
    pub need: Pool,
}

/// What is to be packed.
#[derive(Debug)]
pub(super) struct Wanted<'a> {
    pub alts: Vec<Alt<'a>>,
    /// Number of VMs of each group.
    pub limits: Vec<u32>,
    pub filters: Vec<&'a DeviceFilter>,
    /// The strictest policy of all alternatives.
    pub scope: NumaPolicy,
    /// Policies differ, and all are treated as the strictest.
    pub mixed: bool,
    /// No VM needs two devices: it does not matter where they are.
    pub fungible: bool,
    /// Most VMs of these groups on one node.
    pub per_node: u32,
}

impl<'a> Wanted<'a> {
    /// The needs of some groups, each with a number of VMs.
    ///
    /// # Errors
    /// More than 64 alternatives or device needs.
    pub fn new(groups: &[(&'a VmGroup, u32)], per_node: u32) -> Result<Self, PlaceError> {
        let (mut alts, mut filters): (Vec<Alt<'a>>, Vec<&DeviceFilter>) = (Vec::new(), Vec::new());
        for (group, (vms, _)) in groups.iter().enumerate() {
            for alternative in &vms.alternatives {
                let mut wants = Wants {
                    needs: Vec::new(),
                    closeness: Wants::closeness(alternative.affinity),
                    isolate_vfs: alternative.isolate_vfs,
                };
                for need in alternative.devices.iter().filter(|need| need.count > 0) {
                    let bit =
                        filters.iter().position(|filter| **filter == need.filter).unwrap_or_else(|| {
                            filters.push(&need.filter);
                            filters.len() - 1
                        });
                    wants.needs.push((u32::try_from(bit).unwrap_or(u32::MAX), need.count));
                }
                let need = Pool::need(alternative);
                alts.push(Alt { group, alternative, wants, need });
            }
        }
        if alts.len() > 64 || filters.len() > 64 {
            return Err(PlaceError::Contradiction {
                reason: format!(
                    "{} alternatives with {} kinds of devices; at most 64 of each are placed at once",
                    alts.len(),
                    filters.len()
                ),
            });
        }
        let rank = |policy: NumaPolicy| match policy {
            NumaPolicy::Required => 0,
            NumaPolicy::Socket => 1,
            NumaPolicy::Preferred => 2,
        };
        let policies = || alts.iter().map(|alt| alt.alternative.numa);
        let scope = policies().min_by_key(|policy| rank(*policy)).unwrap_or_default();
        let mixed = policies().any(|policy| policy != scope);
        let fungible = fungible(alts.iter().map(|alt| &alt.wants));
        Ok(Self {
            limits: groups.iter().map(|(_, count)| *count).collect(),
            scope,
            mixed,
            fungible,
            alts,
            filters,
            per_node,
        })
    }

    /// The alternatives whose conditions a node meets, as bits.
    pub fn usable(&self, node: &Node) -> u64 {
        let mut usable = 0;
        for (at, alt) in self.alts.iter().enumerate() {
            if fit::refusal(node, alt.alternative).is_none() {
                usable |= 1 << at;
            }
        }
        usable
    }

    /// The needs that a device meets, as bits.
    pub fn needs(&self, device: &Device) -> u64 {
        let bits = self.filters.iter().enumerate();
        bits.filter(|(_, filter)| fit::matches(filter, device)).fold(0, |mask, (bit, _)| mask | 1 << bit)
    }

    /// What all VMs together could use on one node.
    pub fn most(&self) -> Pool {
        let of = |alt: &Alt<'_>| alt.need.times(u64::from(self.limits[alt.group].min(self.per_node)));
        self.alts.iter().map(of).fold(Pool::default(), Pool::plus)
    }

    /// How many of `there` devices, which meet some needs, all VMs together could use.
    pub fn useful(&self, needs: u64, there: usize) -> u8 {
        let of = |alt: &Alt<'_>| -> u64 {
            let wanted = alt.wants.needs.iter().filter(|(bit, _)| needs >> bit & 1 == 1);
            let each: u64 = wanted.map(|(_, count)| u64::from(*count)).sum();
            each * u64::from(self.limits[alt.group].min(self.per_node))
        };
        let useful: u64 = self.alts.iter().map(of).sum();
        u8::try_from(useful.min(there as u64)).unwrap_or(u8::MAX)
    }
}
