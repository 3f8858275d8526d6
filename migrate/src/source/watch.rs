//! A guest is watched without being touched: some of its pages are hashed, and looked at again. Nothing is attached to QEMU, so this may be done at any
//! time, also while nothing is to move.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use vmove_memory::{MemoryError, PageIndex};

use super::error::SourceError;
use super::memory::SourceMemory;
use crate::page_hash::{ZERO_PAGE, page_hash};
use crate::promise::Writes;
use vmove_node::blocking::spawn_blocking;

/// From the first look to the second; the third comes after three times that.
const LOOK: Duration = Duration::from_millis(100);
/// Memory that is hashed in a look: some 15 ms of one processor. Of larger pages a few are.
const LOOKED_AT: u64 = 64 << 20;
const FEWEST_PAGES: u64 = 4;

/// A page of a block.
type Page = (usize, PageIndex);

/// What was seen of a guest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watched {
    /// Bytes of pages that hold something else than zeros.
    pub content_bytes: f64,
    /// What it writes.
    pub writes: Writes,
}

/// Watches a guest for some 0.3 s; one that does not run is looked at once.
pub(super) async fn watch(memory: &Arc<SourceMemory>, runs: bool) -> Result<Watched, SourceError> {
    let looks = SourceError::memory("look at what the guest holds");
    let chosen = Arc::clone(memory);
    let (pages, total) = spawn_blocking(move || choose(&chosen)).await?.map_err(looks)?;
    let pages = Arc::new(pages);
    let begun = Instant::now();
    let first = look(memory, &pages).await?;
    let full = first.iter().filter(|hash| **hash != ZERO_PAGE).count();
    let share = |of: usize| of as f64 / first.len().max(1) as f64 * (total * memory.page_bytes()) as f64;
    let content_bytes = share(full);
    if !runs || first.is_empty() {
        return Ok(Watched { content_bytes, writes: Writes::NONE });
    }
    // Looks go over the pages in the same order, so each page has as long between two of them.
    let interval = LOOK.max(begun.elapsed());
    sleep_until(begun + interval).await;
    let second = look(memory, &pages).await?;
    sleep_until(begun + 3 * interval).await;
    let third = look(memory, &pages).await?;
    let once = changed(&first, &second, &second);
    let thrice = changed(&first, &second, &third);
    let writes = Writes::seen(interval, share(once), share(thrice), content_bytes);
    Ok(Watched { content_bytes: content_bytes.max(writes.reach), writes })
}

/// How many pages are not as they were, in one look or another.
fn changed(first: &[u64], second: &[u64], third: &[u64]) -> usize {
    let looks = first.iter().zip(second.iter().zip(third));
    looks.filter(|(first, (second, third))| first != second || first != third).count()
}

/// Some of the pages that the files have memory for, evenly spread, and how many there are of these in all.
fn choose(memory: &SourceMemory) -> Result<(Vec<Page>, u64), MemoryError> {
    let content = memory.content()?;
    let total: u64 = content.iter().map(crate::pending::PageSet::count).sum();
    let wanted = (LOOKED_AT / memory.page_bytes()).max(FEWEST_PAGES).min(total).max(1);
    let mut dice = 0;
    // One of each stretch, at random: a guest that writes every eighth page would be seen to write all or none otherwise.
    let mut next = 0;
    let (mut passed, mut chosen) = (0, Vec::new());
    for (block, set) in content.iter().enumerate() {
        for page in set.runs().flatten() {
            if passed == next {
                chosen.push((block, PageIndex(page)));
                let stretch = chosen.len() as u64;
                let (from, to) = (stretch * total / wanted, (stretch + 1) * total / wanted);
                next = from + random(&mut dice) % (to - from).max(1);
            }
            passed += 1;
        }
    }
    Ok((chosen, total))
}

/// A step of SplitMix64.
const fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

async fn look(memory: &Arc<SourceMemory>, pages: &Arc<Vec<Page>>) -> Result<Vec<u64>, SourceError> {
    let (memory, pages) = (Arc::clone(memory), Arc::clone(pages));
    let hashes = move || {
        let hash = |(block, page): &Page| page_hash(&memory.blocks[*block].mapping, *page);
        pages.iter().map(hash).collect()
    };
    Ok(spawn_blocking(hashes).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_was_changed_and_changed_back_was_written() {
        assert_eq!(changed(&[5, 5, 5], &[5, 6, 6], &[5, 5, 7]), 2);
        assert_eq!(changed(&[5, 5, 5], &[5, 6, 6], &[5, 6, 6]), 2);
    }
}
