//! What has arrived of the guest's memory, for people: looked up in the page tables by whoever tells progress, ten times a second at most.

use vmove_memory::{PageIndex, PageState, PageTable};
use vmove_types::progress::ArrivedBlock;

use super::block::Block;

/// Parts of a block.
const PARTS: u64 = 256;
/// Pages of a part that are looked at: 16,384 of a block, however large it is.
const LOOKED_AT: u64 = 64;

/// All blocks, in order.
pub(super) fn arrived(blocks: &[Block]) -> Vec<ArrivedBlock> {
    blocks
        .iter()
        .map(|block| {
            let name = block.file.path().file_name();
            ArrivedBlock {
                block: name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
                bytes: block.pages() * block.page_size.bytes(),
                parts: parts(&block.table),
            }
        })
        .collect()
}

fn parts(table: &PageTable) -> Vec<u8> {
    let per_part = table.pages().div_ceil(PARTS).max(1);
    let step = per_part.div_ceil(LOOKED_AT);
    let starts = (0..table.pages()).step_by(usize::try_from(per_part).unwrap_or(usize::MAX));
    starts.map(|start| share(table, start, (start + per_part).min(table.pages()), step)).collect()
}

/// Of every `step`th page from `start` up to `end`, in percent.
fn share(table: &PageTable, start: u64, end: u64, step: u64) -> u8 {
    let pages = || (start..end).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    let here = |page: &u64| {
        matches!(table.state(PageIndex(*page)), PageState::Landed | PageState::Zero | PageState::Mapped)
    };
    let percent = 100 * pages().filter(here).count() / pages().count().max(1);
    u8::try_from(percent).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use vmove_memory::PageRun;

    use super::*;

    fn landed(table: &PageTable, start: u64, len: u64) {
        table.mark_landed(PageRun::new(PageIndex(start), len));
    }

    #[test]
    fn small_blocks_are_looked_at_page_by_page() {
        let table = PageTable::anonymous(10).unwrap();
        assert_eq!(parts(&table), [0; 10]);
        landed(&table, 3, 2);
        table.mark_zero(PageRun::new(PageIndex(9), 1));
        assert_eq!(parts(&table), [0, 0, 0, 100, 100, 0, 0, 0, 0, 100]);
        // Its bytes are old.
        table.mark_stale(PageRun::new(PageIndex(3), 1));
        assert_eq!(parts(&table)[3..5], [0, 100]);
    }

    #[test]
    fn large_blocks_have_256_parts_and_the_last_may_be_shorter() {
        // 1 GiB and a page: parts of 1025 pages.
        let table = PageTable::anonymous((1 << 18) + 1).unwrap();
        landed(&table, 0, 1025);
        landed(&table, 1025, 513);
        landed(&table, 255 * 1025, 1 << 18);
        let parts = parts(&table);
        assert_eq!((parts.len(), parts[0], parts[2], parts[255]), (256, 100, 0, 100));
        assert!((48..=52).contains(&parts[1]), "{}", parts[1]);
    }

    #[test]
    fn a_block_without_pages_has_no_parts() {
        assert!(parts(&PageTable::anonymous(0).unwrap()).is_empty());
    }
}
