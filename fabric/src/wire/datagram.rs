//! Datagrams of UDP multicast.
//!
//! A session with a key seals its datagrams: the payload is encrypted, and everything is authenticated (AES-256-GCM, NIST SP 800-38D).
//! A session without one only checks them.
//!
//! | bytes | checked | sealed |
//! |---|---|---|
//! | 0..8 | check: XXH3-64 of everything after it, seeded with the session's secret | nonce, never used twice |
//! | 8..16 | tag of the session | the same |
//! | 16..24 | number of the datagram in the session, from 0, each one higher | the same |
//! | 24..28 | immediate data | the same |
//! | 28..30 | length of the payload | the same |
//! | 30..32 | version, 1 | version, 2 |
//! | 32.. | payload | encrypted payload, then 16 bytes that authenticate header and payload |
//!
//! All little endian. The number tells what was sent before (a replay) and what is lost; who reads the network learns it, the
//! immediate and the length of a sealed datagram, but nothing of its payload.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::header::part;
use crate::multicast::Session;

/// Bytes before the payload.
pub(crate) const DATAGRAM_HEADER: usize = 32;
/// Bytes that authenticate a sealed datagram, behind its payload.
const AUTHENTICATION: usize = 16;
/// Most bytes after the header: jumbo frames of 9000 bytes less the headers of IP, UDP and ours.
pub(crate) const MAX_BODY: usize = 9000 - 28 - DATAGRAM_HEADER;
const CHECKED: u16 = 1;
const SEALED: u16 = 2;
/// What the check or the nonce stands in; everything after it is checked, or authenticated.
const FRONT: usize = 8;

/// A datagram that belongs to the session and is as it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Datagram<'a> {
    pub(crate) number: u64,
    pub(crate) immediate: u32,
    pub(crate) payload: &'a [u8],
}

/// How the datagrams of a session are closed and opened.
#[derive(Debug)]
pub(crate) struct Envelope {
    session: Session,
    key: Option<LessSafeKey>,
    /// Nonce of the next datagram that is sealed. A datagram that is sealed again, since the socket had no room, gets another one.
    nonce: u64,
}

impl Envelope {
    pub(crate) fn new(session: Session) -> Self {
        let key = session.key.map(|key| {
            LessSafeKey::new(
                UnboundKey::new(&AES_256_GCM, &key.0).expect("the key has the length of the algorithm's"),
            )
        });
        Self { session, key, nonce: 0 }
    }

    /// Bytes behind the payload.
    pub(crate) const fn tail(&self) -> usize {
        if self.key.is_some() { AUTHENTICATION } else { 0 }
    }

    const fn version(&self) -> u16 {
        if self.key.is_some() { SEALED } else { CHECKED }
    }

    /// Closes the datagram in `bytes`, whose payload is in place between the header and [`tail`](Self::tail).
    pub(crate) fn close(&mut self, number: u64, immediate: u32, bytes: &mut [u8]) {
        let (head, body) = bytes.split_at_mut(DATAGRAM_HEADER);
        let len = u16::try_from(body.len() - self.tail()).expect("at most MAX_BODY");
        head[8..16].copy_from_slice(&self.session.tag.to_le_bytes());
        head[16..24].copy_from_slice(&number.to_le_bytes());
        head[24..28].copy_from_slice(&immediate.to_le_bytes());
        head[28..30].copy_from_slice(&len.to_le_bytes());
        head[30..32].copy_from_slice(&self.version().to_le_bytes());
        let Some(key) = &self.key else {
            let check = xxh3_64_with_seed(&bytes[FRONT..], self.session.seed);
            bytes[..FRONT].copy_from_slice(&check.to_le_bytes());
            return;
        };
        head[..FRONT].copy_from_slice(&self.nonce.to_le_bytes());
        let nonce = nonce(self.nonce);
        // Would take thousands of years; a nonce that is used twice would give the key's secrets away.
        self.nonce = self.nonce.checked_add(1).expect("fewer than 2^64 datagrams in a session");
        let (payload, authentication) = body.split_at_mut(usize::from(len));
        let sealed = key.seal_in_place_separate_tag(nonce, Aad::from(&*head), payload);
        authentication.copy_from_slice(sealed.expect("shorter than what the algorithm takes").as_ref());
    }

