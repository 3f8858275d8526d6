//! The table of page versions: what the guest believes each page to be at.
//!
//! It lies in the guest's memory like the pages themselves, so a migration can damage it as well. Each entry therefore
//! carries a check of its page number and version, and every entry can be foretold from the number of passes made over
//! the pages ([`crate::order`] visits each page once per pass). A table page and a data page that are stale *together*
//! agree with each other but not with the pass, which the guest holds in a register.

use crate::pattern::{Damage, mix};

/// Packs a version and its check into one entry.
#[must_use]
#[inline]
pub const fn entry(page: u32, version: u32) -> u64 {
    (check(page, version) as u64) << 32 | version as u64
}

/// The version in `entry`, which belongs to `page` and, by the visiting order, should be at `foretold`.
///
/// # Errors
/// [`Damage::TableBroken`] when the entry's own check fails; [`Damage::TableStale`] when it is sound but of another
/// version than `foretold`, as the page of a table that lost its last writes is.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "an entry is two halves")]
pub const fn version(entry: u64, page: u32, foretold: u32) -> Result<u32, Damage> {
    let (tag, version) = ((entry >> 32) as u32, entry as u32);
    if tag != check(page, version) {
        return Err(Damage::TableBroken);
    }
    if version != foretold { Err(Damage::TableStale) } else { Ok(version) }
}

#[inline]
const fn check(page: u32, version: u32) -> u32 {
    (mix((version as u64) << 32 | page as u64) >> 32) as u32 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_gives_its_version_back() {
        for page in 0..100 {
            for v in 8..50 {
                assert_eq!(version(entry(page, v), page, v), Ok(v));
            }
        }
    }

    #[test]
    fn zeroed_changed_and_misplaced_entries_are_broken() {
        assert_eq!(version(0, 0, 8), Err(Damage::TableBroken));
        assert_eq!(version(entry(3, 9), 4, 9), Err(Damage::TableBroken));
        for bit in 0..64 {
            assert_eq!(version(entry(3, 9) ^ 1 << bit, 3, 9), Err(Damage::TableBroken), "bit {bit}");
        }
    }

    #[test]
    fn an_older_entry_is_stale() {
        assert_eq!(version(entry(3, 9), 3, 10), Err(Damage::TableStale));
    }
}
