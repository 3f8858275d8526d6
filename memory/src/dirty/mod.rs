//! Which pages a guest wrote since the last look.

mod holes;
mod orphans;
mod stopped;
mod tracker;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use holes::{Dropped, HoleWatch};
pub use orphans::OrphanWatch;
pub use tracker::{DirtyTracker, Precision, ScanStats, Unsupported};
