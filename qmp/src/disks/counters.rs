//! How many requests a guest has made to its disks, and how long they took (`query-blockstats`).
//!
//! QEMU counts from its start, whoever looks. How requests are spread over times it counts only when it is told to
//! (`block-latency-histogram-set`), which works while the guest runs; a histogram that somebody else has set is used as it is.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vmove_types::disk_latency::{DiskIo, IoLatency, LatencyBin};

use super::TIMEOUT;
use crate::{Client, QmpError};

const NS_PER_MS: f64 = 1e6;
/// Bounds of our histogram, in nanoseconds: 0.05 ms to 1 s. The last one is odd, so that a later process knows the histogram for ours.
const BOUNDARIES: [u64; 14] = [
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_007,
];

/// What a guest has done with one of its disks since its QEMU was started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCounters {
    /// By which QEMU's commands know the front end, such as `vda` or a path.
    device: String,
    reads: Counters,
    writes: Counters,
    /// Not in what older versions have written down.
    #[serde(default)]
    flushes: Counters,
}

/// Requests of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Counters {
    requests: u64,
    total_ns: u64,
    histogram: Option<Histogram>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Histogram {
    /// In nanoseconds.
    boundaries: Vec<u64>,
    /// One more than boundaries.
    bins: Vec<u64>,
}

/// The counters of the disks behind these front ends ([`super::DiskFact::device`]) as they are now, in the same order; `None` for one that QEMU
/// has not.
///
/// # Errors
/// [`QmpError`].
pub async fn counters(client: &Client, devices: &[String]) -> Result<Vec<Option<DiskCounters>>, QmpError> {
    let stats = client.execute_raw("query-blockstats", Value::Null, TIMEOUT).await?;
    Ok(devices.iter().map(|device| of_device(&stats, device)).collect())
}

/// Has QEMU count, too, how many requests to these disks take how long. Not where somebody else has it do so, and not where it cannot.
pub async fn begin_histograms(client: &Client, devices: &[String]) {
    let Ok(stats) = client.execute_raw("query-blockstats", Value::Null, TIMEOUT).await else { return };
    let has_none = |device: &&String| entry(&stats, device).is_some_and(|entry| histograms(entry).is_empty());
    for device in devices.iter().filter(has_none) {
        let order = json!({ "id": device, "boundaries": BOUNDARIES });
        let set = client.execute_raw("block-latency-histogram-set", order, TIMEOUT).await;
        if let Err(error) = set {
            tracing::debug!(device, %error, "QEMU keeps no histogram for this disk");
        }
    }
}

/// Ends all histograms that [`begin_histograms`] began, those of an earlier process, too.
pub async fn end_histograms(client: &Client) {
    let Ok(stats) = client.execute_raw("query-blockstats", Value::Null, TIMEOUT).await else { return };
    for entry in stats.as_array().into_iter().flatten().filter(|entry| is_ours(entry)) {
        let device = device(entry);
        let ended = client.execute_raw("block-latency-histogram-set", json!({ "id": device }), TIMEOUT).await;
        if let Err(error) = ended {
            tracing::warn!(device, %error, "QEMU goes on keeping a histogram for this disk");
        }
    }
}

impl DiskCounters {
    /// What the guest has done since it was counted that time; `None` if that was another QEMU or disk.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Option<DiskIo> {
        if self.device != earlier.device {
            return None;
        }
        let (reads, writes) = (self.reads.since(&earlier.reads)?, self.writes.since(&earlier.writes)?);
        let flushes = self.flushes.since(&earlier.flushes)?;
        Some(DiskIo { reads: reads.told(), writes: writes.told(), flushes: flushes.told() })
    }

    /// What the guest has done since its QEMU was started.
    #[must_use]
    pub fn since_start(&self) -> DiskIo {
        let whole = |counters: &Counters| {
            // One that was set later tells of a part only.
            let histogram = counters.histogram.clone();
            let histogram = histogram.filter(|kept| kept.bins.iter().sum::<u64>() == counters.requests);
            Counters { histogram, ..counters.clone() }.told()
        };
        DiskIo { reads: whole(&self.reads), writes: whole(&self.writes), flushes: whole(&self.flushes) }
    }
}

