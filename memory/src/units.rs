//! Addresses, lengths and page numbers. One newtype per kind, so that mixing them does not compile.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use vmove_types::Backing;

/// A virtual address in the address space of a QEMU process (never in ours).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Hva(pub u64);

/// A number of bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteLen(pub u64);

/// A byte offset from the start of a RAM file.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FileOffset(pub u64);

/// A page number inside one RAM block, counted from the block's start in units of the block's [`PageSize`].
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PageIndex(pub u64);

/// `len` consecutive pages beginning at `start`. May be empty.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PageRun {
    /// First page.
    pub start: PageIndex,
    /// Number of pages.
    pub len: u64,
}

/// Consecutive bytes of a RAM file. May be empty.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ByteRange {
    /// Offset of the first byte.
    pub start: FileOffset,
    /// Number of bytes.
    pub len: ByteLen,
}

/// Granularity of faults and of page state.
///
/// It is a property of the *file system* that holds the RAM file: tmpfs faults in 4 KiB pages even where the
/// file consists of 2 MiB folios, hugetlbfs faults in whole huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PageSize {
    /// 4 KiB.
    Base4K,
    /// 2 MiB.
    Huge2M,
    /// 1 GiB.
    Huge1G,
}

impl Hva {
    /// The address `len` bytes further on.
    #[must_use]
    pub const fn add(self, len: ByteLen) -> Self {
        Self(self.0 + len.0)
    }
}

impl ByteLen {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// `n` MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// As an index or size in this process.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits on every supported target")]
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
}

impl PageSize {
    /// Bytes in one page.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        1 << self.shift()
    }

    /// Binary logarithm of [`Self::bytes`].
    #[must_use]
    pub const fn shift(self) -> u32 {
        match self {
            Self::Base4K => 12,
            Self::Huge2M => 21,
            Self::Huge1G => 30,
        }
    }

    /// How many pages hold `len` bytes, the last one perhaps in part.
    #[must_use]
    pub const fn pages_in(self, len: ByteLen) -> u64 {
        len.0.div_ceil(self.bytes())
    }

    /// The page that holds the byte at `offset`.
    #[must_use]
    pub const fn index_of(self, offset: FileOffset) -> PageIndex {
        PageIndex(offset.0 >> self.shift())
    }

    /// Where a page begins.
    #[must_use]
    pub const fn offset_of(self, page: PageIndex) -> FileOffset {
        FileOffset(page.0 << self.shift())
    }

    /// The bytes of a run of pages.
    #[must_use]
    pub const fn range_of(self, run: PageRun) -> ByteRange {
        ByteRange { start: self.offset_of(run.start), len: ByteLen(run.len << self.shift()) }
    }

    /// The pages touched by a byte range, partly covered ones included.
    #[must_use]
    pub const fn run_of(self, range: ByteRange) -> PageRun {
        if range.len.0 == 0 {
            return PageRun { start: self.index_of(range.start), len: 0 };
        }
        let first = range.start.0 >> self.shift();
        let last = (range.start.0 + range.len.0 - 1) >> self.shift();
        PageRun { start: PageIndex(first), len: last - first + 1 }
    }
}

impl PageRun {
    /// `len` pages from `start`.
    #[must_use]
    pub const fn new(start: PageIndex, len: u64) -> Self {
        Self { start, len }
    }

    /// First page after the run.
    #[must_use]
    pub const fn end(self) -> PageIndex {
        PageIndex(self.start.0 + self.len)
    }

    /// True if it holds no page.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// True if `page` is one of the run's.
    #[must_use]
    pub const fn contains(self, page: PageIndex) -> bool {
        page.0 >= self.start.0 && page.0 < self.start.0 + self.len
    }

    /// The pages, in order.
    pub fn pages(self) -> impl DoubleEndedIterator<Item = PageIndex> + Clone {
        (self.start.0..self.start.0 + self.len).map(PageIndex)
    }
}

impl ByteRange {
    /// `len` bytes from `start`.
    #[must_use]
    pub const fn new(start: FileOffset, len: ByteLen) -> Self {
        Self { start, len }
    }

    /// First byte after the range.
    #[must_use]
    pub const fn end(self) -> FileOffset {
        FileOffset(self.start.0 + self.len.0)
    }

