//! What a page must hold, and how a visit checks and rewrites it.
//!
//! A page has a version, which goes up by one at each rewrite. A rewrite does not write all 512 words: that would cost
//! an emulated guest eight times as much, and dirties the page no more. Rewrite number `v` writes
//!
//! - one word of each of the page's 64 cache lines, word `v % 8` of the line, and
//! - the page's first and last word.
//!
//! So a word holds the value of the last version that wrote it ([`written_at`]), and eight rewrites renew the page.
//!
//! A visit checks, before it writes,
//!
//! 1. every word that the current version wrote, and
//! 2. every word that it is about to overwrite.
//!
//! From this follows what is caught, and when:
//!
//! - **At the next visit**: a page of any other version (stale), of another page number, or zeroed; a page torn at any
//!   one place (its beginning from one version and its end from another: the first and last word disagree); any damage
//!   that covers a whole cache line.
//! - **Within eight visits**: damage to any single word. Rule 2 means that no word is ever overwritten unchecked, so
//!   nothing can be lost in between.
//!
//! [`check_all`] looks at all 512 words; the guest runs it over all its pages in rotation, and on every page on which a
//! visit found something wrong, to say what.

/// Size of a page in bytes.
pub const PAGE_BYTES: usize = 4096;
/// 8-byte words in a page.
pub const WORDS: usize = PAGE_BYTES / 8;
/// Words in a cache line; also the number of rewrites after which every word of a page was written anew.
pub const LINE_WORDS: usize = LINE as usize;
/// The version of a page that was filled and not yet rewritten. Not smaller than [`LINE_WORDS`], so that every word of
/// a filled page has a version above zero.
pub const FILLED: u32 = 8;

const LINE: u32 = 8;
const LAST: usize = WORDS - 1;
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const LINE_STEP: u64 = STEP.wrapping_mul(LINE_WORDS as u64);

/// The words of one page, wherever they are: an array in a test, mapped memory in the guest.
pub trait Words {
    /// Word `index`, which is below [`WORDS`].
    fn get(&self, index: usize) -> u64;
    /// Writes word `index`, which is below [`WORDS`].
    fn set(&mut self, index: usize, value: u64);
}

impl Words for [u64; WORDS] {
    fn get(&self, index: usize) -> u64 {
        self[index]
    }

    fn set(&mut self, index: usize, value: u64) {
        self[index] = value;
    }
}

/// A word that is not what it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadWord {
    /// Place in the page, 0..[`WORDS`].
    pub index: usize,
    /// What the page's number and version call for.
    pub expected: u64,
    /// What was there.
    pub found: u64,
}

/// Scrambles 64 bits; a bijection (the finalizer of splitmix64).
#[must_use]
#[inline]
pub const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The value that all words written by `version` of `page` derive from. Never gives the value of a zeroed word by
/// design of the mix alone: two inputs never give the same base, so at most one (page, version) has a base of zero.
#[must_use]
#[inline]
const fn base(page: u32, version: u32) -> u64 {
    mix(((page as u64) << 32 | version as u64) ^ STEP)
}

#[inline]
const fn value(base: u64, index: usize) -> u64 {
    base.wrapping_add(STEP.wrapping_mul(index as u64 + 1))
}

/// The version that last wrote word `index` of a page that is now at `version` (at least [`FILLED`]).
#[must_use]
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "below LINE_WORDS")]
pub const fn written_at(index: usize, version: u32) -> u32 {
    if index == 0 || index == LAST {
        return version;
    }
    let place = (index % LINE_WORDS) as u32;
    version - (version.wrapping_sub(place) % LINE)
}

/// What word `index` of `page` must hold when the page is at `version`.
#[must_use]
pub const fn expected(page: u32, version: u32, index: usize) -> u64 {
    value(base(page, written_at(index, version)), index)
}

/// Writes all words of `page` as they must be at `version`.
pub fn fill(words: &mut impl Words, page: u32, version: u32) {
    let bases = bases(page, version);
    for index in 0..WORDS {
        words.set(index, expected_from(&bases, version, index));
    }
}

/// Checks the page as the [module](self) says and, if nothing is wrong, rewrites it to `version + 1`.
///
/// # Errors
/// The first bad word; the page is then left as it was found, as far as the words before the bad one allow.
#[inline]
pub fn visit(words: &mut impl Words, page: u32, version: u32) -> Result<(), BadWord> {
    let next = version + 1;
    let now = base(page, version);
    let new = base(page, next);
    let old = base(page, next - LINE);

    // The edges first: they are written by every version, and they show a page torn anywhere.
    expect(words, 0, value(now, 0))?;
    expect(words, LAST, value(now, LAST))?;

    let (mut read, mut write) = (version as usize % LINE_WORDS, next as usize % LINE_WORDS);
    let mut read_value = value(now, read);
    let mut old_value = value(old, write);
    let mut new_value = value(new, write);
    while write < WORDS {
        expect(words, read, read_value)?;
        if write != 0 && write != LAST {
            expect(words, write, old_value)?;
        }
        words.set(write, new_value);
        read += LINE_WORDS;
        write += LINE_WORDS;
        read_value = read_value.wrapping_add(LINE_STEP);
        old_value = old_value.wrapping_add(LINE_STEP);
        new_value = new_value.wrapping_add(LINE_STEP);
    }
    words.set(0, value(new, 0));
    words.set(LAST, value(new, LAST));
    Ok(())
}

