//! How far a session was over time: a bounded number of points, however long it lasts.

use vmove_types::report::ProgressPoint;

/// At most so many are kept.
const MOST: usize = 100;

/// Points of a session. Whenever there are too many, every second one goes, and from then on half as many come.
#[derive(Debug)]
pub(crate) struct OverTime {
    points: Vec<ProgressPoint>,
    /// One of so many that are told is kept.
    every: u32,
    skipped: u32,
}

impl Default for OverTime {
    fn default() -> Self {
        Self { points: Vec::new(), every: 1, skipped: 0 }
    }
}

impl OverTime {
    /// Tells it where the session is.
    pub(crate) fn add(&mut self, point: ProgressPoint) {
        self.skipped += 1;
        if self.skipped < self.every {
            return;
        }
        self.skipped = 0;
        if self.points.len() == MOST {
            let mut keep = false;
            self.points.retain(|_| {
                keep = !keep;
                keep
            });
            self.every = self.every.saturating_mul(2);
        }
        self.points.push(point);
    }

    /// All of them, in order; none is left.
    pub(crate) fn take(&mut self) -> Vec<ProgressPoint> {
        std::mem::take(&mut self.points)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(points: u32) -> Vec<ProgressPoint> {
        let mut over_time = OverTime::default();
        for number in 0..points {
            over_time.add(ProgressPoint { at_ms: f64::from(number) * 100.0, ..ProgressPoint::default() });
        }
        over_time.take()
    }

    #[test]
    fn a_short_session_keeps_all_its_points() {
        let points = after(100);
        assert_eq!(points.len(), 100);
        assert!(points.windows(2).all(|pair| (pair[1].at_ms - pair[0].at_ms - 100.0).abs() < 1e-6));
    }

    #[test]
    fn a_long_one_has_few_points_from_its_beginning_to_its_end() {
        for told in [101, 250, 1_000, 36_000, 864_000] {
            let points = after(told);
            assert!((50..=MOST).contains(&points.len()), "{told}: {}", points.len());
            let (begin, end) = (points[0].at_ms, points[points.len() - 1].at_ms);
            let all = f64::from(told) * 100.0;
            assert!(begin < 1.0 && end > all * 0.97, "{told}: {begin} to {end} of {all}");
            let widest = points.windows(2).map(|pair| pair[1].at_ms - pair[0].at_ms).fold(0.0, f64::max);
            assert!(widest < all / 24.0, "{told}: {widest}");
        }
    }
}
