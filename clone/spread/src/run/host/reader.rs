//! READs from one source.

use std::collections::HashMap;

use vmove_fabric::{
    CompletionKind, Completions, Endpoint, FabricError, MAX_SEGMENTS, ReadSegment, RemoteRegion,
    RemoteStatus, WrId,
};

use crate::host_id::HostId;
use crate::layout::{Layout, Place};
use crate::template::Copy;

/// Ranges that one READ may have.
pub(super) const SEGMENTS: usize = MAX_SEGMENTS;

/// A connection on which this host reads.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) source: HostId,
    pub(super) endpoint: Box<dyn Endpoint>,
    regions: Vec<RemoteRegion>,
    under_way: HashMap<u64, (Vec<u32>, Vec<Place>)>,
    next: u64,
    found: Completions,
}

impl Reader {
    pub(super) fn new(source: HostId, endpoint: Box<dyn Endpoint>) -> Self {
        let (regions, under_way) = (Vec::new(), HashMap::new());
        Self { source, endpoint, regions, under_way, next: 0, found: Completions::default() }
    }

    /// Where the source's memory is; before that, nothing is read.
    pub(super) fn set_regions(&mut self, regions: Vec<RemoteRegion>) {
        self.regions = regions;
    }

    /// Whether another READ may be posted, given the maximum of pending READs.
    pub(super) fn has_room(&self, most: usize) -> bool {
        !self.regions.is_empty() && self.under_way.len() < most
    }

    /// Whether no READ is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Reads pieces.
    pub(super) fn read(&mut self, layout: &Layout, copy: &Copy, pieces: Vec<u32>) -> Result<(), FabricError> {
        let places = layout.places(pieces.iter().copied());
        let segment = |place: &Place| {
            let index = place.region.map_or(self.regions.len() - 1, usize::from);
            let remote = self.regions.get(index)?.at(place.offset)?;
            Some(ReadSegment { remote, local: copy.slice(*place)? })
        };
        let segments: Option<Vec<ReadSegment>> = places.iter().map(segment).collect();
        let what = "regions that do not fit the layout".to_owned();
        let segments = segments.ok_or(FabricError::Protocol { what })?;
        self.next += 1;
        let wr = WrId(self.next);
        self.endpoint
            .post_read(wr, &segments)
            .map_err(|error| FabricError::Protocol { what: error.to_string() })?;
        self.under_way.insert(wr.0, (pieces, places));
        Ok(())
    }

    /// Makes progress; hands over what has ended, with what was zero made so.
    pub(super) fn poll(
        &mut self,
        copy: &Copy,
        mut ended: impl FnMut(&[u32], Result<(), RemoteStatus>),
    ) -> Result<(), FabricError> {
        self.endpoint.flush()?;
        while self.endpoint.poll(&mut self.found)? > 0 {
            for completion in self.found.drain() {
                let Some((pieces, places)) = self.under_way.remove(&completion.wr.0) else { continue };
                if let (CompletionKind::Read { zero_mask }, Ok(())) = (&completion.kind, completion.status) {
                    let zero = places.iter().enumerate().filter(|(index, _)| zero_mask & (1 << index) != 0);
                    zero.for_each(|(_, place)| copy.fill_zero(*place));
                }
                ended(&pieces, completion.status);
            }
        }
        Ok(())
    }

    /// Pieces whose READ will not end, because the connection is lost.
    pub(super) fn into_lost(self) -> impl Iterator<Item = Vec<u32>> {
        self.under_way.into_values().map(|(pieces, _)| pieces)
    }
}
