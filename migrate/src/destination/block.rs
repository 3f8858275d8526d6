//! One RAM block of the guest at the destination: its file, our view of it, and where each page stands.

use std::ops::Range;
use std::sync::Arc;

use vmove_memory::{Mapping, MemoryError, PageSize, PageTable, RamFile};

use super::error::PageError;
use crate::proto::message::PART_BYTES;

/// Pages of one 2 MiB folio: the unit of prefetch around a fault, and of collapse.
pub(super) const FOLIO: u64 = 2 << 20;

/// One RAM block.
#[derive(Debug)]
pub(super) struct Block {
    pub file: RamFile,
    mapping: Arc<Mapping>,
    pub table: Arc<PageTable>,
    pub page_size: PageSize,
    /// The guest was at home here: the file has its memory as of when it left for a visit.
    pub is_home: bool,
}

impl Block {
    /// Maps a RAM file and takes a page table for it.
    pub(super) fn new(file: RamFile, table: Arc<PageTable>) -> Result<Self, MemoryError> {
        Ok(Self { page_size: file.page_size(), mapping: file.map()?, file, table, is_home: false })
    }

    /// The same of a guest that comes home: all that is not named as outdated is here.
    pub(super) fn at_home(file: RamFile, table: Arc<PageTable>) -> Result<Self, MemoryError> {
        table.mark_landed(table.all());
        Ok(Self { is_home: true, ..Self::new(file, table)? })
    }

    /// Number of pages.
    pub(super) fn pages(&self) -> u64 {
        self.file.pages()
    }

    /// Whether its pages take so long to clear that nobody may touch one that is not there.
    pub(super) fn must_be_given(&self) -> bool {
        self.page_size == PageSize::Huge1G
    }

    /// Our view of its bytes.
    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// The same, for who keeps it.
    pub(super) const fn mapping_shared(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// An error of the block's file, as what it means for the session.
    pub(super) fn file_error(&self, source: MemoryError) -> PageError {
        PageError::File { path: self.file.path().to_owned(), source }
    }

    /// The end of the part of the block around a page that lies in one registration: reads do not cross from one to the next.
    pub(super) fn part_end(&self, page: u64) -> u64 {
        let per = (PART_BYTES / self.page_size.bytes()).max(1);
        (page / per + 1) * per
    }

    /// The pages of the 2 MiB around a page.
    pub(super) fn folio(&self, page: u64) -> Range<u64> {
        let per = (FOLIO / self.page_size.bytes()).max(1);
        let start = page / per * per;
        start..(start + per).min(self.pages())
    }
}
