//! Tries every node for every VM and every set of devices: slow, and with nothing in common with the search under test.

use std::collections::{BTreeMap, HashMap};

use sched_bridge::model::*;
use sched_bridge::place::*;

/// The best score there is, none if there is no placement.
pub fn best(fleet: &Fleet, used: &Occupancy, request: &ClusterRequest) -> Option<Score> {
    let groups: Vec<usize> = request.vm_names().unwrap().into_iter().map(|(_, group)| group).collect();
    let mut brute = Brute { fleet, used, request, groups, nodes: HashMap::new(), best: None };
    brute.vm(&mut Vec::new());
    brute.best
}

struct Brute<'a> {
    fleet: &'a Fleet,
    used: &'a Occupancy,
    request: &'a ClusterRequest,
    groups: Vec<usize>,
    /// Least device distance by node and groups on it.
    nodes: HashMap<(usize, Vec<usize>), Option<u64>>,
    best: Option<Score>,
}

impl Brute<'_> {
    fn vm(&mut self, on: &mut Vec<usize>) {
        if on.len() == self.groups.len() {
            return self.complete(on);
        }
        for node in 0..self.fleet.nodes().len() {
            on.push(node);
            let here: Vec<usize> =
                (0..on.len()).filter(|vm| on[*vm] == node).map(|vm| self.groups[vm]).collect();
            if self.node(node, here).is_some() {
                self.vm(on);
            }
            on.pop();
        }
    }

    fn complete(&mut self, on: &[usize]) {
        let mut score = Score::default();
        let index = |at: usize| NodeIndex(u32::try_from(at).unwrap());
        let mut by_node: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (vm, node) in on.iter().enumerate() {
            by_node.entry(*node).or_default().push(self.groups[vm]);
            for other in &on[..vm] {
                let Some(hops) = self.fleet.hops(index(*node), index(*other)) else { return };
                score.max_hops = score.max_hops.max(hops);
                score.sum_hops += u64::from(hops);
            }
        }
        if !self.near(on, &mut score) || !self.limits(on, &mut score) {
            return;
        }
        for (node, here) in &by_node {
            score.device_distance += self.node(*node, here.clone()).unwrap();
        }
        score.fragmentation = self.fragmentation(on);
        let key = |score: &Score| match self.request.compactness.mode {
            Mode::Unconstrained => {
                // Free blocks, then distances; the greatest distance does not count.
                vec![
                    score.fragmentation,
                    score.sum_hops,
                    u64::from(score.leaf_switches),
                    score.near_hops,
                    score.device_distance,
                ]
            }
            _ => vec![
                u64::from(score.max_hops),
                score.sum_hops,
                u64::from(score.leaf_switches),
                score.near_hops,
                score.fragmentation,
                score.device_distance,
            ],
        };
        if self.best.as_ref().is_none_or(|best| key(&score) < key(best)) {
            self.best = Some(score);
        }
    }

    fn near(&self, on: &[usize], score: &mut Score) -> bool {
        let Some(near) = &self.request.near else { return true };
        let NearTo::Node(target) = &near.to else { panic!("not tried here") };
        let target = self.fleet.find(target.as_str()).unwrap();
        for node in on {
            let Some(hops) = self.fleet.hops(NodeIndex(u32::try_from(*node).unwrap()), target) else {
                return false;
            };
            if near.max_hops.is_some_and(|most| hops > most) {
                return false;
            }
            score.near_hops += u64::from(hops);
        }
        true
    }

    fn limits(&self, on: &[usize], score: &mut Score) -> bool {
        let topology = self.fleet.topology();
        let home = |node: usize| topology.leaf_of(self.fleet.nodes()[node].name.as_str());
        let mut leaves: Vec<_> = on.iter().filter_map(|node| home(*node)).collect();
        leaves.sort();
        leaves.dedup();
        score.leaf_switches = u32::try_from(leaves.len()).unwrap();
        let compactness = &self.request.compactness;
        let distinct = on.iter().collect::<std::collections::BTreeSet<_>>().len();
        let level = compactness.level.filter(|_| compactness.mode == Mode::Required);
        let within = |height: u32| {
            distinct == 1
                || topology.ids().any(|id| {
                    let below = topology.nodes_below(id);
                    topology.switch(id).height <= height
                        && on.iter().all(|node| below.contains(&&self.fleet.nodes()[*node].name))
                })
        };
        let anti = self.request.anti_affinity.is_none_or(|anti| {
            let mut domains: BTreeMap<(bool, u32), u32> = BTreeMap::new();
            for node in on {
                let mut domain = (false, u32::try_from(*node).unwrap());
                let mut at = home(*node);
                while let Some(id) = at.filter(|id| topology.switch(*id).height <= anti.domain.height()) {
                    domain = (true, id.0);
                    at = topology.switch(id).parent;
                }
                *domains.entry(domain).or_default() += 1;
            }
            domains.values().all(|vms| *vms <= anti.at_most)
        });
        anti && compactness.max_hops.is_none_or(|most| score.max_hops <= most)
            && compactness.max_leaf_switches.is_none_or(|most| score.leaf_switches <= most)
            && level.is_none_or(|level| within(level.height()))
    }

    /// The sum of squares of free blocks, of cubes at leaves, before and after.
    fn fragmentation(&self, on: &[usize]) -> u64 {
        let least = |group: usize, of: &dyn Fn(&Alternative) -> u64| -> u64 {
            self.request.groups[group].alternatives.iter().map(of).min().unwrap()
        };
        let gpus_of = |group: usize| -> u64 {
            least(group, &|alternative| {
                let gpus = alternative.devices.iter().filter(|need| need.filter.kind == DeviceKind::Gpu);
                gpus.map(|need| u64::from(need.count)).sum()
            })
        };
        let by_gpu = (0..self.request.groups.len()).any(|group| gpus_of(group) > 0);
        let mut free = Vec::new();
        for (at, node) in self.fleet.nodes().iter().enumerate() {
            let index = NodeIndex(u32::try_from(at).unwrap());
            let gpus =
                node.devices.iter().enumerate().filter(|(at, device)| {
                    device.kind == DeviceKind::Gpu && !self.used.device_taken(index, *at)
                });
            let cores: u32 = self.used.free(self.fleet, index).iter().map(|share| share.cores).sum();
            let own = if by_gpu { gpus.count() as u64 } else { u64::from(cores) };
            free.push(if node.state == NodeState::Up { own } else { 0 });
        }
        let mut after = free.clone();
        for (vm, node) in on.iter().enumerate() {
            let group = self.groups[vm];
            let takes = if by_gpu {
                gpus_of(group)
            } else {
                least(group, &|alternative| u64::from(alternative.vcpus))
            };
            after[*node] = after[*node].saturating_sub(takes);
        }
        let squares = |after: &[u64]| -> u64 {
            let topology = self.fleet.topology();
            let blocks = topology.ids().map(|id| {
                let below = topology.nodes_below(id);
                let sum: u64 =
                    below.iter().map(|name| after[self.fleet.find(name.as_str()).unwrap().usize()]).sum();
                if topology.switch(id).children.is_empty() { sum * sum * sum } else { sum * sum }
            });
            blocks.sum::<u64>() + after.iter().map(|own| own * own).sum::<u64>()
        };
        squares(&free) - squares(&after)
    }

    fn node(&mut self, node: usize, mut here: Vec<usize>) -> Option<u64> {
        here.sort_unstable();
        if let Some(known) = self.nodes.get(&(node, here.clone())) {
            return *known;
        }
        let least = self.devices(node, &here);
        self.nodes.insert((node, here), least);
        least
    }

    /// Every choice of alternative, NUMA node and devices for each VM on a node.
    fn devices(&self, at: usize, here: &[usize]) -> Option<u64> {
        let node = &self.fleet.nodes()[at];
        if node.state != NodeState::Up {
            return None;
        }
        let index = NodeIndex(u32::try_from(at).unwrap());
        let taken = |device: usize| self.used.device_taken(index, device);
        // A GPU that is divided is not given away; the shares of one that was given away before are not either.
        let is_free = |at: &usize| {
            let device = &node.devices[*at];
            let is_of =
                |share: &Device, gpu: &Device| share.parent.is_some() && share.parent == gpu.address.pci();
            let divided = node.devices.iter().any(|share| is_of(share, device));
            let gone = (0..node.devices.len()).any(|gpu| is_of(device, &node.devices[gpu]) && taken(gpu));
            !taken(*at) && !divided && !gone
        };
        let free: Vec<usize> = (0..node.devices.len()).filter(is_free).collect();
        let share = |share: &NumaShare| (u64::from(share.cores), share.memory.0);
        let pools: Vec<(u64, u64)> = self.used.free(self.fleet, index).iter().map(share).collect();
        self.one_vm(node, here, &free, &pools)
    }

    fn one_vm(&self, node: &Node, here: &[usize], free: &[usize], pools: &[(u64, u64)]) -> Option<u64> {
        let Some((group, rest)) = here.split_first() else { return Some(0) };
        let mut best: Option<u64> = None;
        for alternative in &self.request.groups[*group].alternatives {
            if alternative.conditions.iter().any(|_| !node.hypervisors.contains("kvm")) {
                continue;
            }
            for subset in 0_u32..1 << free.len() {
                let chosen: Vec<usize> =
                    (0..free.len()).filter(|bit| subset >> bit & 1 == 1).map(|bit| free[bit]).collect();
                let Some(distance) = suits(node, alternative, &chosen) else { continue };
                let left: Vec<usize> =
                    free.iter().copied().filter(|device| !chosen.contains(device)).collect();
                for pools in pools_after(node, alternative, &chosen, pools) {
                    if let Some(others) = self.one_vm(node, rest, &left, &pools) {
                        let sum = distance + others;
                        best = Some(best.map_or(sum, |best| best.min(sum)));
                    }
                }
            }
        }
        best
    }
}

