//! How much of a bulk connection's memory is asked for at a time: as much as crosses within a set time at the rate that the connection
//! has.
//!
//! A fault on a page that is being read anyway waits for what is ahead of it: on this connection, and on a link that is the bottleneck on
//! all others, too. With a fixed number of bytes under way that is 4 ms for each guest on a link of 1 Gbit/s, and eight guests that move
//! at once wait for each other. With a fixed time it is that time, however many share the link: each has the smaller rate.

use std::time::Duration;

use vmove_types::time::Mono;

/// Reads that are under way at once, and the most bytes of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub bytes: u64,
    pub depth: usize,
    /// What is under way crosses in this time, or in two round trips if they take longer: with less the link would be idle in between.
    pub time: Duration,
}

/// While the guest runs at the source: large reads, several under way.
pub(super) const WARM: Shape = Shape { bytes: 1 << 20, depth: 4, time: Duration::from_millis(2) };
/// While the guest waits for pages.
pub(super) const SERVING: Shape = Shape { bytes: 256 << 10, depth: 2, time: Duration::from_millis(1) };

/// No read is smaller, unless there is less to do: its header and the calls would take longer than its bytes.
const LEAST: u64 = 16 << 10;
/// The first reads: on a fast link it is four times as much with each round trip.
const FIRST: u64 = 32 << 10;
/// So many of the last reads count.
const REMEMBERED: usize = 16;

/// A read that is under way: when it was posted, and what had come until then.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Posted {
    at: Mono,
    came: u64,
}

/// What is known of the rate of a connection. As in BBR (Cardwell et al., ACM Queue 14(5), 2016) a read tells what has come while it was
/// under way, and how long it was. The best of late counts: on a host whose processors are busy most reads are slow however little is under
/// way, and if less were asked for then, everything would be slower still.
#[derive(Debug)]
pub(super) struct Window {
    round_trip: Duration,
    /// Bytes that have come.
    came: u64,
    /// Bytes per second; 0: no read yet.
    rates: [f64; REMEMBERED],
    next: usize,
}

impl Window {
    /// Of a connection whose round trip takes so long at least.
    pub(super) const fn new(round_trip: Duration) -> Self {
        Self { round_trip, came: 0, rates: [0.0; REMEMBERED], next: 0 }
    }

    /// A read is posted.
    pub(super) const fn posted(&self, now: Mono) -> Posted {
        Posted { at: now, came: self.came }
    }

    /// A read of so many bytes has come.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a few reads")]
    pub(super) fn came(&mut self, read: Posted, bytes: u64, now: Mono) {
        self.came += bytes;
        let seconds = now.since(read.at).as_secs_f64().max(1e-9);
        self.rates[self.next % REMEMBERED] = (self.came - read.came) as f64 / seconds;
        self.next += 1;
    }

    /// Bytes to ask for in one read.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "within bounds"
    )]
    pub(super) fn read_bytes(&self, shape: Shape) -> u64 {
        if self.next == 0 {
            return FIRST.min(shape.bytes);
        }
        let rate = self.rates.iter().copied().fold(0.0, f64::max);
        let under_way = rate * shape.time.max(2 * self.round_trip).as_secs_f64();
        ((under_way / shape.depth as f64) as u64).clamp(LEAST, shape.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A link and whoever reads over it.
    struct Link {
        bytes_per_s: f64,
        round_trip: Duration,
        /// Bytes of others that come with each read.
        others: u64,
        /// Until a read that has come is noticed, in turn.
        delays: Vec<Duration>,
    }

    impl Default for Link {
        fn default() -> Self {
            let round_trip = Duration::from_micros(100);
            Self { bytes_per_s: 125e6, round_trip, others: 0, delays: vec![Duration::ZERO] }
        }
    }

    /// What is asked for in one read in the end.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "times of a test"
    )]
    fn settled(link: &Link, shape: Shape) -> u64 {
        let ns = |seconds: f64| (seconds * 1e9) as u64;
        let mut window = Window::new(link.round_trip);
        let mut now = Mono(1);
        let mut free_at = now;
        let mut under_way = VecDeque::new();
        for number in 0..500 {
            while under_way.len() < shape.depth {
                let bytes = window.read_bytes(shape);
                let begins = free_at.0.max(now.0 + ns(link.round_trip.as_secs_f64()));
                free_at = Mono(begins + ns((bytes + link.others) as f64 / link.bytes_per_s));
                under_way.push_back((window.posted(now), bytes, free_at));
            }
            let (posted, bytes, comes) = under_way.pop_front().expect("one is under way");
            let delay = link.delays[number % link.delays.len()];
            now = Mono(now.0.max(comes.0) + ns(delay.as_secs_f64()));
            window.came(posted, bytes, now);
        }
        window.read_bytes(shape)
    }

    #[test]
    fn what_is_under_way_takes_the_time_that_was_set() {
        // 1 Gbit/s: 125 KB in a millisecond.
        let read = settled(&Link::default(), SERVING);
        assert!((50_000..65_000).contains(&read), "{read}");
        // The same with seven others on the link, each with as much under way.
        let shared = settled(&Link { others: 7 * 8_000, ..Link::default() }, SERVING);
        assert_eq!(shared, LEAST);
    }

    #[test]
    fn a_fast_link_is_asked_for_as_much_as_ever() {
        let fast = || Link { bytes_per_s: 2.5e9, round_trip: Duration::from_micros(50), ..Link::default() };
        assert_eq!(settled(&fast(), SERVING), SERVING.bytes);
        assert_eq!(settled(&fast(), WARM), WARM.bytes);
    }

    #[test]
    fn a_long_way_is_filled() {
        // 10 Gbit/s over 10 ms need 12.5 MB under way: what is allowed at most.
        let link = Link { bytes_per_s: 1.25e9, round_trip: Duration::from_millis(10), ..Link::default() };
        assert_eq!(settled(&link, WARM), WARM.bytes);
    }

    /// One read in eight is noticed at once.
    #[test]
    fn a_busy_host_is_not_taken_for_a_slow_link() {
        let mut delays = vec![Duration::from_millis(5); 8];
        delays[3] = Duration::ZERO;
        delays[4] = Duration::ZERO;
        let link = Link { bytes_per_s: 2.5e9, delays, ..Link::default() };
        assert_eq!(settled(&link, SERVING), SERVING.bytes);
    }

    #[test]
    fn it_begins_with_little_and_has_all_in_a_few_reads() {
        let mut window = Window::new(Duration::ZERO);
        assert_eq!(window.read_bytes(SERVING), FIRST);
        let mut now = Mono(0);
        for _ in 0..4 {
            let (posted, bytes) = (window.posted(now), window.read_bytes(SERVING));
            now = Mono(now.0 + 100_000);
            window.came(posted, bytes, now);
        }
        assert_eq!(window.read_bytes(SERVING), SERVING.bytes);
    }
}
