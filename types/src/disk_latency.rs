//! How long a guest's requests to a disk take: before, during and after a move of the disk.
//!
//! QEMU counts each request when it is done, and how long it took, by its monotonic clock. What is told here are differences of these counters.

use serde::{Deserialize, Serialize};

/// The guest's requests to a disk while it was moved, and around that.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct DiskLatency {
    /// From the start of the guest's QEMU here until its disk began to be copied; `None` if that is not known.
    pub before: Option<DiskIo>,
    /// From then on until the guest was stopped to move, or had its new image; `None` if that is not known.
    pub during: Option<DiskIo>,
    /// After that: until the destination had all of a guest that has moved, or until now for a disk that moved on its host. `None` if that is not
    /// known.
    pub after: Option<DiskIo>,
    /// What its copy left to the guest; `None` if that was not measured: nothing was to be kept, or the guest waited for its disks for so little of its
    /// time that it could not lose more than it may; or the copy was over before.
    pub gave_way: Option<GaveWay>,
}

/// How the copies of a guest's disks gave way to its requests: all disks that are copied together have the same.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct GaveWay {
    /// The share of its pace that the guest kept between the rests, 0 to 1: of its time without what it waited longer for its requests than while the
    /// copies rested.
    pub kept_pace: f64,
    /// How long copies rested, or went slower than they could, in milliseconds.
    pub held_back_ms: f64,
}

/// Requests of a guest to a disk over some time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct DiskIo {
    /// What it read; `None` if it did not read.
    pub reads: Option<IoLatency>,
    /// What it wrote; `None` if it did not write.
    pub writes: Option<IoLatency>,
    /// When it had what it wrote put on the storage; `None` if it did not.
    pub flushes: Option<IoLatency>,
}

/// Requests of one kind.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct IoLatency {
    /// How many were done; at least one.
    pub requests: u64,
    /// How long they took on average, in milliseconds: from when QEMU had the request until it was done.
    pub mean_ms: f64,
    /// How many took how long; empty if QEMU did not keep that.
    pub histogram: Vec<LatencyBin>,
}

/// Requests that took about equally long.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct LatencyBin {
    /// They took at least so many milliseconds.
    pub from_ms: f64,
    /// They took less than so many milliseconds; `None`: any time.
    pub to_ms: Option<f64>,
    /// How many; at least one.
    pub requests: u64,
}

impl IoLatency {
    /// Within how many milliseconds this share of the requests was done, as far as the histogram tells: the upper bound of a bin.
    #[must_use]
    pub fn within_ms(&self, share: f64) -> Option<f64> {
        let all: u64 = self.histogram.iter().map(|bin| bin.requests).sum();
        let mut seen = 0;
        let reaches = |bin: &&LatencyBin| {
            seen += bin.requests;
            seen as f64 >= all as f64 * share
        };
        self.histogram.iter().find(reaches)?.to_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_tells_within_which_time_most_were_done() {
        let bin = |from_ms, to_ms, requests| LatencyBin { from_ms, to_ms, requests };
        let histogram = vec![bin(0.0, Some(1.0), 98), bin(1.0, Some(5.0), 1), bin(5.0, None, 1)];
        let writes = IoLatency { requests: 100, mean_ms: 0.5, histogram };
        assert_eq!(writes.within_ms(0.5), Some(1.0));
        assert_eq!(writes.within_ms(0.99), Some(5.0));
        assert_eq!(writes.within_ms(1.0), None, "the longest took any time");
        assert_eq!(IoLatency::default().within_ms(0.5), None);
    }
}
