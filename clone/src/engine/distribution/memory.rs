//! Templates as the distribution sees them: at the parent's node, and where they arrive.

use std::path::Path;
use std::sync::Arc;

use crate::check::GuestRam;
use crate::chunks::Chunks;
use crate::template::Template;
use tokio::sync::oneshot;
use vmove_fabric::{Access, Fabric, FabricError, Region};
use vmove_memory::{ByteLen, ByteRange, FileOffset, Mapping, MemoryError, RamFile};
use vmove_node::region::register_kept;
use vmove_spread::{CHUNK, Extent, Layout, SpreadError, Target, non_zero};

use super::parts::{GAP, MOST, few, join, lie_in, part_at};
use super::send_order;
use crate::CloneError;
use crate::engine::error::DistributionError;
use crate::engine::message::RamPart;
use vmove_types::problem::chain;

/// What of a RAM file has memory, in whole chunks.
fn data(ram: u16, file: &RamFile) -> Result<Vec<RamPart>, MemoryError> {
    let chunk = u64::from(CHUNK);
    let extents = file.data_extents()?;
    let whole = extents.iter().map(|extent| {
        let start = extent.start.0 / chunk * chunk;
        RamPart { ram, start, len: extent.end().0.div_ceil(chunk) * chunk - start }
    });
    // Two that share a chunk would be looked at twice.
    Ok(join(&whole.collect::<Vec<_>>(), 0))
}

/// A template that is to be spread from here.
pub struct Outgoing {
    memory: Vec<Arc<Mapping>>,
    data: Vec<RamPart>,
    pub parts: Vec<RamPart>,
}

impl Outgoing {
    pub fn open(template: &Template) -> Result<Self, DistributionError> {
        let (mut memory, mut all) = (Vec::new(), Vec::new());
        for (number, ram) in (0_u16..).zip(&template.manifest().ram) {
            let file = RamFile::open(&ram.file)?;
            all.extend(data(number, &file)?);
            memory.push(file.map()?);
        }
        Ok(Self { memory, parts: few(&all, GAP, MOST), data: all })
    }

    pub fn register(&self, fabric: &dyn Fabric) -> Result<Vec<Region>, FabricError> {
        register(fabric, &self.memory, &self.parts)
    }

    /// What is not zero of it: first what `guest`, whose memory it was, has written again, and how many chunks that are. Holes are not
    /// looked at: that would give them memory.
    pub fn order(&self, regions: &[Region], guest: Option<&GuestRam>) -> (Vec<Extent>, u64) {
        let live = |data: &RamPart| {
            let (number, start) = part_at(&self.parts, data.ram, data.start)?;
            Some(non_zero(number, regions.get(usize::from(number))?, start..start + data.len))
        };
        let all: Vec<Extent> = self.data.iter().filter_map(live).flatten().collect();
        // Only now: the guest has run meanwhile.
        let written = guest.map(send_order::written).unwrap_or_default();
        let (mut first, rest) = send_order::split(&all, &self.parts, &written);
        let chunks = first.iter().map(|extent| u64::from(extent.count)).sum();
        first.extend(rest);
        (first, chunks)
    }
}

const fn range(part: &RamPart) -> ByteRange {
    ByteRange::new(FileOffset(part.start), ByteLen(part.len))
}

fn register(
    fabric: &dyn Fabric,
    memory: &[Arc<Mapping>],
    parts: &[RamPart],
) -> Result<Vec<Region>, FabricError> {
    let one = |part: &RamPart| {
        let mapping = Arc::clone(&memory[usize::from(part.ram)]);
        register_kept(fabric, mapping, range(part), Access::REMOTE_READ)
    };
    parts.iter().map(one).collect()
}

/// A template on its way to this node.
pub struct ArrivingMemory {
    pub memory: Vec<Arc<Mapping>>,
    pub parts: Arc<[RamPart]>,
    /// Told what travels, once that is known.
    pub known: Option<oneshot::Sender<Arc<Chunks>>>,
    pub chunks: Option<Arc<Chunks>>,
}

impl ArrivingMemory {
    /// Whether the parts lie in order in the memory that is here.
    fn fits(&self) -> bool {
        let lens: Vec<u64> = self.memory.iter().map(|mapping| mapping.len().0).collect();
        lie_in(&self.parts, &lens)
    }

    fn chunks(&self, layout: &Layout) -> Result<Arc<Chunks>, CloneError> {
        let lens: Vec<u64> = self.memory.iter().map(|mapping| mapping.len().0).collect();
        let travelling = layout.extents().iter().filter_map(|extent| {
            let part = self.parts.get(usize::from(extent.region))?;
            let first = u32::try_from(part.start / u64::from(CHUNK)).ok()?;
            Some((part.ram, first.checked_add(extent.first)?, extent.count))
        });
        Ok(Arc::new(Chunks::new(&lens, travelling)?))
    }
}

impl Target for ArrivingMemory {
    fn regions(&mut self, fabric: &dyn Fabric, layout: &Layout) -> Result<Vec<Region>, SpreadError> {
        let protocol = |what| FabricError::Protocol { what };
        let announced: Vec<u64> = self.parts.iter().map(|part| part.len).collect();
        if !self.fits() || announced != layout.regions {
            let bytes = |lens: &[u64]| lens.iter().fold(0_u64, |sum, len| sum.saturating_add(*len));
            let here: u64 = self.memory.iter().map(|mapping| mapping.len().0).sum();
            let what = format!(
                "expected {} parts of {} bytes in memory of {here} bytes, found {} parts of {} bytes",
                announced.len(),
                bytes(&announced),
                layout.regions.len(),
                bytes(&layout.regions)
            );
            return Err(protocol(what).into());
        }
        if let Some(known) = self.known.take() {
            let chunks = self.chunks(layout).map_err(|e| protocol(chain(&e)))?;
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
