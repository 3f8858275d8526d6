//! The one page in which the guest counts its work for the host to see.
//!
//! The host reads it out of the guest's RAM file, with no help from the guest, QEMU or the daemons. It is an array of
//! 64-bit words in the guest's byte order (little endian); each is written by one thread of the guest, with one
//! store, so each is whole whenever it is read, but two words may be of different moments.

use crate::config::{Config, Rate};
use crate::order::Order;
use crate::pattern::{Damage, PAGE_BYTES, WORDS, mix};

/// Words of the magic at the start of the page.
pub const MAGIC_WORDS: usize = 8;
/// Version of this layout.
pub const LAYOUT: u64 = 1;

/// Places of the words. Written once, before the magic:
#[allow(missing_docs)]
pub mod place {
    pub const LAYOUT: usize = 8;
    pub const CONFIG_CHECK: usize = 9;
    pub const WORKING_PAGES: usize = 10;
    pub const COLD_PAGES: usize = 11;
    pub const RATE: usize = 12;
    pub const VERIFY: usize = 13;
    pub const THREADS: usize = 14;
    pub const ORDER: usize = 15;
    pub const PERIOD_US: usize = 16;
    pub const BOOT: usize = 17;
    pub const CONFIG_END: usize = 18;
    // Written as it goes.
    pub const PHASE: usize = 24;
    pub const UPTIME_MS: usize = 25;
    pub const FILLED: usize = 26;
    // The first error found, in words of `super::FirstBad`; the kind is written last.
    pub const BAD_KIND: usize = 32;
    pub const BAD_PAGE: usize = 33;
    pub const BAD_INDEX: usize = 34;
    pub const BAD_EXPECTED: usize = 35;
    pub const BAD_FOUND: usize = 36;
    pub const BAD_VERSION: usize = 37;
    pub const BAD_SEEMS: usize = 38;
    pub const BAD_THREAD: usize = 39;
    pub const BAD_UPTIME_MS: usize = 40;
    // Per thread, `SLOT` words each.
    pub const THREADS_START: usize = 64;
    pub const SLOT: usize = 8;
    pub const SLOT_WORK: usize = 0;
    pub const SLOT_VERIFIED: usize = 1;
    pub const SLOT_PASSES: usize = 2;
    pub const SLOT_ERRORS: usize = 3;
    pub const SLOT_BEATS: usize = 4;
    pub const SLOT_LOST_NS: usize = 5;
}

/// Word `index` of the magic. Computed, so that the constant itself is in no file and no other page of the guest.
#[must_use]
#[inline(never)]
pub fn magic_word(index: usize) -> u64 {
    mix(std::hint::black_box(0x766d_6f76_6562_6561) ^ (index as u64) << 56)
}

/// Check over the words that never change, so that half a beacon is not taken for one.
#[must_use]
pub fn config_check(word: impl Fn(usize) -> u64) -> u64 {
    (place::WORKING_PAGES..place::CONFIG_END).fold(LAYOUT, |sum, i| mix(sum ^ word(i)))
}

/// How far the guest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Phase {
    /// Writing the first version of all pages.
    Filling = 1,
    /// At work.
    Running = 2,
}

/// The first bad page that the guest met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstBad {
    /// What was wrong with it.
    pub damage: Damage,
    /// Number of the page; working set first, then cold pages.
    pub page: u64,
    /// First wrong word in it.
    pub index: u64,
    /// What that word should have been.
    pub expected: u64,
    /// What it was.
    pub found: u64,
    /// Version that the page should have had.
    pub version: u64,
    /// Version that it seems to have; 0 when unknown.
    pub seems: u64,
    /// Thread that met it.
    pub thread: u64,
    /// Guest uptime then, in milliseconds.
    pub uptime_ms: u64,
}

