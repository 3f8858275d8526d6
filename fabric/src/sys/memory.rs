//! Raw access to registered memory.
//!
//! Registered memory may be written at any time by other threads, other processes and guests, so no Rust
//! reference to it is ever made.
//!
//! Rules:
//! 1. A [`Piece`] is made only of a range inside registered memory, for a lifetime in which that memory cannot
//!    be deregistered (a critical section of the region table).
//! 2. Memory that others may write is read by volatile loads or by copies of bytes: a torn value is possible
//!    and harmless, since only bytes are made of it.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use xxhash_rust::xxh3::Xxh3;

/// A `u64` length as `usize`: the same on every platform this crate builds for.
#[allow(clippy::cast_possible_truncation)]
pub(crate) const fn to_usize(len: u64) -> usize {
    len as usize
}

/// A range of registered memory that stays registered for `'s`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece<'s> {
    addr: usize,
    len: usize,
    registered: PhantomData<&'s ()>,
}

impl<'s> Piece<'s> {
    /// # Safety
    /// Rule 1: `len` bytes at `addr` are valid for reads and writes by raw pointers during `'s`.
    pub(crate) unsafe fn new(addr: usize, len: usize) -> Self {
        Self { addr, len, registered: PhantomData }
    }

    pub(crate) fn addr(self) -> usize {
        self.addr
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// The range without its first `skip` bytes.
    pub(crate) fn skip(self, skip: usize) -> Piece<'s> {
        let skip = skip.min(self.len);
        Self { addr: self.addr + skip, len: self.len - skip, registered: PhantomData }
    }

    /// Whether bytes that were read here are worth nothing, and bytes that were written here are lost, since the file behind them was
    /// shortened. To be asked afterwards.
    pub(crate) fn is_broken(self) -> bool {
        vmove_guard::is_broken(self.addr, self.len)
    }

    /// Whether every byte is zero. Stops at the first that is not.
    pub(crate) fn is_zero(self) -> bool {
        let (mut at, mut left) = (self.addr, self.len);
        while left > 0 && at % 64 != 0 {
            if load::<u8>(at) != 0 {
                return false;
            }
            (at, left) = (at + 1, left - 1);
        }
        while left >= 64 {
            let mut all = 0;
            for word in 0..8 {
                all |= load::<u64>(at + word * 8);
            }
            if all != 0 {
                return false;
            }
            (at, left) = (at + 64, left - 64);
        }
        (0..left).all(|byte| load::<u8>(at + byte) == 0)
    }

    /// XXH3-128 of the bytes, with a seed that whoever writes them does not know. `scratch` is not empty; bytes that change
    /// meanwhile give the fingerprint of some mixture.
    pub(crate) fn fingerprint(self, seed: u64, scratch: &mut [u8]) -> u128 {
        let mut hash = Xxh3::with_seed(seed);
        let mut rest = self;
        while rest.len > 0 {
            let copied = rest.copy_to(scratch);
            hash.update(&scratch[..copied]);
            rest = rest.skip(copied);
        }
        hash.digest128()
    }

    /// Copies as many bytes as both have into `to`.
    pub(crate) fn copy_to(self, to: &mut [u8]) -> usize {
        let len = self.len.min(to.len());
        let from = std::ptr::with_exposed_provenance::<u8>(self.addr);
        // SAFETY: rule 1 for the source; the target is a slice of at least `len` bytes of our own.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), len) };
        len
    }

    /// Copies as many bytes as both have out of `from`.
    pub(crate) fn copy_from(self, from: &[u8]) -> usize {
        let len = self.len.min(from.len());
        let to = std::ptr::with_exposed_provenance_mut::<u8>(self.addr);
        // SAFETY: rule 1 for the target; the source is a slice of at least `len` bytes of our own.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, len) };
        len
    }
}

/// One aligned volatile load. Only called by [`Piece`] with addresses inside it.
#[inline]
fn load<T: Copy>(addr: usize) -> T {
    // SAFETY: rules 1 and 2; the callers pass addresses aligned for `T` with `size_of::<T>()` bytes inside the piece.
    unsafe { std::ptr::with_exposed_provenance::<T>(addr).read_volatile() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(bytes: &mut [u8]) -> Piece<'_> {
        // SAFETY: rule 1: the slice is borrowed for the piece's lifetime.
        unsafe { Piece::new(bytes.as_mut_ptr().expose_provenance(), bytes.len()) }
    }

    #[test]
    fn finds_a_byte_that_is_not_zero_wherever_it_is() {
        for start in [0, 1, 7, 63] {
            for len in [0, 1, 63, 64, 65, 200, 4096] {
                let mut bytes = vec![0; start + len];
                assert!(piece(&mut bytes[start..]).is_zero(), "start {start} len {len}");
                for at in (0..len).step_by(13).chain(len.checked_sub(1)) {
                    bytes[start + at] = 1;
                    assert!(!piece(&mut bytes[start..]).is_zero(), "start {start} len {len} at {at}");
                    bytes[start + at] = 0;
                }
            }
        }
    }

    #[test]
    fn copies_no_more_than_both_sides_have() {
        let mut memory = [1, 2, 3, 4];
        let mut out = [0; 8];
        assert_eq!(piece(&mut memory).skip(1).copy_to(&mut out), 3);
        assert_eq!(out, [2, 3, 4, 0, 0, 0, 0, 0]);
        assert_eq!(piece(&mut memory[..2]).copy_from(&[9; 8]), 2);
        assert_eq!(memory, [9, 9, 3, 4]);
        assert_eq!(piece(&mut memory).skip(10).len(), 0);
    }
}
