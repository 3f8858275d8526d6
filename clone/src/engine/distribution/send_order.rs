//! In which order a template is spread: first what the parent has written again by then, the rest as it lies in memory.
//!
//! The parent goes on while its template is made ready, and what it writes the kernel keeps apart. Its children go on at the same
//! place, so that they touch the same memory first.

use crate::check::GuestRam;
use vmove_memory::own_pages_in_qemu;
use vmove_spread::{CHUNK, Extent};

use super::parts::few;
use crate::engine::message::RamPart;
use vmove_types::problem::chain;

/// What lies around a page that was written comes with it: so many bytes, on their boundary.
const BLOCK: u64 = 64 << 10;
/// Runs of such blocks at most; where there are more, those that are near each other become one. Each makes two extents more at
/// most, and every host is told all extents.
const MOST: usize = 4096;

/// What a guest has written since its memory became private, as runs of blocks in order. Nothing, where the kernel does not tell.
pub fn written(guest: &GuestRam) -> Vec<RamPart> {
    let mut blocks: Vec<RamPart> = Vec::new();
    let found = own_pages_in_qemu(&guest.process, &guest.mappings, |file, range| {
        let Ok(ram) = u16::try_from(file) else { return };
        let start = range.start.0 / BLOCK * BLOCK;
        let end = range.end().0.div_ceil(BLOCK) * BLOCK;
        match blocks.last_mut() {
            Some(last) if last.ram == ram && (last.start..=last.end()).contains(&start) => {
                last.len = last.len.max(end - last.start);
            }
            _ => blocks.push(RamPart { ram, start, len: end - start }),
        }
    });
    if let Err(error) = found {
        // It may have ended.
        tracing::debug!(why = chain(&error), "what the parent of a fork writes is not known");
    }
    runs(blocks)
}

/// Few enough, and in order.
fn runs(mut blocks: Vec<RamPart>) -> Vec<RamPart> {
    blocks.sort_unstable_by_key(|block| (block.ram, block.start));
    few(&blocks, BLOCK, MOST)
}

/// Splits what travels into what lies in `written`, which is to come first, and the rest. `parts` are its regions. There are at
/// most two extents more than before for each run of `written`.
pub fn split(order: &[Extent], parts: &[RamPart], written: &[RamPart]) -> (Vec<Extent>, Vec<Extent>) {
    let chunk = u64::from(CHUNK);
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    for extent in order {
        let Some(part) = parts.get(usize::from(extent.region)) else {
            rest.push(*extent);
            continue;
        };
        let (mut at, end) = (extent.first, extent.first + extent.count);
        while at < end {
            let (inside, until) = side(written, part.ram, part.start + u64::from(at) * chunk);
            let until = until.saturating_sub(part.start).div_ceil(chunk);
            let until = u32::try_from(until).map_or(end, |until| until.min(end));
            let to = if inside { &mut first } else { &mut rest };
            to.push(Extent { first: at, count: until - at, ..*extent });
            at = until;
        }
    }
    (first, rest)
}