/// What the host read in the beacon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beacon {
    /// A number that differs at each boot.
    pub boot: u64,
    /// What the guest was told to do.
    pub config: Config,
    /// How far it is.
    pub phase: Phase,
    /// Guest's CLOCK_MONOTONIC, in milliseconds; stands still while the machine is stopped.
    pub uptime_ms: u64,
    /// Pages filled so far, while filling.
    pub filled: u64,
    /// Pages rewritten, each after its check.
    pub work: u64,
    /// Pages checked in full in rotation.
    pub verified: u64,
    /// Passes over the working set that all threads have completed.
    pub passes: u64,
    /// Visits that found something wrong.
    pub errors: u64,
    /// Periods of work begun, by the thread that has begun the fewest.
    pub beats: u64,
    /// Nanoseconds that threads gave up because they were late by a period or more, by the guest's clock.
    pub lost_ns: u64,
    /// The first error.
    pub first_bad: Option<FirstBad>,
}

impl Beacon {
    /// Whether `page` begins with the magic. Cheap: looks at one word unless that fits.
    #[must_use]
    pub fn is_at(page: &[u8]) -> bool {
        page.len() >= PAGE_BYTES && (0..MAGIC_WORDS).all(|i| word(page, i) == magic_word(i))
    }

    /// Decodes a page, or `None` when it is no whole beacon of this layout.
    #[must_use]
    pub fn decode(page: &[u8]) -> Option<Self> {
        let at = |i| word(page, i);
        if !Self::is_at(page) || at(place::LAYOUT) != LAYOUT || at(place::CONFIG_CHECK) != config_check(at) {
            return None;
        }
        let small = |i| u32::try_from(at(i)).ok();
        let threads = small(place::THREADS)?;
        let slots = |field: usize| {
            (0..threads as usize).map(move |t| at(place::THREADS_START + t * place::SLOT + field))
        };
        Some(Self {
            boot: at(place::BOOT),
            config: Config {
                working_set_mib: small(place::WORKING_PAGES)? >> 8,
                cold_mib: small(place::COLD_PAGES)? >> 8,
                rate: if at(place::RATE) == u64::MAX {
                    Rate::Max
                } else {
                    Rate::PagesPerSecond(small(place::RATE)?)
                },
                verify: small(place::VERIFY)?,
                threads,
                order: if at(place::ORDER) == 0 { Order::Random } else { Order::Sequential },
                period_us: small(place::PERIOD_US)?,
                // The beacon tells of memory only.
                disk_mib: 0,
                fork: 0,
                hold_s: 0,
                nest: 0,
                misbehave: false,
                address: None,
            },
            phase: if at(place::PHASE) == Phase::Running as u64 { Phase::Running } else { Phase::Filling },
            uptime_ms: at(place::UPTIME_MS),
            filled: at(place::FILLED),
            work: slots(place::SLOT_WORK).sum(),
            verified: slots(place::SLOT_VERIFIED).sum(),
            passes: slots(place::SLOT_PASSES).min().unwrap_or(0),
            errors: slots(place::SLOT_ERRORS).sum(),
            beats: slots(place::SLOT_BEATS).min().unwrap_or(0),
            lost_ns: slots(place::SLOT_LOST_NS).sum(),
            first_bad: Damage::from_number(at(place::BAD_KIND)).map(|damage| FirstBad {
                damage,
                page: at(place::BAD_PAGE),
                index: at(place::BAD_INDEX),
                expected: at(place::BAD_EXPECTED),
                found: at(place::BAD_FOUND),
                version: at(place::BAD_VERSION),
                seems: at(place::BAD_SEEMS),
                thread: at(place::BAD_THREAD),
                uptime_ms: at(place::BAD_UPTIME_MS),
            }),
        })
    }

