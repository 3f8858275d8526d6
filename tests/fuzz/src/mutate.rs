//! Damages input: bits, bytes and numbers changed, parts left out, repeated, and taken from other inputs; of texts also words.

use crate::random::Random;

/// Longest input in bytes.
pub const LONGEST: usize = 4096;
/// Most changes of one input.
const MOST_CHANGES: usize = 5;

/// Numbers at which something often ends.
const NUMBERS: [u64; 14] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];

/// An input made of one of `corpus`; `words` are those of the input's language, if it is a text.
pub fn mutated(random: &mut Random, corpus: &[Vec<u8>], words: &[&str]) -> Vec<u8> {
    let mut input = random.one(corpus).cloned().unwrap_or_default();
    for _ in 0..=random.below(MOST_CHANGES) {
        change(random, &mut input, corpus, words);
    }
    input.truncate(LONGEST);
    input
}

fn change(random: &mut Random, input: &mut Vec<u8>, corpus: &[Vec<u8>], words: &[&str]) {
    let kinds = if words.is_empty() { 9 } else { 12 };
    match random.below(kinds) {
        0 => change_at(random, input, |random, byte| *byte ^= 1 << random.below(8)),
        1 => change_at(random, input, |random, byte| *byte = random.byte()),
        2 => change_at(random, input, |random, byte| {
            *byte = byte.wrapping_add([1, 255, 16, 240][random.below(4)]);
        }),
        3 => put_number(random, input),
        4 => input.truncate(random.below(input.len() + 1)),
        5 => {
            let count = 1 + random.below(16);
            input.extend((0..count).map(|_| random.byte()));
        }
        6 => drop(input.drain(range(random, input.len()))),
        7 => {
            let part = input[range(random, input.len())].to_vec();
            let most = if random.below(8) == 0 { 64 } else { 3 };
            let times = 1 + random.below(most);
            insert(random, input, &part.repeat(times));
        }
        8 => {
            let Some(other) = random.one(corpus) else { return };
            let part = other[range(random, other.len())].to_vec();
            let at = range(random, input.len());
            input.splice(at, part);
        }
        9 | 10 => {
            let Some(word) = random.one(words) else { return };
            insert(random, input, word.as_bytes());
        }
        _ => {
            let number = random.one(&NUMBERS).copied().unwrap_or(0).wrapping_add(random.number() % 3);
            let at = digits(random, input);
            input.splice(at, number.to_string().into_bytes());
        }
    }
}

fn change_at(random: &mut Random, input: &mut [u8], how: impl FnOnce(&mut Random, &mut u8)) {
    let at = random.below(input.len());
    if let Some(byte) = input.get_mut(at) {
        how(random, byte);
    }
}

/// Writes a number over what is there: of 1, 2, 4 or 8 bytes in either order, or in the form of postcard.
fn put_number(random: &mut Random, input: &mut Vec<u8>) {
    let number = random.one(&NUMBERS).copied().unwrap_or(0).wrapping_sub(random.number() % 2);
    let len = 1 << random.below(4);
    let bytes = match random.below(3) {
        0 => number.to_le_bytes()[..len].to_vec(),
        1 => number.to_be_bytes()[8 - len..].to_vec(),
        _ => {
            let at = range(random, input.len()).start;
            let old = input[at..].iter().take(9).take_while(|byte| **byte >= 0x80).count() + 1;
            let end = (at + old).min(input.len());
            input.splice(at..end, varint(number));
            return;
        }
    };
    let at = random.below(input.len().saturating_sub(len) + 1);
    for (place, byte) in input.iter_mut().skip(at).zip(bytes) {
        *place = byte;
    }
}

fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
    bytes
}

fn insert(random: &mut Random, input: &mut Vec<u8>, part: &[u8]) {
    let at = random.below(input.len() + 1);
    input.splice(at..at, part.iter().copied());
}

/// A part, mostly a short one.
fn range(random: &mut Random, len: usize) -> std::ops::Range<usize> {
    let start = random.below(len + 1);
    let most = if random.below(4) == 0 { len } else { 16 };
    start..(start + random.below(most + 1)).min(len)
}

/// A number in a text, or an empty place where there is none behind a place.
fn digits(random: &mut Random, input: &[u8]) -> std::ops::Range<usize> {
    let from = random.below(input.len() + 1);
    let start = input[from..].iter().position(u8::is_ascii_digit).map_or(from, |at| from + at);
    let len = input[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    start..start + len
}
