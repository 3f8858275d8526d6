//! Latencies recorded from the fault path: no allocation, no lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmove_types::report::FaultStats;

/// Sub-buckets per power of two: values are kept to within 1/32, about 3 %.
const SUB: usize = 32;
const SUB_BITS: u32 = SUB.trailing_zeros();
/// Powers of two of nanoseconds covered: up to 2^40 ns, 18 minutes.
const POWERS: usize = 40;

/// A log-linear histogram of durations, in the manner of HdrHistogram, in plain atomics: any thread may record at any time, and
/// recording is one `fetch_add` and one `fetch_max`.
#[derive(Debug)]
pub struct Latencies {
    buckets: Box<[AtomicU64]>,
    max_ns: AtomicU64,
    /// Faults that needed no fetch.
    others: AtomicU64,
    /// What is recorded here is recorded there as well.
    total: Option<Arc<Latencies>>,
}

impl Default for Latencies {
    fn default() -> Self {
        let buckets = (0..POWERS * SUB).map(|_| AtomicU64::new(0)).collect();
        Self { buckets, max_ns: AtomicU64::new(0), others: AtomicU64::new(0), total: None }
    }
}

impl Latencies {
    /// Of one session, whose latencies are also counted in those of the whole process.
    #[must_use]
    pub fn counted_in(total: Arc<Self>) -> Self {
        Self { total: Some(total), ..Self::default() }
    }

    /// Records the latency of a fault for which a page was fetched.
    pub fn record(&self, latency: Duration) {
        if let Some(total) = &self.total {
            total.record(latency);
        }
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed everywhere: the numbers stand for themselves.
        self.buckets[bucket(ns)].fetch_add(1, Ordering::Relaxed);
        self.max_ns.fetch_max(ns, Ordering::Relaxed);
    }

    /// Counts a fault that needed no fetch.
    pub fn count_other(&self) {
        self.others.fetch_add(1, Ordering::Relaxed);
    }

    /// The figures of the report.
    #[must_use]
    pub fn stats(&self) -> FaultStats {
        let counts: Vec<u64> = self.buckets.iter().map(|b| b.load(Ordering::Relaxed)).collect();
        let fetched: u64 = counts.iter().sum();
        let max_us = self.max_ns.load(Ordering::Relaxed) as f64 / 1e3;
        let at = |part: f64| {
            let rank = (part * fetched as f64).ceil().max(1.0);
            let mut seen = 0.0;
            for (index, count) in counts.iter().enumerate() {
                seen += *count as f64;
                if *count > 0 && seen >= rank {
                    return (upper_ns(index) as f64 / 1e3).min(max_us);
                }
            }
            0.0
        };
        let count = fetched + self.others.load(Ordering::Relaxed);
        FaultStats { count, fetched, p50_us: at(0.5), p99_us: at(0.99), p999_us: at(0.999), max_us }
    }
}

/// Tells what has been recorded since it was asked last: for a histogram of buckets of its own.
#[derive(Debug)]
pub struct News {
    of: Arc<Latencies>,
    told: Vec<u64>,
}

impl News {
    /// Nothing has been told yet.
    #[must_use]
    pub fn of(latencies: Arc<Latencies>) -> Self {
        Self { told: vec![0; latencies.buckets.len()], of: latencies }
    }

    /// Latencies that were recorded since the last call, each with how often; rounded up by at most 3 %.
    pub fn take(&mut self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let buckets = self.of.buckets.iter().zip(&mut self.told).enumerate();
        buckets.filter_map(|(index, (bucket, told))| {
            let now = bucket.load(Ordering::Relaxed);
            let new = now - std::mem::replace(told, now);
            (new > 0).then(|| (Duration::from_nanos(upper_ns(index)), new))
        })
    }
}

fn bucket(ns: u64) -> usize {
    let ns = ns.max(1);
    let power = ns.ilog2();
    let index = if power < SUB_BITS {
        ns
    } else {
        // The top SUB_BITS bits below the leading one choose the sub-bucket.
        let sub = (ns >> (power - SUB_BITS)) - SUB as u64;
        u64::from(power - SUB_BITS + 1) * SUB as u64 + sub
    };
    usize::try_from(index).unwrap_or(usize::MAX).min(POWERS * SUB - 1)
}

/// Largest value that falls into a bucket.
fn upper_ns(index: usize) -> u64 {
    let (row, sub) = ((index / SUB) as u64, (index % SUB) as u64);
    if row == 0 { sub } else { ((SUB as u64 + sub + 1) << (row - 1)) - 1 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_value_lies_within_three_percent_of_its_bucket(ns in 1u64..1 << 38) {
            let upper = upper_ns(bucket(ns));
            prop_assert!(upper >= ns, "{} in a bucket up to {}", ns, upper);
            prop_assert!(upper as f64 <= ns as f64 * (1.0 + 1.0 / SUB as f64) + 1.0, "{} in a bucket up to {}", ns, upper);
        }
    }

    #[test]
    fn percentiles_are_those_of_the_values() {
        let l = Latencies::default();
        for us in 1..=1000 {
            l.record(Duration::from_micros(us));
        }
        l.count_other();
        let s = l.stats();
        assert_eq!((s.count, s.fetched), (1001, 1000));
        assert!((s.p50_us - 500.0).abs() < 20.0, "{s:?}");
        assert!((s.p99_us - 990.0).abs() < 35.0, "{s:?}");
        assert!((s.p999_us - 999.0).abs() < 35.0, "{s:?}");
        assert!((s.max_us - 1000.0).abs() < f64::EPSILON, "{s:?}");
    }

    #[test]
    fn news_of_all_sessions_are_told_once() {
        let total = Arc::new(Latencies::default());
        let sessions = [Latencies::counted_in(Arc::clone(&total)), Latencies::counted_in(Arc::clone(&total))];
        let mut news = News::of(total);
        for session in &sessions {
            session.record(Duration::from_micros(100));
        }
        sessions[0].record(Duration::from_millis(3));
        let told: Vec<_> = news.take().collect();
        assert_eq!(told.iter().map(|(_, count)| count).collect::<Vec<_>>(), [&2, &1]);
        assert!((100..=104).contains(&told[0].0.as_micros()), "{told:?}");
        assert!((3000..=3100).contains(&told[1].0.as_micros()), "{told:?}");
        assert_eq!(news.take().count(), 0);
        sessions[1].record(Duration::from_micros(100));
        assert_eq!(news.take().map(|(_, count)| count).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn nothing_recorded_is_all_zero() {
        assert_eq!(Latencies::default().stats(), FaultStats::default());
    }
}