/// Checks all words of a page.
///
/// # Errors
/// The first bad word.
pub fn check_all(words: &impl Words, page: u32, version: u32) -> Result<(), BadWord> {
    let bases = bases(page, version);
    for index in 0..WORDS {
        expect(words, index, expected_from(&bases, version, index))?;
    }
    Ok(())
}

#[inline]
fn expect(words: &impl Words, index: usize, expected: u64) -> Result<(), BadWord> {
    let found = words.get(index);
    if found == expected { Ok(()) } else { Err(BadWord { index, expected, found }) }
}

/// The bases of the last [`LINE_WORDS`] versions, the base of version `v` at `v % LINE_WORDS`.
fn bases(page: u32, version: u32) -> [u64; LINE_WORDS] {
    let mut bases = [0; LINE_WORDS];
    for back in 0..LINE {
        let v = version - back;
        bases[v as usize % LINE_WORDS] = base(page, v);
    }
    bases
}

#[inline]
fn expected_from(bases: &[u64; LINE_WORDS], version: u32, index: usize) -> u64 {
    let writer = if index == 0 || index == LAST { version as usize } else { index };
    value(bases[writer % LINE_WORDS], index)
}

/// What is wrong with a page, found out after a check failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Damage {
    /// Every word is zero: the page was never transferred, or was dropped.
    Zeroed = 1,
    /// The whole page is that of an older version: bytes written after it was read were lost.
    Stale = 2,
    /// Words of several versions, or zeroes and a version, side by side.
    Torn = 3,
    /// The whole page is newer than the table says: the table, or the guest's registers, are stale.
    Newer = 4,
    /// None of these: foreign bytes.
    Foreign = 5,
    /// An entry of the version table whose own check fails.
    TableBroken = 6,
    /// An entry of the version table that is sound but not of this pass: a stale page of the table.
    TableStale = 7,
    /// The beacon does not hold what its writer wrote.
    BeaconStale = 8,
    /// Wrong at the first look, right at the second: the guest saw the page before its bytes had arrived.
    Transient = 9,
}

impl Damage {
    /// The damage with this number in the beacon.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        use Damage::{BeaconStale, Foreign, Newer, Stale, TableBroken, TableStale, Torn, Transient, Zeroed};
        [Zeroed, Stale, Torn, Newer, Foreign, TableBroken, TableStale, BeaconStale, Transient]
            .into_iter()
            .find(|d| *d as u64 == number)
    }
}

/// How far back [`diagnose`] looks for the version of a stale page. A migration takes seconds, a pass over the working
/// set one or more, so older leftovers are not to be expected.
const LOOK_BACK: u32 = 64;

