//! How a template is cut up and numbered.
//!
//! A **chunk** is 4 KiB of a region, the unit that is verified. Only chunks that are not zero travel; they are numbered in the
//! order in which they are to be sent, so that consecutive numbers are what a host should have next. In front of them come the
//! chunks of the **table** that holds the checksums of all others (the table's own are in the [`Layout`]).
//! A **piece** is what one datagram carries: a chunk, or part of one where the MTU is smaller. All pieces have one length; the
//! last of a chunk overlaps the one before it if need be. A **block** is 64 chunks, what a host reads at once.

use serde::{Deserialize, Serialize};

use crate::span::Span;

/// Bytes of a chunk.
pub const CHUNK: u32 = 4096;
/// Chunks in a block.
pub(crate) const BLOCK_CHUNKS: u32 = 64;
/// Checksums in a chunk of the table.
pub(crate) const SUMS_PER_CHUNK: u32 = CHUNK / 8;

/// Consecutive chunks of one region that follow each other in the order of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// Which region.
    pub region: u16,
    /// The first chunk, counted from the begin of the region.
    pub first: u32,
    /// How many chunks.
    pub count: u32,
}

/// A place in a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// `None`: the table.
    pub(crate) region: Option<u16>,
    /// In bytes.
    pub(crate) offset: u64,
    /// In bytes.
    pub(crate) len: u32,
}

/// The order of sending, as all hosts know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct Layout {
    /// Bytes of each region.
    pub regions: Vec<u64>,
    /// What travels, in order.
    extents: Vec<Extent>,
    /// Checksums of the chunks of the table.
    pub(crate) table_sums: Vec<u64>,
    /// Seed of all checksums.
    pub(crate) seed: u64,
    /// Pieces of a chunk.
    pieces: u32,
    /// Chunks of a block.
    block: u32,
    /// Chunks of the table.
    table: u32,
    /// All chunks: the table's and those that travel.
    chunks: u32,
    /// Number of the first chunk of each extent.
    starts: Vec<u32>,
    /// Indexes of extents by region and place in it.
    by_place: Vec<u32>,
}

/// A layout as it crosses the network.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Written {
    regions: Vec<u64>,
    extents: Vec<Extent>,
    table_sums: Vec<u64>,
    seed: u64,
    payload: Option<u32>,
}

impl From<Layout> for Written {
    fn from(layout: Layout) -> Self {
        let payload = (layout.pieces > 1).then(|| layout.piece_bytes());
        let Layout { regions, extents, table_sums, seed, .. } = layout;
        Self { regions, extents, table_sums, seed, payload }
    }
}

impl TryFrom<Written> for Layout {
    type Error = LayoutError;

    fn try_from(written: Written) -> Result<Self, LayoutError> {
        let Written { regions, extents, table_sums, seed, payload } = written;
        let mut layout = Self::new(regions, extents, payload.map(|bytes| bytes as usize), seed)?;
        if table_sums.len() != layout.table as usize {
            return Err(LayoutError::Sums { found: table_sums.len(), expected: layout.table });
        }
        layout.table_sums = table_sums;
        Ok(layout)
    }
}

/// Why extents make no layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// An extent reaches beyond its region, or has none.
    #[error(
        "extent {index} does not lie inside its region; give whole chunks of 4 KiB of regions that exist"
    )]
    Outside {
        /// Index of the extent.
        index: usize,
    },
    /// A chunk travels twice.
    #[error("extent {index} overlaps another one; give each chunk of a region once")]
    Overlap {
        /// Index of the extent.
        index: usize,
    },
    /// Nothing travels, or more than 32 bits can number.
    #[error("{chunks} chunks of 4 KiB in {pieces} pieces each; expected 1 chunk to 2^32 pieces")]
    Size {
        /// Chunks given.
        chunks: u64,
        /// Pieces of each.
        pieces: u32,
    },
    /// Checksums of the table's chunks are missing, or too many.
    #[error("{found} checksums of the table; expected {expected}")]
    Sums {
        /// How many there are.
        found: usize,
        /// How many chunks the table has.
        expected: u32,
    },
    /// Datagrams are too small.
    #[error("{bytes} bytes of payload in a datagram; expected at least 256")]
    Payload {
        /// Most bytes that one carries.
        bytes: usize,
    },
}

