//! Remote GPUs: they are of no node, so they are counted apart from where the VMs go.

use super::PlaceError;
use super::fit;
use super::placement::Placement;
use super::reasons::needed_devices;
use super::request::{ClusterRequest, DeviceNeed, VmGroup};
use crate::model::{Device, DeviceKind, Fleet, Granted, Occupancy};

/// A request without its remote GPUs, and these.
pub(super) struct Apart {
    pub request: ClusterRequest,
    /// Those of one VM, by group.
    needs: Vec<Vec<DeviceNeed>>,
}

fn is_remote(need: &DeviceNeed) -> bool {
    need.filter.kind == DeviceKind::RemoteGpu
}

/// Takes the remote GPUs out of a request. None if it has none.
///
/// # Errors
/// Alternatives of a group that differ in their remote GPUs.
pub(super) fn apart(request: &ClusterRequest) -> Result<Option<Apart>, PlaceError> {
    if !request
        .groups
        .iter()
        .flat_map(|group| &group.alternatives)
        .flat_map(|one| &one.devices)
        .any(is_remote)
    {
        return Ok(None);
    }
    let mut request = request.clone();
    let mut needs = Vec::new();
    for group in &mut request.groups {
        let mut of_group: Option<Vec<DeviceNeed>> = None;
        for alternative in &mut group.alternatives {
            let (own, others) = alternative.devices.drain(..).partition(is_remote);
            alternative.devices = others;
            if of_group.get_or_insert_with(|| own.clone()) != &own {
                let reason = format!(
                    "the alternatives of group {} ask for different remote GPUs; expected the same ones in each",
                    group.name
                );
                return Err(PlaceError::Contradiction { reason });
            }
        }
        needs.push(of_group.unwrap_or_default());
    }
    Ok(Some(Apart { request, needs }))
}

impl Apart {
    /// Remote GPUs for each VM, in the order of [`ClusterRequest::vm_names`].
    ///
    /// # Errors
    /// There are too few.
    pub fn give(&self, fleet: &Fleet, used: &Occupancy) -> Result<Vec<Vec<Granted>>, PlaceError> {
        let free: Vec<&Device> = fleet.remote_gpus().filter(|gpu| !used.remote_taken(gpu.address)).collect();
        let mut given = Given { suits: Vec::new(), holder: vec![None; free.len()] };
        let mut owners = Vec::new();
        let (mut vm, mut lacks) = (0, None);
        'all: for (group, needs) in self.request.groups.iter().zip(&self.needs) {
            for _ in 0..group.count {
                for need in needs {
                    for _ in 0..need.count {
                        let suits = (0..free.len()).filter(|at| fit::matches(&need.filter, free[*at]));
                        given.suits.push(suits.collect());
                        owners.push(vm);
                        let mut seen = vec![false; free.len()];
                        if !given.place(owners.len() - 1, &mut seen) {
                            lacks = Some(need);
                            break 'all;
                        }
                    }
                }
                vm += 1;
            }
        }
        if let Some(need) = lacks {
            return Err(self.no_room(fleet, &free, vm, need));
        }
        let mut all = vec![Vec::new(); vm];
        for (at, holder) in given.holder.iter().enumerate() {
            if let Some(slot) = holder {
                let gpu = free[at];
                all[owners[*slot]].push(Granted { address: gpu.address, kind: gpu.kind });
            }
        }
        Ok(all)
    }

    fn no_room(&self, fleet: &Fleet, free: &[&Device], fit: usize, need: &DeviceNeed) -> PlaceError {
        let group = |group: &VmGroup| group.count;
        let vms = self.request.groups.iter().map(group).fold(0, u32::saturating_add);
        let suits = |gpu: &&Device| fit::matches(&need.filter, gpu);
        let all = fleet.remote_gpus().filter(suits).count();
        let reason = format!(
            "each VM needs {}, and of {all} in the fleet {} are free",
            needed_devices(need),
            free.iter().copied().filter(|gpu| suits(gpu)).count()
        );
        PlaceError::NoRoom { vms, fit: u32::try_from(fit).unwrap_or(u32::MAX), reason }
    }
}

/// Who has which of the free ones, so far. Where the last one that suits is another's, who can take another one does.
struct Given {
    /// The indices that suit, by what is asked for.
    suits: Vec<Vec<usize>>,
    /// What is asked for, by index of the free ones.
    holder: Vec<Option<usize>>,
}

impl Given {
    fn place(&mut self, slot: usize, seen: &mut [bool]) -> bool {
        for at in self.suits[slot].clone() {
            if std::mem::replace(&mut seen[at], true) {
                continue;
            }
            if self.holder[at].is_none_or(|other| self.place(other, seen)) {
                self.holder[at] = Some(slot);
                return true;
            }
        }
        false
    }
}

/// Adds what [`Apart::give`] has found.
pub(super) fn add(placement: &mut Placement, given: Vec<Vec<Granted>>) {
    for (assignment, more) in placement.assignments.iter_mut().zip(given) {
        assignment.devices.extend(more);
        assignment.devices.sort_unstable();
    }
}
