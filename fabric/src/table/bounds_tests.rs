//! No request reaches beyond its region: each way in which numbers can lie at the edges of a region, and of 64 bits, against the same said
//! with 128 bits, which cannot overflow.
//!
//! Between two edges the checks are monotonic, so that no other number can be decided differently.

use std::sync::atomic::Ordering;

use super::layout::{INDEX_MASK, Need};
use super::regions::RegionTable;
use crate::error::RemoteStatus;

/// Numbers around an edge that fit into 64 bits.
fn around(edge: u128) -> impl Iterator<Item = u64> + Clone {
    let first = edge.saturating_sub(2);
    (first..=edge + 2).filter_map(|number| u64::try_from(number).ok())
}

#[test]
fn each_request_at_an_edge_is_answered_as_with_numbers_that_cannot_overflow() {
    const KEY: u64 = (INDEX_MASK + 1) | 3;
    let table = RegionTable::private().expect("a table");
    let slot = &table.layout().slots[3];
    slot.key.store(KEY, Ordering::Relaxed);
    slot.access.store(1, Ordering::Relaxed);
    let (mut inside, mut outside) = (0, 0);
    let ends = [0, 1 << 12, 1 << 32, 1 << 63, u128::from(u64::MAX)];
    let lens = [1, 2, 4096, 1 << 32, 1 << 63, u128::from(u64::MAX)].into_iter().flat_map(around);
    for (remote, len) in ends.into_iter().flat_map(around).flat_map(|r| lens.clone().map(move |l| (r, l))) {
        // What can be registered does not wrap around.
        let base = u64::MAX - len;
        slot.remote.store(remote, Ordering::Relaxed);
        slot.base.store(base, Ordering::Relaxed);
        slot.len.store(len, Ordering::Relaxed);
        let region = u128::from(remote)..u128::from(remote) + u128::from(len);
        let starts = [0, region.start, region.end, u128::from(u64::MAX)].into_iter().flat_map(around);
        for (addr, count) in starts.flat_map(|at| [0, 1, 2, 4096, u32::MAX].map(|count| (at, count))) {
            let wanted = u128::from(addr)..u128::from(addr) + u128::from(count);
            let expected = if count > 0 && wanted.start >= region.start && wanted.end <= region.end {
                inside += 1;
                Ok(base + (addr - remote))
            } else {
                outside += 1;
                Err(RemoteStatus::OutOfRange)
            };
            let found = table.layout().resolve(KEY, addr, count, Need::Read);
            assert_eq!(found, expected, "{wanted:x?} of {region:x?}");
        }
    }
    eprintln!("{inside} inside, {outside} outside");
    assert!(inside > 1000 && outside > 1000);
    assert_eq!(table.layout().resolve(KEY, 0, 1, Need::Write), Err(RemoteStatus::AccessDenied));
}