impl Layout {
    /// Numbers `extents` of regions of these lengths (in bytes, whole chunks) for datagrams of at most `payload` bytes;
    /// `None`: there are no datagrams, and a piece is a chunk.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn new(
        regions: Vec<u64>,
        extents: Vec<Extent>,
        payload: Option<usize>,
        seed: u64,
    ) -> Result<Self, LayoutError> {
        let pieces = match payload {
            None => 1,
            Some(bytes) if bytes < 256 => return Err(LayoutError::Payload { bytes }),
            Some(bytes) => CHUNK.div_ceil(u32::try_from(bytes / 8 * 8).unwrap_or(CHUNK)),
        };
        let mut live = 0_u64;
        for (index, extent) in extents.iter().enumerate() {
            let end = (u64::from(extent.first) + u64::from(extent.count)) * u64::from(CHUNK);
            if regions.get(usize::from(extent.region)).is_none_or(|len| end > *len) || extent.count == 0 {
                return Err(LayoutError::Outside { index });
            }
            live += u64::from(extent.count);
        }
        let table = live.div_ceil(u64::from(SUMS_PER_CHUNK));
        let size = LayoutError::Size { chunks: live, pieces };
        if live == 0 || (live + table).saturating_mul(u64::from(pieces)) > u64::from(u32::MAX) {
            return Err(size);
        }
        let table = u32::try_from(table).map_err(|_| size)?;
        let chunks = table + u32::try_from(live).map_err(|_| size)?;
        let mut next = table;
        let starts = extents
            .iter()
            .map(|extent| {
                let start = next;
                next += extent.count;
                start
            })
            .collect();
        let mut by_place: Vec<u32> = (0..u32::try_from(extents.len()).unwrap_or(u32::MAX)).collect();
        by_place.sort_by_key(|index| {
            let extent = extents[*index as usize];
            (extent.region, extent.first)
        });
        let overlap = by_place.windows(2).find(|pair| {
            let [one, next] = [pair[0], pair[1]].map(|index| extents[index as usize]);
            one.region == next.region && next.first - one.first < one.count
        });
        if let Some(pair) = overlap {
            return Err(LayoutError::Overlap { index: pair[1] as usize });
        }
        Ok(Self {
            regions,
            extents,
            table_sums: Vec::new(),
            seed,
            pieces,
            block: BLOCK_CHUNKS,
            table,
            chunks,
            starts,
            by_place,
        })
    }

    /// The same with blocks of another size, for models.
    pub(crate) fn with_blocks(mut self, chunks: u32) -> Self {
        self.block = chunks.clamp(1, BLOCK_CHUNKS);
        self
    }

    /// What travels, in the order of sending.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Chunks that travel, with those of the table.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        self.chunks
    }

    /// Chunks of the table; they have the lowest numbers.
    #[must_use]
    pub fn table(&self) -> u32 {
        self.table
    }

    /// Bytes that travel, with the table's.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.chunks) * u64::from(CHUNK)
    }

    /// Bytes of the table.
    pub(crate) fn table_bytes(&self) -> usize {
        self.table as usize * CHUNK as usize
    }

    /// Those of a peer's spans that can be: they name pieces that there are, and all of them together no more than there are.
    pub(crate) fn possible(&self, spans: impl IntoIterator<Item = Span>) -> Vec<Span> {
        let mut left = self.pieces();
        let mut can_be = |span: &Span| {
            let inside = span.first.checked_add(span.count).is_some_and(|end| end <= self.pieces());
            let fits = inside && span.count <= left;
            left -= if fits { span.count } else { 0 };
            fits
        };
        spans.into_iter().filter(|span| can_be(span)).collect()
    }

    /// Pieces that travel.
    #[must_use]
    pub fn pieces(&self) -> u32 {
        self.chunks * self.pieces
    }

    /// Bytes of a piece.
    #[must_use]
    pub fn piece_bytes(&self) -> u32 {
        CHUNK.div_ceil(self.pieces).next_multiple_of(8)
    }

    /// Blocks that travel.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.chunks.div_ceil(self.block)
    }

    /// The chunk that a piece is of.
    pub(crate) fn chunk_of(&self, piece: u32) -> u32 {
        piece / self.pieces
    }

    /// The pieces of a chunk.
    pub(crate) fn pieces_of(&self, chunk: u32) -> Span {
        Span { first: chunk * self.pieces, count: self.pieces }
    }

    /// The pieces of a block.
    pub(crate) fn pieces_of_block(&self, block: u32) -> Span {
        let first = block * self.block;
        let count = self.block.min(self.chunks - first);
        Span { first: first * self.pieces, count: count * self.pieces }
    }

    /// The block that a chunk is in.
    pub(crate) fn block_of(&self, chunk: u32) -> u32 {
        chunk / self.block
    }

    /// Where a chunk is.
    pub(crate) fn place_of_chunk(&self, chunk: u32) -> Place {
        if chunk < self.table {
            return Place { region: None, offset: u64::from(chunk) * u64::from(CHUNK), len: CHUNK };
        }
        let index = self.starts.partition_point(|start| *start <= chunk) - 1;
        let extent = &self.extents[index];
        let at = u64::from(extent.first) + u64::from(chunk - self.starts[index]);
        Place { region: Some(extent.region), offset: at * u64::from(CHUNK), len: CHUNK }
    }

    /// Where a piece is.
    pub(crate) fn place_of_piece(&self, piece: u32) -> Place {
        let chunk = self.place_of_chunk(self.chunk_of(piece));
        let len = self.piece_bytes();
        let inside = ((piece % self.pieces) * len).min(CHUNK - len);
        Place { region: chunk.region, offset: chunk.offset + u64::from(inside), len }
    }

    /// Where pieces are, in as few ranges as possible.
    pub(crate) fn places(&self, pieces: impl IntoIterator<Item = u32>) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        for piece in pieces {
            let place = self.place_of_piece(piece);
            let end = place.offset + u64::from(place.len);
            match places.last_mut() {
                Some(last)
                    if last.region == place.region
                        && (last.offset..=last.offset + u64::from(last.len)).contains(&place.offset) =>
                {
                    last.len = u32::try_from(end - last.offset).unwrap_or(u32::MAX);
                }
                _ => places.push(place),
            }
        }
        places
    }

    /// The number of the chunk at `offset` of a region; `None`: it does not travel, it is zero.
    #[must_use]
    pub fn chunk_at(&self, region: u16, offset: u64) -> Option<u32> {
        let at = u32::try_from(offset / u64::from(CHUNK)).ok()?;
        let after = self.by_place.partition_point(|index| {
            let extent = self.extents[*index as usize];
            (extent.region, extent.first) <= (region, at)
        });
        let index = *self.by_place.get(after.checked_sub(1)?)? as usize;
        let extent = self.extents[index];
        let inside = extent.region == region && at - extent.first < extent.count;
        inside.then(|| self.starts[index] + (at - extent.first))
    }

    /// The chunk of the table with the checksum of a chunk that is not of the table.
    pub(crate) fn table_chunk_of(&self, chunk: u32) -> Option<u32> {
        Some(chunk.checked_sub(self.table)? / SUMS_PER_CHUNK)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_chunk_has_one_place_and_its_pieces_cover_it(counts in prop::collection::vec(1..900_u32, 1..8), payload in prop::option::of(256..9000_usize)) {
            let mut at = 3;
            let extents: Vec<Extent> = counts.iter().map(|count| {
                let extent = Extent { region: 1, first: at, count: *count };
                at += count + 2;
                extent
            }).collect();
            let regions = vec![0, u64::from(at) * u64::from(CHUNK)];
            let mut layout = Layout::new(regions, extents, payload, 1).unwrap();
            layout.table_sums = vec![7; layout.table() as usize];
            let crossed: Layout = postcard::from_bytes(&postcard::to_stdvec(&layout).unwrap()).unwrap();
            prop_assert_eq!(&crossed, &layout);
            let live: u32 = counts.iter().sum();
            prop_assert_eq!(layout.chunks(), live + live.div_ceil(512));
            prop_assert!(payload.is_none_or(|payload| layout.piece_bytes() as usize <= payload));
            for chunk in 0..layout.chunks() {
                let place = layout.place_of_chunk(chunk);
                if let Some(region) = place.region {
                    prop_assert_eq!(layout.chunk_at(region, place.offset + 5), Some(chunk));
                    prop_assert!(layout.table_chunk_of(chunk).unwrap() < layout.table());
                }
                prop_assert_eq!(layout.places(layout.pieces_of(chunk).numbers()), vec![place]);
            }
            prop_assert_eq!(layout.chunk_at(1, 0), None);
            let all: u64 = layout.places(0..layout.pieces()).iter().map(|place| u64::from(place.len)).sum();
            prop_assert_eq!(all, layout.bytes());
            let blocks: u32 = (0..layout.blocks()).map(|block| layout.pieces_of_block(block).count).sum();
            prop_assert_eq!(blocks, layout.pieces());
        }
    }

    #[test]
    fn spans_of_a_peer_name_no_more_than_there_is() {
        let extent = Extent { region: 0, first: 0, count: 7 };
        let layout = Layout::new(vec![7 * 4096], vec![extent], None, 0).unwrap();
        let span = |first, count| Span { first, count };
        assert_eq!(layout.possible([span(0, 5), span(5, 3)]), [span(0, 5), span(5, 3)]);
        assert_eq!(layout.possible([span(0, 8), span(0, 8), span(3, 1)]), [span(0, 8)]);
        assert_eq!(layout.possible([span(0, u32::MAX), span(8, 1), span(u32::MAX, 2)]), []);
    }

    #[test]
    fn the_table_of_a_large_template_has_more_than_4_gib() {
        let count = 3 << 28; // 3 TiB
        let layout =
            Layout::new(vec![3 << 40], vec![Extent { region: 0, first: 0, count }], None, 0).unwrap();
        assert_eq!(layout.table_bytes(), (3 << 40) / 512);
    }

    #[test]
    fn what_is_no_layout_is_refused() {
        let extent = Extent { region: 0, first: 0, count: 2 };
        let outside = Err(LayoutError::Outside { index: 0 });
        assert_eq!(Layout::new(vec![4096], vec![extent], None, 0), outside);
        assert_eq!(Layout::new(vec![], vec![extent], None, 0), outside);
        assert!(matches!(Layout::new(vec![4096], vec![], None, 0), Err(LayoutError::Size { .. })));
        assert!(matches!(
            Layout::new(vec![8192], vec![extent], Some(9), 0),
            Err(LayoutError::Payload { .. })
        ));
        let twice = [extent, Extent { region: 0, first: 1, count: 1 }].to_vec();
        assert_eq!(Layout::new(vec![8192], twice, None, 0), Err(LayoutError::Overlap { index: 1 }));
        let bent = Layout::new(vec![8192], vec![extent], None, 0).unwrap(); // without the table's checksums
        postcard::from_bytes::<Layout>(&postcard::to_stdvec(&bent).unwrap()).unwrap_err();
    }
}