impl Counters {
    fn of(stats: &Value, kind: &str) -> Self {
        let count = |key: String| stats.get(key).and_then(Value::as_u64).unwrap_or(0);
        // The time of failed requests is counted with that of the others.
        let requests = count(format!("{kind}_operations")) + count(format!("failed_{kind}_operations"));
        let histogram = stats.get(format!("{kind}_latency_histogram"));
        let histogram = histogram.and_then(|histogram| serde_json::from_value(histogram.clone()).ok());
        Self { requests, total_ns: count(format!("{kind}_total_time_ns")), histogram }
    }

    fn since(&self, earlier: &Self) -> Option<Self> {
        let requests = self.requests.checked_sub(earlier.requests)?;
        let total_ns = self.total_ns.checked_sub(earlier.total_ns)?;
        let histogram = self.histogram.as_ref().zip(earlier.histogram.as_ref());
        let histogram = histogram.and_then(|(now, then)| now.since(then));
        Some(Self { requests, total_ns, histogram })
    }

    fn told(self) -> Option<IoLatency> {
        let Self { requests, total_ns, histogram } = self;
        let mean_ms = total_ns as f64 / NS_PER_MS / requests as f64;
        let histogram = histogram.map(|histogram| histogram.told()).unwrap_or_default();
        (requests > 0).then_some(IoLatency { requests, mean_ms, histogram })
    }
}

impl Histogram {
    /// `None` if it was set anew meanwhile.
    fn since(&self, earlier: &Self) -> Option<Self> {
        if self.boundaries != earlier.boundaries || self.bins.len() != earlier.bins.len() {
            return None;
        }
        let pairs = self.bins.iter().zip(&earlier.bins);
        let bins = pairs.map(|(now, then)| now.checked_sub(*then)).collect::<Option<Vec<_>>>()?;
        Some(Self { boundaries: self.boundaries.clone(), bins })
    }

    fn told(&self) -> Vec<LatencyBin> {
        let ms = |ns: &u64| (*ns as f64 / NS_PER_MS * 1e3).round() / 1e3;
        let bin = |(place, requests): (usize, &u64)| LatencyBin {
            from_ms: place.checked_sub(1).and_then(|at| self.boundaries.get(at)).map_or(0.0, ms),
            to_ms: self.boundaries.get(place).map(ms),
            requests: *requests,
        };
        self.bins.iter().enumerate().filter(|(_, requests)| **requests > 0).map(bin).collect()
    }
}

fn text<'a>(entry: &'a Value, at: &str) -> &'a str {
    entry.pointer(at).and_then(Value::as_str).unwrap_or_default()
}

/// By which QEMU's commands know the front end.
fn device(entry: &Value) -> &str {
    let device = text(entry, "/qdev");
    if device.is_empty() { text(entry, "/device") } else { device }
}

fn entry<'a>(stats: &'a Value, name: &str) -> Option<&'a Value> {
    stats.as_array()?.iter().find(|entry| !name.is_empty() && device(entry) == name)
}

fn of_device(stats: &Value, name: &str) -> Option<DiskCounters> {
    let entry = entry(stats, name)?;
    let of = entry.get("stats")?;
    let [reads, writes, flushes] = ["rd", "wr", "flush"].map(|kind| Counters::of(of, kind));
    Some(DiskCounters { device: name.to_owned(), reads, writes, flushes })
}

/// Bounds of the histograms that QEMU keeps for a disk.
fn histograms(entry: &Value) -> Vec<&Value> {
    let stats = entry.get("stats").and_then(Value::as_object);
    let kept = stats.into_iter().flatten().filter(|(key, _)| key.ends_with("_latency_histogram"));
    kept.filter_map(|(_, histogram)| histogram.get("boundaries")).collect()
}

