//! Which pages a guest wrote since the last look.

mod holes;
mod tracker;

pub use holes::HoleWatch;
pub use tracker::{DirtyTracker, ScanStats, Unsupported};
