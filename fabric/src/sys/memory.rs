//! Raw access to registered memory.
//!
//! Registered memory may be written at any time by other threads, other processes and guests, so no Rust
//! reference to it is ever made.
//!
//! Rules:
//! 1. Callers pass ranges inside memory that is registered and cannot be deregistered during the call: they
//!    are inside a critical section of the region table, or the range is memory of their own.
//! 2. Memory that others may write is read by volatile loads: a torn value is possible and harmless, since
//!    only bytes are made of it.
#![allow(unsafe_code)]

/// A `u64` length as `usize`: the same on every platform this crate builds for.
#[allow(clippy::cast_possible_truncation)]
pub(crate) const fn to_usize(len: u64) -> usize {
    len as usize
}
