//! The atomics the table is made of: the real ones, or loom's where its model checker runs.

#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU8, Ordering};

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU8, Ordering};