/// What is left after cores and memory are taken, in every way in which that matters.
fn pools_after(
    node: &Node,
    alternative: &Alternative,
    chosen: &[usize],
    pools: &[(u64, u64)],
) -> Vec<Vec<(u64, u64)>> {
    let (cores, memory) = (u64::from(alternative.vcpus), alternative.memory.0);
    if alternative.numa == NumaPolicy::Required {
        let fits = |at: &usize| {
            pools[*at].0 >= cores
                && pools[*at].1 >= memory
                && chosen.iter().all(|device| node.devices[*device].numa == Some(node.numa[*at].id))
        };
        return (0..pools.len())
            .filter(fits)
            .map(|at| {
                let mut pools = pools.to_vec();
                pools[at] = (pools[at].0 - cores, pools[at].1 - memory);
                pools
            })
            .collect();
    }
    // All requests of a case have one policy: then only sums matter.
    let all = pools.iter().fold((0, 0), |sum, pool| (sum.0 + pool.0, sum.1 + pool.1));
    if all.0 < cores || all.1 < memory { Vec::new() } else { vec![vec![(all.0 - cores, all.1 - memory)]] }
}

/// Distance of a set of devices if it is just what an alternative needs.
fn suits(node: &Node, alternative: &Alternative, chosen: &[usize]) -> Option<u64> {
    let of = |kind: DeviceKind| -> Vec<&Device> {
        chosen.iter().map(|at| &node.devices[*at]).filter(|device| device.kind == kind).collect()
    };
    let (mut gpus, nics, slices) = (of(DeviceKind::Gpu), of(DeviceKind::Hca), of(DeviceKind::MigSlice));
    if alternative.devices.len() < 3 && !slices.is_empty() {
        return None;
    }
    for (need, have) in alternative.devices.iter().zip([&gpus, &nics, &slices]) {
        let archs = &need.filter.archs;
        if have.len() != need.count as usize
            || have.iter().any(|device| !archs.is_empty() && !archs.contains(device.arch.as_ref()))
        {
            return None;
        }
    }
    gpus.extend(slices);
    let mut distance = 0;
    for gpu in &gpus {
        let far = |nic: &&Device| if nic.root == gpu.root { 0 } else { 1 + u64::from(nic.numa != gpu.numa) };
        let Some(nearest) = nics.iter().map(far).min() else { continue };
        let most = match alternative.affinity {
            Affinity::SameRoot => 0,
            Affinity::SameNuma => 1,
            _ => 2,
        };
        if nearest > most {
            return None;
        }
        distance += nearest;
    }
    let mut numa: Vec<_> = gpus.iter().chain(&nics).map(|device| device.numa).collect();
    numa.sort();
    numa.dedup();
    Some(distance + numa.len().saturating_sub(1) as u64)
}