    /// True if it holds no byte.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len.0 == 0
    }

    /// The bytes both have, `None` if there are none.
    #[must_use]
    pub fn intersection(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        (start < end).then(|| Self { start, len: ByteLen(end.0 - start.0) })
    }

    /// As a std range of offsets.
    #[must_use]
    pub const fn as_range(self) -> Range<u64> {
        self.start.0..self.start.0 + self.len.0
    }
}

impl PageSize {
    /// Granularity of faults on memory of this kind.
    #[must_use]
    pub const fn of(backing: Backing) -> Self {
        match backing {
            Backing::Thp => Self::Base4K,
            Backing::Hugetlb2M => Self::Huge2M,
            Backing::Hugetlb1G => Self::Huge1G,
        }
    }

    /// The page that the host allocates for memory of this kind: a RAM file's length should be a multiple of it.
    #[must_use]
    pub const fn allocated_for(backing: Backing) -> Self {
        match backing {
            Backing::Thp | Backing::Hugetlb2M => Self::Huge2M,
            Backing::Hugetlb1G => Self::Huge1G,
        }
    }
}

macro_rules! hex_debug {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    )*};
}
hex_debug!(Hva, ByteLen, FileOffset, PageIndex);

impl fmt::Debug for PageRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageRun({:#x}+{:#x})", self.start.0, self.len)
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ByteRange({:#x}+{:#x})", self.start.0, self.len.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_range_covers_the_pages_it_touches() {
        let page = PageSize::Base4K;
        let run = |start, len| page.run_of(ByteRange::new(FileOffset(start), ByteLen(len)));
        assert_eq!(run(0, 0), PageRun::new(PageIndex(0), 0));
        assert_eq!(run(0, 1), PageRun::new(PageIndex(0), 1));
        assert_eq!(run(4095, 2), PageRun::new(PageIndex(0), 2));
        assert_eq!(run(4096, 4096), PageRun::new(PageIndex(1), 1));
        assert_eq!(page.range_of(run(4095, 2)), ByteRange::new(FileOffset(0), ByteLen(8192)));
    }

    /// Around a boundary of a page, a byte range can begin and end in a few ways only: each is tried, near 0 and near the end of what fits.
    #[test]
    fn each_way_in_which_bytes_lie_in_pages_is_counted_right() {
        for size in [PageSize::Base4K, PageSize::Huge2M, PageSize::Huge1G] {
            let bytes = size.bytes();
            let places = |base: u64| (0..4).flat_map(move |n| (0..4).map(move |d| base + n * bytes + d));
            for base in [0, u64::MAX - u64::MAX % bytes - 8 * bytes] {
                let edges: Vec<u64> = places(base)
                    .chain(places(base + bytes - 3))
                    .filter(|at| *at <= u64::MAX - bytes)
                    .collect();
                for (start, end) in edges.iter().flat_map(|s| edges.iter().map(move |e| (*s, *e))) {
                    let Some(len) = end.checked_sub(start) else { continue };
                    let range = ByteRange::new(FileOffset(start), ByteLen(len));
                    let run = size.run_of(range);
                    // Page by page, by division alone.
                    let touched = (start / bytes..=end / bytes)
                        .filter(|page| len > 0 && page * bytes < end && start < (page + 1) * bytes);
                    assert_eq!(
                        run.pages().map(|page| page.0).collect::<Vec<_>>(),
                        touched.collect::<Vec<_>>()
                    );
                    let covered = size.range_of(run);
                    assert!(
                        run.is_empty() || covered.intersection(range) == Some(range),
                        "{covered:?} {range:?}"
                    );
                    assert!(covered.len.0 < len + 2 * bytes, "{covered:?} {range:?}");
                    assert_eq!(size.run_of(covered), run);
                    for page in run.pages() {
                        assert_eq!(size.index_of(size.offset_of(page)), page);
                        assert!(run.contains(page) && page < run.end());
                    }
                    assert!(!run.contains(run.end()));
                    assert_eq!(
                        size.pages_in(ByteLen(len)),
                        len / bytes + u64::from(!len.is_multiple_of(bytes))
                    );
                }
            }
        }
    }

    #[test]
    fn ranges_intersect() {
        let range = |start, len| ByteRange::new(FileOffset(start), ByteLen(len));
        assert_eq!(range(0, 10).intersection(range(5, 10)), Some(range(5, 5)));
        assert_eq!(range(0, 5).intersection(range(5, 10)), None);
        assert_eq!(range(0, 0).intersection(range(0, 10)), None);
    }
}
