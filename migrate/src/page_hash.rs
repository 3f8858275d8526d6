//! Hashes of pages, as both sides compute them for `--verify`.

use vmove_memory::{Mapping, PageIndex};

/// Hash of one page as both sides compute it: 1 for a page of zeros (a hole is not looked at, which would fill it), otherwise its
/// XXH3, at least 2. 0 stays free for "not taken yet", the greatest number for a page that the guest has given back.
pub(crate) fn page_hash(mapping: &Mapping, page: PageIndex) -> u64 {
    match (mapping.is_zero(page), mapping.hash(page)) {
        (Ok(true), _) => ZERO_PAGE,
        (_, Ok(hash)) => hash.clamp(2, GIVEN_BACK - 1),
        _ => 0,
    }
}

/// See [`page_hash`].
pub(crate) const ZERO_PAGE: u64 = 1;
/// See [`page_hash`].
pub(crate) const GIVEN_BACK: u64 = u64::MAX;
