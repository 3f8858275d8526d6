//! Datagrams of UDP multicast.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | check: XXH3-64 of everything after it, seeded with the session's secret |
//! | 8..16 | tag of the session |
//! | 16..24 | number of the datagram in the session, from 0, each one higher |
//! | 24..28 | immediate data |
//! | 28..30 | length of the payload |
//! | 30..32 | version |
//! | 32.. | payload |
//!
//! All little endian.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::header::part;
use crate::multicast::Session;

/// Bytes before the payload.
pub(crate) const DATAGRAM_HEADER: usize = 32;
/// Most bytes of payload: jumbo frames of 9000 bytes less the headers of IP, UDP and ours.
pub(crate) const MAX_PAYLOAD: usize = 9000 - 28 - DATAGRAM_HEADER;
const VERSION: u16 = 1;
/// The check covers what comes after it.
const CHECKED: usize = 8;

/// A datagram that belongs to the session and is as it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Datagram<'a> {
    pub(crate) number: u64,
    pub(crate) immediate: u32,
    pub(crate) payload: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Writes the header of the datagram in `bytes`, whose payload is in place behind it.
    pub(crate) fn seal(session: &Session, number: u64, immediate: u32, bytes: &mut [u8]) {
        let len = u16::try_from(bytes.len() - DATAGRAM_HEADER).expect("at most MAX_PAYLOAD");
        bytes[8..16].copy_from_slice(&session.tag.to_le_bytes());
        bytes[16..24].copy_from_slice(&number.to_le_bytes());
        bytes[24..28].copy_from_slice(&immediate.to_le_bytes());
        bytes[28..30].copy_from_slice(&len.to_le_bytes());
        bytes[30..32].copy_from_slice(&VERSION.to_le_bytes());
        let check = xxh3_64_with_seed(&bytes[CHECKED..], session.seed);
        bytes[..8].copy_from_slice(&check.to_le_bytes());
    }

    /// `None`: it is of another session or version, was cut or changed, or is no such datagram at all.
    pub(crate) fn open(session: &Session, bytes: &'a [u8]) -> Option<Self> {
        if bytes.len() <= DATAGRAM_HEADER || bytes.len() > DATAGRAM_HEADER + MAX_PAYLOAD {
            return None;
        }
        let tag = u64::from_le_bytes(part(bytes, 8));
        let len = usize::from(u16::from_le_bytes(part(bytes, 28)));
        let version = u16::from_le_bytes(part(bytes, 30));
        if tag != session.tag || version != VERSION || len != bytes.len() - DATAGRAM_HEADER {
            return None;
        }
        if u64::from_le_bytes(part(bytes, 0)) != xxh3_64_with_seed(&bytes[CHECKED..], session.seed) {
            return None;
        }
        Some(Self {
            number: u64::from_le_bytes(part(bytes, 16)),
            immediate: u32::from_le_bytes(part(bytes, 24)),
            payload: &bytes[DATAGRAM_HEADER..],
        })
    }
}

/// Numbers of recent datagrams that [`Numbers`] remembers.
const WINDOW: u64 = 1 << 14;

/// Which datagrams of a session have arrived.
#[derive(Debug)]
pub(crate) struct Numbers {
    /// One bit for each of the last `WINDOW` numbers, by number modulo `WINDOW`.
    seen: Vec<u64>,
    first: Option<u64>,
    highest: u64,
    distinct: u64,
}

impl Numbers {
    pub(crate) fn new() -> Self {
        let words = usize::try_from(WINDOW / 64).expect("a small number");
        Self { seen: vec![0; words], first: None, highest: 0, distinct: 0 }
    }

    /// Takes note of a datagram. Whether it is the first with this number, as far as that is remembered: one from before the
    /// window counts as seen.
    pub(crate) fn note(&mut self, number: u64) -> bool {
        let Some(first) = self.first else {
            (self.first, self.highest, self.distinct) = (Some(number), number, 1);
            self.set(number, true);
            return true;
        };
        if number > self.highest {
            // Forget what the window moves over.
            for passed in (self.highest + 1..=number).take(usize::try_from(WINDOW).unwrap_or(usize::MAX)) {
                self.set(passed, false);
            }
            self.highest = number;
        } else if self.highest - number >= WINDOW || self.get(number) {
            return false;
        }
        self.first = Some(first.min(number));
        self.set(number, true);
        self.distinct += 1;
        true
    }