    /// Opens the datagram in `bytes`, in place. `None`: it is of another session or version, was cut or changed, or is no such datagram
    /// at all. What `bytes` holds is then of no use.
    pub(crate) fn open<'a>(&self, bytes: &'a mut [u8]) -> Option<Datagram<'a>> {
        let tail = self.tail();
        if bytes.len() <= DATAGRAM_HEADER + tail || bytes.len() > DATAGRAM_HEADER + MAX_BODY {
            return None;
        }
        let tag = u64::from_le_bytes(part(bytes, 8));
        let len = usize::from(u16::from_le_bytes(part(bytes, 28)));
        let version = u16::from_le_bytes(part(bytes, 30));
        if tag != self.session.tag || version != self.version() || len != bytes.len() - DATAGRAM_HEADER - tail
        {
            return None;
        }
        let (number, immediate) = (u64::from_le_bytes(part(bytes, 16)), u32::from_le_bytes(part(bytes, 24)));
        let first = u64::from_le_bytes(part(bytes, 0));
        let payload: &[u8] = match &self.key {
            None if first != xxh3_64_with_seed(&bytes[FRONT..], self.session.seed) => return None,
            None => &bytes[DATAGRAM_HEADER..],
            Some(key) => {
                let (head, body) = bytes.split_at_mut(DATAGRAM_HEADER);
                key.open_in_place(nonce(first), Aad::from(&*head), body).ok()?
            }
        };
        Some(Datagram { number, immediate, payload })
    }
}

fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
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
    use crate::multicast::Key;

    const SESSION: Session = Session { tag: 0x1234_5678_9abc_def0, seed: 42, key: None };
    const SECRET: Session = Session { key: Some(Key([7; 32])), ..SESSION };

    fn closed(envelope: &mut Envelope, number: u64, immediate: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = [&[0; DATAGRAM_HEADER], payload].concat();
        bytes.resize(bytes.len() + envelope.tail(), 0);
        envelope.close(number, immediate, &mut bytes);
        bytes
    }

    fn both() -> [Envelope; 2] {
        [SESSION, SECRET].map(Envelope::new)
    }

    proptest! {
        #[test]
        fn what_was_closed_opens(number: u64, immediate: u32, payload in prop::collection::vec(any::<u8>(), 1..=MAX_BODY - AUTHENTICATION)) {
            for mut envelope in both() {
                let mut bytes = closed(&mut envelope, number, immediate, &payload);
                prop_assert_eq!(envelope.open(&mut bytes), Some(Datagram { number, immediate, payload: &payload }));
            }
        }

        #[test]
        fn one_bit_that_differs_is_noticed(payload in prop::collection::vec(any::<u8>(), 1..2000), at: prop::sample::Index, bit in 0..8_u32) {
            for mut envelope in both() {
                let mut bytes = closed(&mut envelope, 7, 8, &payload);
                let at = at.index(bytes.len());
                bytes[at] ^= 1 << bit;
                prop_assert_eq!(envelope.open(&mut bytes), None);
            }
        }

        #[test]
        fn a_cut_or_longer_datagram_is_refused(payload in prop::collection::vec(any::<u8>(), 1..2000), len in 0..4000_usize) {
            for mut envelope in both() {
                let mut bytes = closed(&mut envelope, 7, 8, &payload);
                prop_assume!(len != bytes.len());
                bytes.resize(len, 0);
                prop_assert_eq!(envelope.open(&mut bytes), None);
            }
        }

        #[test]
        fn any_bytes_are_taken_calmly(bytes in prop::collection::vec(any::<u8>(), 0..10_000)) {
            for envelope in both() {
                prop_assert!(envelope.open(&mut bytes.clone()).is_none());
            }
        }

        #[test]
        fn another_session_is_refused(tag: u64, seed: u64, key: [u8; 32]) {
            for other in [Session { tag, seed, key: None }, Session { key: Some(Key(key)), ..SESSION }] {
                prop_assume!(other != SESSION && other != SECRET);
                let bytes = closed(&mut Envelope::new(other), 0, 0, b"payload");
                for envelope in both() {
                    prop_assert!(envelope.open(&mut bytes.clone()).is_none());
                }
            }
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
    fn a_secret_session_takes_nothing_that_is_only_checked() {
        let (mut checked, mut sealed) = (Envelope::new(SESSION), Envelope::new(SECRET));
        let mut bytes = closed(&mut checked, 1, 2, b"payload that anybody on the network could have written");
        assert_eq!(sealed.open(&mut bytes), None);
        let mut bytes = closed(&mut sealed, 1, 2, b"payload");
        assert_eq!(checked.open(&mut bytes), None);
    }

    #[test]
    fn nothing_of_the_payload_is_seen_and_no_nonce_comes_twice() {
        let mut envelope = Envelope::new(SECRET);
        let payload = [0x5a; 1000];
        // The same datagram again, as if the socket had had no room.
        let [first, second] = [(); 2].map(|()| closed(&mut envelope, 3, 4, &payload));
        assert_ne!(first[..FRONT], second[..FRONT]);
        let encrypted = DATAGRAM_HEADER..DATAGRAM_HEADER + payload.len();
        assert_ne!(first[encrypted.clone()], second[encrypted.clone()]);
        let same = first[encrypted].iter().filter(|byte| **byte == 0x5a).count();
        assert!(same < 30, "{same} of 1000 bytes are as they were");
    }

    #[test]
    fn numbers_jump_over_more_than_the_window() {
        let mut numbers = Numbers::new();
        assert!(numbers.note(0) && numbers.note(u64::MAX) && !numbers.note(u64::MAX) && !numbers.note(5));
        assert_eq!(numbers.lost(), u64::MAX - 2);
    }
}
