//! Templates as the distribution sees them: at the parent's node, and where they arrive.

use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use vmove_clone::check::GuestRam;
use vmove_clone::service::Chunks;
use vmove_clone::template::Template;
use vmove_fabric::{Access, Fabric, Region};
use vmove_memory::{ByteLen, ByteRange, FileOffset, Mapping, RamFile};
use vmove_migrate::region::register_kept;
use vmove_spread::{CHUNK, Extent, Layout, SpreadError, Target, non_zero};

use super::order;
use crate::api::problem::chain;

/// Smaller holes are registered with what is around them, and so filled where registering pins.
const GAP: u64 = 2 << 20;
/// Parts of a template at most: each takes an entry of a device's table, and of ours.
const MOST: usize = 512;

/// A part of a RAM block that has memory: one of the regions of the distribution. The rest is zero, and registered nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Which RAM block.
    pub ram: u16,
    /// In bytes, a whole number of chunks.
    pub start: u64,
    pub len: u64,
}

impl Part {
    pub const fn end(&self) -> u64 {
        self.start + self.len
    }

    const fn range(&self) -> ByteRange {
        ByteRange::new(FileOffset(self.start), ByteLen(self.len))
    }
}

/// The part that holds a place in a RAM block, and where in it. Parts are in order.
pub fn part_at(parts: &[Part], ram: u16, offset: u64) -> Option<(u16, u64)> {
    let index = parts.partition_point(|part| (part.ram, part.start) <= (ram, offset)).checked_sub(1)?;
    let part = parts.get(index).filter(|part| part.ram == ram && offset < part.end())?;
    Some((u16::try_from(index).ok()?, offset - part.start))
}

/// Puts together what has memory, given in order, across holes smaller than `gap`.
fn join(data: &[Part], gap: u64) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
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
pub fn few(data: &[Part], gap: u64, most: usize) -> Vec<Part> {
    let gaps = std::iter::successors(Some(gap), |gap| gap.checked_mul(2));
    gaps.map(|gap| join(data, gap)).find(|parts| parts.len() <= most).unwrap_or_else(|| join(data, u64::MAX))
}

/// What of a RAM file has memory, in whole chunks.
fn data(ram: u16, file: &RamFile) -> Result<Vec<Part>, String> {
    let chunk = u64::from(CHUNK);
    let extents = file.data_extents().map_err(|e| chain(&e))?;
    let whole = extents.iter().map(|extent| {
        let start = extent.start.0 / chunk * chunk;
        Part { ram, start, len: extent.end().0.div_ceil(chunk) * chunk - start }
    });
    // Two that share a chunk would be looked at twice.
    Ok(join(&whole.collect::<Vec<_>>(), 0))
}

/// A template that is to be spread from here.
pub struct Outgoing {
    memory: Vec<Arc<Mapping>>,
    data: Vec<Part>,
    pub parts: Vec<Part>,
}

impl Outgoing {
    pub fn open(template: &Template) -> Result<Self, String> {
        let (mut memory, mut all) = (Vec::new(), Vec::new());
        for (number, ram) in (0_u16..).zip(&template.manifest().ram) {
            let file = RamFile::open(&ram.file).map_err(|e| chain(&e))?;
            all.extend(data(number, &file)?);
            memory.push(file.map().map_err(|e| chain(&e))?);
        }
        Ok(Self { memory, parts: few(&all, GAP, MOST), data: all })
    }

    pub fn register(&self, fabric: &dyn Fabric) -> Result<Vec<Region>, String> {
        register(fabric, &self.memory, &self.parts).map_err(|e| chain(&e))
    }

    /// What is not zero of it: first what `guest`, whose memory it was, has written again, and how many chunks that are. Holes are not
    /// looked at: that would give them memory.
    pub fn order(&self, regions: &[Region], guest: Option<&GuestRam>) -> (Vec<Extent>, u64) {
        let live = |data: &Part| {
            let (number, start) = part_at(&self.parts, data.ram, data.start)?;
            Some(non_zero(number, regions.get(usize::from(number))?, start..start + data.len))
        };
        let all: Vec<Extent> = self.data.iter().filter_map(live).flatten().collect();
        // Only now: the guest has run meanwhile.
        let written = guest.map(order::written).unwrap_or_default();
        let (mut first, rest) = order::split(&all, &self.parts, &written);
        let chunks = first.iter().map(|extent| u64::from(extent.count)).sum();
        first.extend(rest);
        (first, chunks)
    }
}