    /// Datagrams between the first and the last that have not arrived.
    pub(crate) fn lost(&self) -> u64 {
        self.first.map_or(0, |first| (self.highest - first).saturating_add(1).saturating_sub(self.distinct))
    }

    fn at(number: u64) -> (usize, u64) {
        let bit = number % WINDOW;
        (usize::try_from(bit / 64).unwrap_or(0), 1 << (bit % 64))
    }

    fn get(&self, number: u64) -> bool {
        let (word, bit) = Self::at(number);
        self.seen[word] & bit != 0
    }

    fn set(&mut self, number: u64, seen: bool) {
        let (word, bit) = Self::at(number);
        if seen {
            self.seen[word] |= bit;
        } else {
            self.seen[word] &= !bit;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    const SESSION: Session = Session { tag: 0x1234_5678_9abc_def0, seed: 42 };

    fn sealed(session: &Session, number: u64, immediate: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; DATAGRAM_HEADER];
        bytes.extend(payload);
        Datagram::seal(session, number, immediate, &mut bytes);
        bytes
    }

    proptest! {
        #[test]
        fn what_was_sealed_opens(number: u64, immediate: u32, payload in prop::collection::vec(any::<u8>(), 1..=MAX_PAYLOAD)) {
            let bytes = sealed(&SESSION, number, immediate, &payload);
            prop_assert_eq!(Datagram::open(&SESSION, &bytes), Some(Datagram { number, immediate, payload: &payload }));
        }

        #[test]
        fn one_bit_that_differs_is_noticed(payload in prop::collection::vec(any::<u8>(), 1..2000), at: prop::sample::Index, bit in 0..8_u32) {
            let mut bytes = sealed(&SESSION, 7, 8, &payload);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(Datagram::open(&SESSION, &bytes), None);
        }

        #[test]
        fn a_cut_or_longer_datagram_is_refused(payload in prop::collection::vec(any::<u8>(), 1..2000), len in 0..4000_usize) {
            let mut bytes = sealed(&SESSION, 7, 8, &payload);
            prop_assume!(len != bytes.len());
            bytes.resize(len, 0);
            prop_assert_eq!(Datagram::open(&SESSION, &bytes), None);
        }

        #[test]
        fn any_bytes_are_taken_calmly(bytes in prop::collection::vec(any::<u8>(), 0..10_000)) {
            prop_assert_eq!(Datagram::open(&SESSION, &bytes), None);
        }

        #[test]
        fn another_session_is_refused(tag: u64, seed: u64) {
            let other = Session { tag, seed };
            prop_assume!(other != SESSION);
            let bytes = sealed(&other, 0, 0, b"payload");
            prop_assert_eq!(Datagram::open(&SESSION, &bytes), None);
        }

        #[test]
        fn numbers_agree_with_a_set(steps in prop::collection::vec((-300_i64..300, any::<bool>()), 1..600), start in 1000_u64..2000) {
            let (mut numbers, mut set) = (Numbers::new(), HashSet::new());
            let mut last = start;
            for (step, again) in steps {
                let number = if again { last } else { last.saturating_add_signed(step) };
                last = number;
                prop_assert_eq!(numbers.note(number), set.insert(number));
            }
            let (first, highest) = (set.iter().min().unwrap(), set.iter().max().unwrap());
            prop_assert_eq!(numbers.lost(), highest - first + 1 - set.len() as u64);
        }
    }

    #[test]
    fn numbers_jump_over_more_than_the_window() {
        let mut numbers = Numbers::new();
        assert!(numbers.note(0) && numbers.note(u64::MAX) && !numbers.note(u64::MAX) && !numbers.note(5));
        assert_eq!(numbers.lost(), u64::MAX - 2);
    }
}