/// Whether a place lies in a run, and up to where that is so.
fn side(runs: &[RamPart], ram: u16, place: u64) -> (bool, u64) {
    let next = runs.partition_point(|run| (run.ram, run.end()) <= (ram, place));
    match runs.get(next).filter(|run| run.ram == ram) {
        Some(run) if run.start <= place => (true, run.end()),
        Some(run) => (false, run.start),
        None => (false, u64::MAX),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    const fn part(ram: u16, start: u64, len: u64) -> RamPart {
        RamPart { ram, start, len }
    }

    const fn extent(region: u16, first: u32, count: u32) -> Extent {
        Extent { region, first, count }
    }

    /// Places in RAM blocks, in the order of the extents.
    fn places(extents: &[Extent], parts: &[RamPart]) -> Vec<(u16, u64)> {
        let of = |extent: &Extent| {
            let part = parts[usize::from(extent.region)];
            let chunks = extent.first..extent.first + extent.count;
            chunks.map(move |chunk| (part.ram, part.start + u64::from(chunk) * u64::from(CHUNK)))
        };
        extents.iter().flat_map(of).collect()
    }

    #[test]
    fn what_was_written_comes_first_and_the_rest_as_it_lies() {
        // The second part begins in the middle of a block.
        let parts = [part(0, 0, MIB), part(0, 4 * MIB + 8192, MIB), part(1, 0, MIB)];
        let order = [extent(0, 0, 64), extent(0, 100, 10), extent(1, 0, 256), extent(2, 3, 20)];
        let written = runs(vec![part(1, 65536, 65536), part(0, 65536, 131_072), part(0, 4 * MIB, 65536)]);
        let (first, rest) = split(&order, &parts, &written);
        assert_eq!(first, [extent(0, 16, 32), extent(1, 0, 14), extent(2, 16, 7)]);
        let others =
            [extent(0, 0, 16), extent(0, 48, 16), extent(0, 100, 10), extent(1, 14, 242), extent(2, 3, 13)];
        assert_eq!(rest, others);
    }

    #[test]
    fn where_nothing_is_known_the_order_stays() {
        let parts = [part(0, 0, MIB)];
        let order = [extent(0, 0, 64), extent(0, 100, 10)];
        assert_eq!(split(&order, &parts, &[]), (Vec::new(), order.to_vec()));
        // All of it was written.
        assert_eq!(split(&order, &parts, &[part(0, 0, MIB)]), (order.to_vec(), Vec::new()));
    }

    #[test]
    fn runs_far_too_many_become_few_that_hold_them_all() {
        let blocks: Vec<RamPart> = (0..20_000).rev().map(|n| part(0, n * 3 * BLOCK, BLOCK)).collect();
        let runs = runs(blocks.clone());
        assert!(runs.len() <= MOST, "{}", runs.len());
        assert!(blocks.iter().all(|block| side(&runs, 0, block.start).0));
    }

    proptest! {
        #[test]
        fn every_chunk_travels_once_and_written_ones_first(
            pieces in prop::collection::vec((0..2_u16, 0..100_u32, 1..60_u32), 1..40),
            blocks in prop::collection::vec((0..2_u16, 0..120_u64), 0..60),
        ) {
            let parts = [part(0, 0, 64 * MIB), part(0, 70 * MIB + 4096, 64 * MIB), part(1, 0, 64 * MIB)];
            let mut next = [0, 0, 0];
            let mut order = Vec::new();
            for (far, gap, count) in pieces {
                let region = if far == 0 { 0 } else { 1 + order.len() % 2 };
                let first = next[region] + gap;
                next[region] = first + count;
                order.push(extent(u16::try_from(region).expect("a region"), first, count));
            }
            order.sort_by_key(|extent| (extent.region, extent.first));
            let near = blocks.into_iter().map(|(ram, n)| {
                // In the middle of ram 0 begins the second part.
                let start = if n % 2 == 0 { n * BLOCK } else { 70 * MIB + n * BLOCK };
                part(ram, start, BLOCK)
            });
            let written = runs(near.collect());
            let (first, rest) = split(&order, &parts, &written);
            prop_assert!(first.len() + rest.len() <= order.len() + 2 * written.len());
            let (before, after) = (places(&first, &parts), places(&rest, &parts));
            let is_written = |place: &(u16, u64)| {
                written.iter().any(|run| run.ram == place.0 && (run.start..run.end()).contains(&place.1))
            };
            prop_assert!(before.iter().all(is_written));
            prop_assert!(!after.iter().any(is_written));
            let all = places(&order, &parts);
            let told: BTreeSet<_> = before.iter().chain(&after).copied().collect();
            prop_assert_eq!(told.len(), before.len() + after.len());
            prop_assert_eq!(told, all.iter().copied().collect::<BTreeSet<_>>());
            // Each of the two as it lies in memory.
            prop_assert!(before.is_sorted() && after.is_sorted());
        }
    }
}