fn register(
    fabric: &dyn Fabric,
    memory: &[Arc<Mapping>],
    parts: &[Part],
) -> Result<Vec<Region>, vmove_fabric::FabricError> {
    let one = |part: &Part| {
        let mapping = Arc::clone(&memory[usize::from(part.ram)]);
        register_kept(fabric, mapping, part.range(), Access::REMOTE_READ)
    };
    parts.iter().map(one).collect()
}

/// A template on its way to this node.
pub struct Incoming {
    pub memory: Vec<Arc<Mapping>>,
    pub parts: Arc<[Part]>,
    /// Told what travels, once that is known.
    pub known: Option<oneshot::Sender<Arc<Chunks>>>,
    pub chunks: Option<Arc<Chunks>>,
}

impl Incoming {
    /// Whether the parts lie in order in the memory that is here.
    fn fits(&self) -> bool {
        let chunk = u64::from(CHUNK);
        let inside = |part: &Part| {
            let len = self.memory.get(usize::from(part.ram)).map_or(0, |mapping| mapping.len().0);
            let end = part.start.checked_add(part.len);
            part.len > 0 && part.start % chunk == 0 && end.is_some_and(|end| end <= len)
        };
        let follows = |pair: &[Part]| (pair[0].ram, pair[0].end()) <= (pair[1].ram, pair[1].start);
        self.parts.iter().all(inside) && self.parts.windows(2).all(follows)
    }

    fn chunks(&self, layout: &Layout) -> Result<Arc<Chunks>, String> {
        let lens: Vec<u64> = self.memory.iter().map(|mapping| mapping.len().0).collect();
        let travelling = layout.extents().iter().filter_map(|extent| {
            let part = self.parts.get(usize::from(extent.region))?;
            let first = u32::try_from(part.start / u64::from(CHUNK)).ok()?;
            Some((part.ram, first.checked_add(extent.first)?, extent.count))
        });
        Chunks::new(&lens, travelling).map(Arc::new).map_err(|e| chain(&e))
    }
}

impl Target for Incoming {
    fn regions(&mut self, fabric: &dyn Fabric, layout: &Layout) -> Result<Vec<Region>, SpreadError> {
        let protocol = |what| vmove_fabric::FabricError::Protocol { what };
        let announced: Vec<u64> = self.parts.iter().map(|part| part.len).collect();
        if !self.fits() || announced != layout.regions {
            let here: Vec<u64> = self.memory.iter().map(|mapping| mapping.len().0).collect();
            let what = format!(
                "expected parts {:?} of memory of {here:?} bytes, found {:?}",
                self.parts, layout.regions
            );
            return Err(protocol(what).into());
        }
        if let Some(known) = self.known.take() {
            let chunks = self.chunks(layout).map_err(protocol)?;
            self.chunks = Some(chunks.clone());
            // Nobody waits for it any more if the fork was given up.
            let _ = known.send(chunks);
        }
        Ok(register(fabric, &self.memory, &self.parts)?)
    }

    fn landed(&mut self, region: u16, offset: u64) {
        if let (Some(chunks), Some(part)) = (&self.chunks, self.parts.get(usize::from(region))) {
            chunks.landed(part.ram, part.start + offset);
        }
    }
}

/// Bytes of memory that a host gives a template: what has memory at the parent's node, and what of its RAM files would be
/// registered, which is more by small holes.
pub fn allocated(files: &[&Path]) -> (u64, u64) {
    let of = |path: &Path| RamFile::open(path).and_then(|file| file.allocated_bytes());
    let live = files.iter().filter_map(|path| of(path).ok()).map(|bytes| bytes.0).sum();
    let all = (0_u16..).zip(files).filter_map(|(ram, path)| data(ram, &RamFile::open(path).ok()?).ok());
    let registered = few(&all.flatten().collect::<Vec<_>>(), GAP, MOST).iter().map(|part| part.len).sum();
    (live, registered)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn part(ram: u16, start: u64, len: u64) -> Part {
        Part { ram, start, len }
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
        let data: Vec<Part> = (0..5000).map(|n| part(0, n * (4 << 20), 4096)).collect();
        let parts = few(&data, GAP, MOST);
        assert!(parts.len() <= MOST, "{}", parts.len());
        assert!(data.iter().all(|d| part_at(&parts, d.ram, d.start).is_some()));
    }
}
