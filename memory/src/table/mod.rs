//! Where each page of a destination's RAM block stands: one atomic byte per page.
//!
//! ```text
//!            claim                    landed                  mark_mapped
//! Absent ──────────────▶ Asked ──────────────────▶ Landed ──────────────────▶ Mapped
//! Stale  ──────────────▶   │  ──────zero─────────▶ Zero   ──────────────────▶   ▲
//!   ▲  ticket dropped      │                                                    │
//!   └──────────────────────┘        (order: bytes written → Landed → CONTINUE → Mapped)
//! ```
//!
//! Two flags ride in the same byte. *Wanted* is set when a guest thread faults on a page somebody else has asked
//! for: whoever lands the page learns of it from the same atomic operation and must map the page at once, so the
//! wake-up cannot be lost. *Superseded* is set when the source reports a page dirty again while its old bytes are
//! still on the way: the page then lands as `Stale`.

mod cells;
mod core;
mod state;
mod sync;
mod tally;
mod ticket;

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use core::{Counts, PageTable};
pub use state::PageState;
pub use ticket::{Landing, ReadTicket, RunTicket, Want};
