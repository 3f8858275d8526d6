//! From where a host reads which block.
//!
//! Without multicast, hosts read blocks from each other as soon as those have them. In a **pipeline** of 2^l hosts (the binomial
//! pipeline of Ganesan and Seshadri, used by RDMC) the hosts are corners of a cube with l dimensions and the first is the origin,
//! which sends each block once: block b goes along dimension b mod l, then spreads as a binomial tree over the half of the cube on
//! that side, one dimension after the other, and at last crosses to the other half. Each host then sends and receives one block at
//! a time, and all have everything one block per dimension later than the first could. Hosts beyond 2^l share a corner: the
//! first of the two receives for both, the second reads all of it from the first and sends on what leaves the corner.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::host_id::HostId;

/// How blocks go through a group of hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheme {
    /// All read from the origin.
    Unicast,
    /// Binomial pipeline.
    Pipeline,
}

/// From where one host reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// How.
    pub scheme: Scheme,
    /// The hosts of the group, one list for all of them; the first is the origin, which has everything first.
    pub members: Arc<[HostId]>,
    /// Which of them this host is, from 1.
    pub me: u32,
}

impl Route {
    /// All from the root.
    #[must_use]
    pub fn from_root(me: HostId) -> Self {
        Self { scheme: Scheme::Unicast, members: [HostId::ROOT, me].into(), me: 1 }
    }

    /// Whether what a peer sent makes sense.
    pub(crate) fn is_sound(&self) -> bool {
        self.me != 0 && (self.me as usize) < self.members.len()
    }

    /// The host that `block` comes from.
    #[must_use]
    pub fn source(&self, block: u32) -> HostId {
        match self.scheme {
            Scheme::Unicast => self.members[0],
            Scheme::Pipeline => self.members[pipeline_source(self.members.len(), self.me as usize, block).0],
        }
    }

    /// When it is `block`'s turn among those from one source: if all go step by step, it arrives in this step. Sources that are
    /// asked in another order are busy with one block when another host needs another from them.
    #[must_use]
    pub(crate) fn turn(&self, block: u32) -> u32 {
        match self.scheme {
            Scheme::Unicast => block,
            Scheme::Pipeline => block + pipeline_source(self.members.len(), self.me as usize, block).1,
        }
    }

    /// All hosts that blocks come from.
    #[must_use]
    pub fn sources(&self) -> Vec<HostId> {
        let cycle = 64; // more than there are dimensions
        let mut sources: Vec<HostId> = (0..cycle).map(|block| self.source(block)).collect();
        sources.sort_unstable();
        sources.dedup();
        sources
    }
}

/// The member from which member `me` of `count` gets a block, and how many steps after the origin has begun to send it.
fn pipeline_source(count: usize, me: usize, block: u32) -> (usize, u32) {
    let dimensions = count.ilog2();
    let corners = 1_usize << dimensions;
    // Members from `corners` on are the second at the corners 1, 2, ...
    if me >= corners {
        return (me - corners + 1, 1);
    }
    let leaving = |corner: usize| {
        let second = corner + corners - 1;
        if corner != 0 && second < count { second } else { corner }
    };
    let first = block % dimensions.max(1);
    let along = |dimension: u32| 1_usize << dimension;
    if dimensions == 0 || me == along(first) {
        return (0, 0);
    }
    if me & along(first) == 0 {
        return (leaving(me | along(first)), dimensions);
    }
    let last = (1..dimensions).rev().find(|step| me & along((first + step) % dimensions) != 0);
    let step = last.expect("another dimension than the first");
    (leaving(me & !along((first + step) % dimensions)), step)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// In steps in which each member sends at most one block and receives at most one: steps until all have all.
    fn steps(count: usize, blocks: u32) -> u32 {
        let mut have = vec![vec![false; blocks as usize]; count];
        have[0].fill(true);
        let from = |me, block| pipeline_source(count, me, block);
        let mut open: Vec<(u32, u32, usize)> = (1..count)
            .flat_map(|me| (0..blocks).map(move |block| (block + from(me, block).1, block, me)))
            .collect();
        open.sort_unstable();
        for step in 1.. {
            let (mut sends, mut receives) = (vec![false; count], vec![false; count]);
            let before = have.clone();
            let left = open.len();
            open.retain(|(_, block, me)| {
                let source = from(*me, *block).0;
                if !before[source][*block as usize] || sends[source] || receives[*me] {
                    return true;
                }
                (sends[source], receives[*me], have[*me][*block as usize]) = (true, true, true);
                false
            });
            assert!(open.len() < left, "{count} members stand still");
            if open.is_empty() {
                return step;
            }
        }
        unreachable!()
    }

    #[test]
    fn all_get_all_and_the_origin_sends_each_block_once() {
        for count in 2..70 {
            for block in 0..14 {
                let from_origin = (1..count).filter(|me| pipeline_source(count, *me, block).0 == 0).count();
                assert_eq!(from_origin, 1, "{count} members, block {block}");
                for me in 1..count {
                    let mut at = me;
                    for _ in 0..20 {
                        at = if at == 0 { 0 } else { pipeline_source(count, at, block).0 };
                    }
                    assert_eq!(at, 0, "{count} members: block {block} never reaches {me}");
                }
            }
        }
    }

    #[test]
    fn the_time_is_that_of_one_copy_and_a_little() {
        for count in [2, 3, 4, 6, 8, 13, 16, 31, 32, 64] {
            let found = steps(count, 64);
            let bound = if count.is_power_of_two() { 64 + count.ilog2() + 1 } else { 64 * 3 / 2 };
            assert!(found <= bound, "{count} members: {found} steps for 64 blocks, expected {bound}");
        }
    }

    proptest! {
        #[test]
        fn a_source_is_another_member(
            (count, me) in (2..5000_usize).prop_flat_map(|count| (Just(count), 1..count)),
            block: u32,
        ) {
            let source = pipeline_source(count, me, block).0;
            prop_assert!(source < count && source != me);
            let members = (0..u32::try_from(count).unwrap()).map(HostId).collect();
            let route = Route { scheme: Scheme::Pipeline, members, me: u32::try_from(me).unwrap() };
            prop_assert!(route.sources().len() <= 14);
            prop_assert!(route.sources().contains(&route.source(block)));
        }
    }
}
