//! The memory that is spread.

use std::ops::Range;

use vmove_fabric::{Access, Fabric, FabricError, FabricKind, LocalSlice, Region, RemoteRegion};

use crate::error::SpreadError;
use crate::layout::{CHUNK, Extent, Layout, Place, SUMS_PER_CHUNK};
use crate::memory::Buffer;

/// The memory at the root. It must not change during the distribution; a host detects changed bytes by their checksum.
#[derive(Debug)]
pub struct Template {
    regions: Vec<Region>,
    table: Buffer,
    layout: Layout,
    kind: FabricKind,
    second: Option<Second>,
}

/// The same memory for hosts of another fabric.
#[derive(Debug)]
struct Second {
    kind: FabricKind,
    remotes: Vec<RemoteRegion>,
    _regions: Vec<Region>,
}

/// Chunks of a region that are not zero, in `within` (bytes, whole chunks), lowest first.
#[must_use]
pub fn non_zero(number: u16, region: &Region, within: Range<u64>) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    let chunk = u64::from(CHUNK);
    for index in within.start / chunk..within.end.min(region.len()) / chunk {
        if region.is_zero_at(index * chunk, CHUNK as usize) == Some(true) {
            continue;
        }
        let Ok(first) = u32::try_from(index) else { break };
        match extents.last_mut() {
            Some(last) if last.first + last.count == first => last.count += 1,
            _ => extents.push(Extent { region: number, first, count: 1 }),
        }
    }
    extents
}

impl Template {
    /// Takes the checksums of `order`, what travels of `regions` in the order in which hosts should have it; all else is zero.
    /// The regions must be registered with `fabric` for READ by peers. `payload`: most bytes of a datagram, if there is multicast.
    ///
    /// # Errors
    /// [`SpreadError::Layout`]; the table could not be registered.
    pub fn new(
        fabric: &dyn Fabric,
        regions: Vec<Region>,
        order: Vec<Extent>,
        payload: Option<usize>,
    ) -> Result<Self, SpreadError> {
        let lens = regions.iter().map(Region::len).collect();
        let mut layout = Layout::new(lens, order, payload, rand::random())?;
        let table = Buffer::new(fabric, layout.table_bytes(), Access::REMOTE_READ)?;
        for chunk in layout.table()..layout.chunks() {
            let place = layout.place_of_chunk(chunk);
            let region = &regions[usize::from(place.region.unwrap_or(0))];
            let sum = region.checksum_at(place.offset, CHUNK as usize, layout.seed).unwrap_or(0);
            let _ = table.write_at(u64::from(chunk - layout.table()) * 8, &sum.to_le_bytes());
        }
        layout.table_sums = (0..layout.table())
            .map(|chunk| {
                table
                    .checksum_at(u64::from(chunk) * u64::from(CHUNK), CHUNK as usize, layout.seed)
                    .unwrap_or(0)
            })
            .collect();
        Ok(Self { regions, table, layout, kind: fabric.kind(), second: None })
    }

    /// Lets hosts of another fabric read the same memory: `regions` are those of [`new`](Self::new), registered with that one.
    /// Datagrams are sent from the first.
    ///
    /// # Errors
    /// The table could not be registered; the regions are others.
    pub fn also(&mut self, fabric: &dyn Fabric, regions: Vec<Region>) -> Result<(), SpreadError> {
        if !regions.iter().map(Region::len).eq(self.layout.regions.iter().copied()) {
            let what = "regions of other lengths for the second fabric of a template".to_owned();
            return Err(FabricError::Protocol { what }.into());
        }
        let table = self.table.also(fabric, Access::REMOTE_READ)?;
        let remotes = regions.iter().map(Region::remote).chain([table]).collect();
        self.second = Some(Second { kind: fabric.kind(), remotes, _regions: regions });
        Ok(())
    }

    /// How it is cut up.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What hosts of this fabric need to read it: its regions, then the table.
    pub(crate) fn remotes(&self, kind: FabricKind) -> Option<Vec<RemoteRegion>> {
        if kind == self.kind {
            return Some(self.regions.iter().map(Region::remote).chain([self.table.remote()]).collect());
        }
        self.second.as_ref().filter(|second| second.kind == kind).map(|second| second.remotes.clone())
    }

    pub(crate) fn slice(&self, place: Place) -> Option<LocalSlice> {
        slice(&self.regions, &self.table, place)
    }
}

/// The same at a host, as far as it has arrived.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) regions: Vec<Region>,
    pub(crate) table: Buffer,
}

impl Copy {
    pub(crate) fn remotes(&self) -> Vec<RemoteRegion> {
        self.regions.iter().map(Region::remote).chain([self.table.remote()]).collect()
    }

    pub(crate) fn slice(&self, place: Place) -> Option<LocalSlice> {
        slice(&self.regions, &self.table, place)
    }

    pub(crate) fn fill_zero(&self, place: Place) {
        let zeros = vec![0; place.len as usize];
        let _ = match place.region {
            Some(region) => self.regions[usize::from(region)].write_at(place.offset, &zeros),
            None => self.table.write_at(place.offset, &zeros),
        };
    }

    /// Whether a chunk holds the bytes that its checksum is of; the table's chunk that lists it is verified.
    pub(crate) fn is_right(&self, layout: &Layout, chunk: u32) -> bool {
        let place = layout.place_of_chunk(chunk);
        let Some(region) = place.region else {
            let sum = self.table.checksum_at(place.offset, CHUNK as usize, layout.seed);
            return sum.is_some() && sum == layout.table_sums.get(chunk as usize).copied();
        };
        let mut listed = [0; 8];
        let at = u64::from(chunk - layout.table()) * 8;
        debug_assert!(layout.table_chunk_of(chunk) == Some((chunk - layout.table()) / SUMS_PER_CHUNK));
        let sum = self.regions[usize::from(region)].checksum_at(place.offset, CHUNK as usize, layout.seed);
        self.table.read_at(at, &mut listed) && sum == Some(u64::from_le_bytes(listed))
    }
}

fn slice(regions: &[Region], table: &Buffer, place: Place) -> Option<LocalSlice> {
    match place.region {
        Some(region) => regions.get(usize::from(region))?.local(place.offset, place.len),
        None => table.local(place.offset, place.len),
    }
}