    /// The guest's own verdict in a line, for reports and failed tests.
    #[must_use]
    pub fn verdict(&self) -> String {
        let passes =
            format!("{} pages rewritten and {} verified in {} passes", self.work, self.verified, self.passes);
        match &self.first_bad {
            None if self.errors == 0 => {
                format!("guest memory is intact: {passes}, no page stale, torn or zeroed")
            }
            None => format!("guest memory is DAMAGED: {} errors in {passes}", self.errors),
            Some(bad) => format!(
                "guest memory is DAMAGED: {} errors in {passes}; the first: page {} was {:?} at word {} (version {} \
                 expected, {} seen; {:#018x} expected, {:#018x} found) at {} ms of uptime",
                self.errors,
                bad.page,
                bad.damage,
                bad.index,
                bad.version,
                bad.seems,
                bad.expected,
                bad.found,
                bad.uptime_ms
            ),
        }
    }
}

/// The words that never change, at their places, for a guest with this task.
#[must_use]
pub fn fixed_words(config: &Config, boot: u64) -> Vec<(usize, u64)> {
    let rate = match config.rate {
        Rate::Max => u64::MAX,
        Rate::PagesPerSecond(rate) => u64::from(rate),
    };
    let order = match config.order {
        Order::Random => 0,
        Order::Sequential => 1,
    };
    let mut words = vec![
        (place::LAYOUT, LAYOUT),
        (place::WORKING_PAGES, u64::from(config.working_pages())),
        (place::COLD_PAGES, u64::from(config.cold_pages())),
        (place::RATE, rate),
        (place::VERIFY, u64::from(config.verify)),
        (place::THREADS, u64::from(config.threads)),
        (place::ORDER, order),
        (place::PERIOD_US, u64::from(config.period_us)),
        (place::BOOT, boot),
    ];
    let check = config_check(|i| words.iter().find(|(at, _)| *at == i).map_or(0, |(_, word)| *word));
    words.push((place::CONFIG_CHECK, check));
    words.extend((0..MAGIC_WORDS).map(|i| (i, magic_word(i))));
    words
}

fn word(page: &[u8], index: usize) -> u64 {
    debug_assert!(index < WORDS);
    page.get(index * 8..index * 8 + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(words: &[(usize, u64)]) -> Vec<u8> {
        let mut page = vec![0; PAGE_BYTES];
        for (at, word) in words {
            page[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        page
    }

    #[test]
    fn a_beacon_is_decoded() {
        let config = Config { threads: 2, working_set_mib: 512, ..Config::default() };
        let mut words = fixed_words(&config, 99);
        words.push((place::PHASE, Phase::Running as u64));
        for thread in 0..2 {
            let slot = place::THREADS_START + thread * place::SLOT;
            words.push((slot + place::SLOT_WORK, 10));
            words.push((slot + place::SLOT_BEATS, 5 + thread as u64));
        }
        let beacon = Beacon::decode(&page(&words)).expect("a whole beacon");
        assert_eq!((beacon.boot, &beacon.config, beacon.phase), (99, &config, Phase::Running));
        assert_eq!((beacon.work, beacon.beats, beacon.errors), (20, 5, 0));
        assert!(beacon.verdict().contains("intact"));
    }

    #[test]
    fn half_a_beacon_is_none() {
        let words = fixed_words(&Config::default(), 99);
        assert!(Beacon::decode(&page(&words)).is_some());
        for missing in 0..words.len() {
            let mut words = words.clone();
            words.remove(missing);
            // A word that is zero anyway cannot be missed.
            if fixed_words(&Config::default(), 99)[missing].1 != 0 {
                assert!(Beacon::decode(&page(&words)).is_none(), "without word {missing}");
            }
        }
        assert!(Beacon::decode(&[]).is_none());
        assert!(Beacon::decode(&[0; PAGE_BYTES]).is_none());
    }

    #[test]
    fn the_first_error_is_told() {
        let mut words = fixed_words(&Config::default(), 1);
        words.extend([(place::BAD_KIND, Damage::Stale as u64), (place::BAD_PAGE, 1234)]);
        words.push((place::THREADS_START + place::SLOT_ERRORS, 1));
        let verdict = Beacon::decode(&page(&words)).expect("a whole beacon").verdict();
        assert!(
            verdict.contains("DAMAGED") && verdict.contains("1234") && verdict.contains("Stale"),
            "{verdict}"
        );
    }
}