fn is_ours(entry: &Value) -> bool {
    let kept = histograms(entry);
    !kept.is_empty() && kept.iter().all(|bounds| **bounds == json!(BOUNDARIES))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(reads: [u64; 2], writes: [u64; 2], more: &Value) -> Value {
        let mut of = json!({ "rd_operations": reads[0], "rd_total_time_ns": reads[1], "wr_operations": writes[0],
            "wr_total_time_ns": writes[1], "failed_wr_operations": 0 });
        more.as_object().unwrap().iter().for_each(|(key, value)| of[key] = value.clone());
        json!([{ "device": "other", "stats": {} }, { "device": "disk0", "qdev": "vda", "stats": of }])
    }

    fn at(reads: [u64; 2], writes: [u64; 2], more: &Value) -> DiskCounters {
        of_device(&stats(reads, writes, more), "vda").unwrap()
    }

    #[test]
    fn what_a_guest_did_not_do_is_none_and_no_zero() {
        let (then, now) = (at([5, 9], [0, 0], &json!({})), at([5, 9], [4, 8_000_000], &json!({})));
        let io = now.since(&then).unwrap();
        assert_eq!(io.reads, None);
        assert_eq!(io.writes, Some(IoLatency { requests: 4, mean_ms: 2.0, histogram: Vec::new() }));
        assert_eq!(then.since(&now), None, "another QEMU: it counts anew");
        assert_eq!(now.since_start().reads.unwrap().requests, 5);
    }

    #[test]
    fn failed_requests_are_counted_as_their_time_is() {
        let now = at([0, 0], [1, 4_000_000], &json!({ "failed_wr_operations": 1 }));
        assert_eq!(now.since_start().writes.map(|writes| (writes.requests, writes.mean_ms)), Some((2, 2.0)));
        let flushed =
            json!({ "flush_operations": 3, "failed_flush_operations": 1, "flush_total_time_ns": 8_000_000 });
        let flushes = at([0, 0], [0, 0], &flushed).since_start().flushes;
        assert_eq!(flushes.map(|flushes| (flushes.requests, flushes.mean_ms)), Some((4, 2.0)));
    }

    #[test]
    fn bins_without_requests_are_left_out_and_a_histogram_that_was_set_anew_is_not_used() {
        let kept = |bounds: [u64; 2], bins: [u64; 3]| json!({ "wr_latency_histogram": { "boundaries": bounds, "bins": bins } });
        let then = at([0, 0], [3, 3], &kept([1_000_000, 5_000_000], [1, 2, 0]));
        let now = at([0, 0], [9, 9], &kept([1_000_000, 5_000_000], [4, 2, 3]));
        let told = |now: &DiskCounters| now.since(&then).unwrap().writes.unwrap().histogram;
        let bin = |from_ms, to_ms| LatencyBin { from_ms, to_ms, requests: 3 };
        assert_eq!(told(&now), [bin(0.0, Some(1.0)), bin(5.0, None)]);
        assert_eq!(told(&at([0, 0], [9, 9], &kept([1, 2], [4, 2, 3]))), []);
        let since_start = |now: &DiskCounters| now.since_start().writes.unwrap().histogram.len();
        assert_eq!((since_start(&then), since_start(&at([0, 0], [10, 9], &kept([1, 2], [4, 2, 3])))), (2, 0));
    }

    #[test]
    fn only_our_own_histogram_is_taken_for_ours() {
        let one = |bounds: Value| {
            stats([0, 0], [0, 0], &json!({ "rd_latency_histogram": { "boundaries": bounds, "bins": [] } }))[1]
                .clone()
        };
        assert!(is_ours(&one(json!(BOUNDARIES))));
        assert!(!is_ours(&one(json!([1, 2, 3]))));
        assert!(!is_ours(&stats([0, 0], [0, 0], &json!({}))[1]), "there is none");
    }
}
