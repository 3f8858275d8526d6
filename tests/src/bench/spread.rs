//! Statistics of repeated measurements.

use serde::Serialize;

/// Minimum, median and maximum of some figures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The minimum.
    pub min: f64,
    /// The median.
    pub median: f64,
    /// The maximum.
    pub max: f64,
}

impl Spread {
    /// Computes them from these figures; `None` if there are none. For an even number, the median is the greater of the two in the
    /// middle: less is better, and figures must not flatter.
    #[must_use]
    pub fn of(figures: &[f64]) -> Option<Self> {
        let mut sorted = figures.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = *sorted.get(sorted.len() / 2)?;
        Some(Self { min: *sorted.first()?, median, max: *sorted.last()? })
    }

    /// `MEDIAN (MIN-MAX)`.
    #[must_use]
    pub fn text(&self, digits: usize) -> String {
        format!("{:.digits$} ({:.digits$}-{:.digits$})", self.median, self.min, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worse_of_two_in_the_middle_counts() {
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[30.0, 10.0, 20.0]).expect("some").text(0), "20 (10-30)");
        assert_eq!(Spread::of(&[4.0, 1.0, 3.0, 2.0]).expect("some").text(1), "3.0 (1.0-4.0)");
    }
}
