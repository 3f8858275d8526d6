//! Parts of RAM blocks that have memory. Each is a region of the distribution, and takes an entry of a device's table.

use crate::engine::message::RamPart;

/// Smaller holes are registered with what is around them, and so filled where registering pins.
pub const GAP: u64 = 2 << 20;
/// Parts of a template at most: each takes an entry of a device's table, and of ours.
pub const MOST: usize = 512;

/// The part that holds a place in a RAM block, and where in it. Parts are in order.
pub fn part_at(parts: &[RamPart], ram: u16, offset: u64) -> Option<(u16, u64)> {
    let index = parts.partition_point(|part| (part.ram, part.start) <= (ram, offset)).checked_sub(1)?;
    let part = parts.get(index).filter(|part| part.ram == ram && offset < part.end())?;
    Some((u16::try_from(index).ok()?, offset - part.start))
}

/// Whether parts, as another node gives them, lie in order in RAM blocks of these lengths.
pub fn lie_in(parts: &[RamPart], lens: &[u64]) -> bool {
    let chunk = u64::from(vmove_spread::CHUNK);
    let inside = |part: &RamPart| {
        let len = lens.get(usize::from(part.ram)).copied().unwrap_or(0);
        let end = part.start.checked_add(part.len);
        part.len > 0 && part.start.is_multiple_of(chunk) && end.is_some_and(|end| end <= len)
    };
    let follows = |pair: &[RamPart]| (pair[0].ram, pair[0].end()) <= (pair[1].ram, pair[1].start);
    parts.iter().all(inside) && parts.windows(2).all(follows)
}

/// Puts together what has memory, given in order, across holes smaller than `gap`.
pub fn join(data: &[RamPart], gap: u64) -> Vec<RamPart> {
    let mut parts: Vec<RamPart> = Vec::new();
    for next in data {
        match parts.last_mut() {
            Some(last) if last.ram == next.ram && next.start < last.end().saturating_add(gap) => {
                last.len = last.len.max(next.end() - last.start);
            }
            _ => parts.push(*next),
        }
    }
    parts
}

/// The same in at most so many parts if holes that are large enough do it.
pub fn few(data: &[RamPart], gap: u64, most: usize) -> Vec<RamPart> {
    let gaps = std::iter::successors(Some(gap), |gap| gap.checked_mul(2));
    gaps.map(|gap| join(data, gap)).find(|parts| parts.len() <= most).unwrap_or_else(|| join(data, u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn part(ram: u16, start: u64, len: u64) -> RamPart {
        RamPart { ram, start, len }
    }

    #[test]
    fn small_holes_are_joined_and_each_place_has_one_part() {
        let mib = 1 << 20;
        let data = [part(0, 0, 4096), part(0, mib, mib), part(0, 8 * mib, 8192), part(1, 0, mib)];
        let parts = few(&data, GAP, MOST);
        assert_eq!(parts, [part(0, 0, 2 * mib), part(0, 8 * mib, 8192), part(1, 0, mib)]);
        assert_eq!(part_at(&parts, 0, 3 * mib / 2), Some((0, 3 * mib / 2)));
        assert_eq!(part_at(&parts, 0, 8 * mib + 4096), Some((1, 4096)));
        assert_eq!(part_at(&parts, 1, 0), Some((2, 0)));
        for (ram, offset) in [(0, 4 * mib), (0, 8 * mib + 8192), (1, mib), (2, 0)] {
            assert_eq!(part_at(&parts, ram, offset), None);
        }
    }

    #[test]
    fn many_parts_are_made_few() {
        let data: Vec<RamPart> = (0..5000).map(|n| part(0, n * (4 << 20), 4096)).collect();
        let parts = few(&data, GAP, MOST);
        assert!(parts.len() <= MOST, "{}", parts.len());
        assert!(data.iter().all(|d| part_at(&parts, d.ram, d.start).is_some()));
    }

    /// Every part that another node may give, at the edges of a block and of 64 bits: what is taken lies inside, against the same said with
    /// 128 bits, which cannot overflow.
    #[test]
    fn no_part_of_another_node_reaches_beyond_its_block() {
        let chunk = u64::from(vmove_spread::CHUNK);
        let top = u64::MAX - u64::MAX % chunk;
        let starts = [0, 1, chunk, 2 * chunk, top - chunk, top, u64::MAX];
        let lens = [0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, u64::MAX - chunk, u64::MAX];
        let blocks = [0, chunk - 1, chunk, 2 * chunk, 3 * chunk, top, u64::MAX];
        let all: Vec<_> = [0, 1]
            .into_iter()
            .flat_map(|ram| starts.map(|start| (ram, start)))
            .flat_map(|(ram, start)| lens.map(|len| part(ram, start, len)))
            .collect();
        let end = |part: &RamPart| u128::from(part.start) + u128::from(part.len);
        let mut taken = 0;
        let pairs: Vec<_> = all.iter().flat_map(|a| all.iter().map(move |b| (*a, *b))).collect();
        for (block, (first, second)) in
            blocks.into_iter().flat_map(|block| pairs.iter().map(move |pair| (block, pair)))
        {
            let inside = |part: &RamPart| {
                part.ram == 0
                    && part.len > 0
                    && part.start.is_multiple_of(chunk)
                    && end(part) <= u128::from(block)
            };
            let expected = inside(first) && inside(second) && end(first) <= u128::from(second.start);
            let parts = [*first, *second];
            assert_eq!(lie_in(&parts, &[block]), expected, "{parts:?} of {block}");
            if expected {
                taken += 1;
                assert_eq!(part_at(&parts, 0, first.start), Some((0, 0)));
                assert_eq!(part_at(&parts, 0, second.end() - 1), Some((1, second.len - 1)));
                assert_eq!(part_at(&parts, 0, second.end()), None);
            }
        }
        assert!(taken > 20, "{taken}");
    }
}
