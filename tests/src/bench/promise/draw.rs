//! Guests and links at random, by a seed.

use std::fmt;

use serde::Serialize;
use vmove_guest::config::{Config, Rate};

use crate::blows::deck::Dice;
use crate::payload;

/// From `low` to `high`, each factor as likely as any other.
fn between(dice: &mut Dice, low: u32, high: u32) -> u32 {
    let share = (dice.number() >> 11) as f64 / (1_u64 << 53) as f64;
    let value = f64::from(low) * (f64::from(high) / f64::from(low)).powf(share);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between two u32")]
    let whole = value as u32;
    whole.clamp(low, high)
}

/// A guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Drawn {
    /// MiB that it writes.
    pub working_set_mib: u32,
    /// MiB that it only reads.
    pub cold_mib: u32,
    /// Pages that it writes in a second.
    pub pages_per_s: u32,
}

impl Drawn {
    /// The next one.
    #[must_use]
    pub fn new(dice: &mut Dice) -> Self {
        Self {
            working_set_mib: between(dice, 2, 96),
            cold_mib: between(dice, 8, 400),
            pages_per_s: between(dice, 50, 12_000),
        }
    }

    /// Its task.
    #[must_use]
    pub fn config(self) -> Config {
        Config {
            working_set_mib: self.working_set_mib,
            cold_mib: self.cold_mib,
            rate: Rate::PagesPerSecond(self.pages_per_s),
            verify: 500,
            ..payload::busy()
        }
    }
}

impl fmt::Display for Drawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { working_set_mib, cold_mib, pages_per_s } = self;
        write!(f, "{working_set_mib} MiB written with {pages_per_s} pages/s, {cold_mib} MiB cold")
    }
}

/// A link, and the mode that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Link {
    /// Its limit in MiB/s, or none.
    pub limit_mib: Option<u32>,
    /// A word for `--mode`.
    pub mode: &'static str,
}

impl Link {
    /// The next one.
    #[must_use]
    pub fn new(dice: &mut Dice) -> Self {
        let limit_mib = dice.pick(&[true, false]).then(|| between(dice, 20, 400));
        Self { limit_mib, mode: dice.pick(&["auto", "auto", "precopy", "hybrid", "postcopy"]) }
    }

    /// Options of `vmove migrate`.
    #[must_use]
    pub fn options(self) -> Vec<String> {
        let mut options = vec!["--mode".to_owned(), self.mode.to_owned()];
        if let Some(limit) = self.limit_mib {
            options.extend(["--bandwidth".to_owned(), format!("{limit}MiB")]);
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_again_and_all_within_their_ranges() {
        let draw = |seed| {
            let mut dice = Dice::from(seed);
            (0..50).map(|_| (Drawn::new(&mut dice), Link::new(&mut dice))).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        for (guest, link) in draw(7) {
            assert!((2..=96).contains(&guest.working_set_mib) && (50..=12_000).contains(&guest.pages_per_s));
            assert!(link.limit_mib.is_none_or(|limit| (20..=400).contains(&limit)));
        }
    }
}