/// Says what is wrong with a page of which a check failed at `version`, and the version it seems to be of.
#[must_use]
pub fn diagnose(words: &impl Words, page: u32, version: u32) -> (Damage, Option<u32>) {
    if (0..WORDS).all(|i| words.get(i) == 0) {
        return (Damage::Zeroed, None);
    }
    if check_all(words, page, version).is_ok() {
        return (Damage::Transient, Some(version));
    }
    for ahead in 1..=2 {
        if check_all(words, page, version + ahead).is_ok() {
            return (Damage::Newer, Some(version + ahead));
        }
    }
    let oldest = version.saturating_sub(LOOK_BACK).max(FILLED);
    if let Some(stale) = (oldest..version).rev().find(|v| check_all(words, page, *v).is_ok()) {
        return (Damage::Stale, Some(stale));
    }
    // Torn: every word is zero or the right one of some recent version.
    let known = |i: usize| {
        let found = words.get(i);
        found == 0 || (oldest..=version + 1).rev().any(|v| expected(page, v, i) == found)
    };
    if (0..WORDS).all(known) { (Damage::Torn, None) } else { (Damage::Foreign, None) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u32 = 77;

    /// A page at `version`, reached as the guest reaches it: filled, then rewritten.
    fn page_at(version: u32) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        fill(&mut words, PAGE, FILLED);
        for v in FILLED..version {
            visit(&mut words, PAGE, v).expect("an undamaged page");
        }
        words
    }

    fn caught(mut words: [u64; WORDS], version: u32) -> bool {
        visit(&mut words, PAGE, version).is_err()
    }

    #[test]
    fn rewriting_gives_the_same_page_as_filling() {
        for version in FILLED..FILLED + 40 {
            let mut filled = [0; WORDS];
            fill(&mut filled, PAGE, version);
            assert_eq!(page_at(version), filled, "version {version}");
            check_all(&filled, PAGE, version).expect("an undamaged page");
        }
    }

    #[test]
    fn each_rewrite_changes_every_line_and_both_edges() {
        for version in FILLED..FILLED + 16 {
            let (before, after) = (page_at(version), page_at(version + 1));
            for line in 0..WORDS / LINE_WORDS {
                let line = line * LINE_WORDS..(line + 1) * LINE_WORDS;
                assert_ne!(before[line.clone()], after[line]);
            }
            assert_ne!(before[0], after[0]);
            assert_ne!(before[LAST], after[LAST]);
        }
    }

    #[test]
    fn a_zeroed_page_is_caught_at_the_next_visit() {
        for version in FILLED..FILLED + 16 {
            assert!(caught([0; WORDS], version));
            assert_eq!(diagnose(&[0; WORDS], PAGE, version), (Damage::Zeroed, None));
        }
    }

    #[test]
    fn a_stale_page_is_caught_at_the_next_visit() {
        for version in FILLED + 1..FILLED + 40 {
            for stale in FILLED..version {
                assert!(caught(page_at(stale), version), "{stale} taken for {version}");
                assert_eq!(diagnose(&page_at(stale), PAGE, version), (Damage::Stale, Some(stale)));
            }
        }
    }

    #[test]
    fn a_page_torn_at_any_place_is_caught_at_the_next_visit() {
        for version in FILLED + 1..FILLED + 12 {
            let new = page_at(version);
            let mut others: Vec<_> = (FILLED..version).map(page_at).collect();
            others.push([0; WORDS]);
            for old in others {
                for tear in 1..WORDS {
                    let (mut head_old, mut tail_old) = (new, new);
                    head_old[..tear].copy_from_slice(&old[..tear]);
                    tail_old[tear..].copy_from_slice(&old[tear..]);
                    assert!(caught(head_old, version), "the first {tear} words were old");
                    assert!(caught(tail_old, version), "the words from {tear} on were old");
                    assert_ne!(diagnose(&head_old, PAGE, version).0, Damage::Foreign);
                    assert_ne!(diagnose(&tail_old, PAGE, version).0, Damage::Foreign);
                }
            }
        }
    }

    #[test]
    fn a_stale_or_zeroed_cache_line_is_caught_at_the_next_visit() {
        for version in FILLED + 1..FILLED + 20 {
            for line in 0..WORDS / LINE_WORDS {
                let line = line * LINE_WORDS..(line + 1) * LINE_WORDS;
                let mut stale = page_at(version);
                stale[line.clone()].copy_from_slice(&page_at(version - 1)[line.clone()]);
                assert!(caught(stale, version));
                let mut zeroed = page_at(version);
                zeroed[line].fill(0);
                assert!(caught(zeroed, version));
                assert_eq!(diagnose(&zeroed, PAGE, version).0, Damage::Torn);
            }
        }
    }

    #[test]
    fn any_damaged_word_is_caught_within_eight_visits_and_at_once_by_a_full_check() {
        for version in FILLED..FILLED + 9 {
            for index in 0..WORDS {
                let mut words = page_at(version);
                words[index] ^= 1 << (index % 64);
                let bad = check_all(&words, PAGE, version).expect_err("a damaged word");
                assert_eq!(bad.index, index);
                let caught = (0..8).any(|later| visit(&mut words, PAGE, version + later).is_err());
                assert!(caught, "word {index} at version {version}");
            }
        }
    }

    #[test]
    fn pages_do_not_pass_for_each_other() {
        for other in (0..200).filter(|p| *p != PAGE) {
            let mut words = [0; WORDS];
            fill(&mut words, other, FILLED);
            assert!(caught(words, FILLED));
            assert_eq!(diagnose(&words, PAGE, FILLED).0, Damage::Foreign);
        }
    }

    #[test]
    fn a_page_newer_than_its_version_is_told_apart() {
        assert!(caught(page_at(FILLED + 5), FILLED + 4));
        assert_eq!(diagnose(&page_at(FILLED + 5), PAGE, FILLED + 4), (Damage::Newer, Some(FILLED + 5)));
    }

    #[test]
    fn damage_numbers_are_stable() {
        for number in 1..=9 {
            assert_eq!(Damage::from_number(number).map(|d| d as u64), Some(number));
        }
        assert_eq!(Damage::from_number(0), None);
    }
}
