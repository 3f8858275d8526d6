//! A bound on the memory that one input may make a thread hold.
//!
//! Rules (for the `unsafe` in this file):
//! 1. Every call is passed on to the system's allocator as it is.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Bytes that one input may make a thread hold.
pub const MOST: usize = 256 << 20;

struct Bounded;

#[global_allocator]
static ALLOCATOR: Bounded = Bounded;

thread_local! {
    /// Bytes that this thread may still take; `None`: as many as it wants.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// What to do when the bound is passed; it does not return.
type Passed = fn() -> !;
static PASSED: std::sync::OnceLock<Passed> = std::sync::OnceLock::new();

fn take(bytes: usize) {
    // A thread that is ending has no bound any more.
    let _ = LEFT.try_with(|left| {
        let Some(now) = left.get() else { return };
        left.set(now.checked_sub(bytes));
        if now < bytes {
            // Without a bound from here on: telling of it takes memory.
            PASSED.get().map_or_else(|| std::process::abort(), |passed| passed());
        }
    });
}

fn give(bytes: usize) {
    let _ = LEFT.try_with(|left| left.set(left.get().map(|now| now.saturating_add(bytes))));
}

// SAFETY: rule 1.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: rule 1.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: rule 1.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        give(layout.size());
        // SAFETY: rule 1.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        take(size);
        give(layout.size());
        // SAFETY: rule 1.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Does `work`, in which this thread may hold [`MOST`] bytes more than before; `passed` is called if it takes more.
pub fn bounded(passed: Passed, work: impl FnOnce()) {
    let _ = PASSED.set(passed);
    LEFT.set(Some(MOST));
    work();
    LEFT.set(None);
}
