//! `at-most`: how often a hook may run.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Duration;

use vmove_types::time::Mono;
use vmove_types::units;

/// So many within a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// How many.
    pub count: u32,
    /// Within this.
    pub within: Duration,
}

/// How often a hook may run for a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtMost {
    /// At most so often.
    Rate(Rate),
    /// As often as it wants.
    Unlimited,
}

/// A hook that may run more often than this within its time keeps too much in mind.
const MOST: u32 = 10_000;

impl Rate {
    /// Reads `3 in 1h`.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("expected a count and a time such as \"3 in 1h\", or \"unlimited\", found \"{text}\"");
        let (count, within) = text.split_once(" in ").ok_or_else(wrong)?;
        let count = count.trim().parse().map_err(|_| wrong())?;
        let within = units::parse_duration(within.trim()).map_err(|_| wrong())?;
        if !(1..=MOST).contains(&count) || within.is_zero() {
            return Err(format!("expected 1 to {MOST} within more than no time, found \"{text}\""));
        }
        Ok(Self { count, within })
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.within.as_millis();
        match ms {
            ms if ms % 3_600_000 == 0 => write!(f, "{} in {}h", self.count, ms / 3_600_000),
            ms if ms % 60_000 == 0 => write!(f, "{} in {}m", self.count, ms / 60_000),
            ms if ms % 1000 == 0 => write!(f, "{} in {}s", self.count, ms / 1000),
            ms => write!(f, "{} in {ms}ms", self.count),
        }
    }
}

/// When a hook ran, by VM.
#[derive(Debug, Default)]
pub(crate) struct Runs(HashMap<Option<String>, VecDeque<Mono>>);

impl Runs {
    /// Whether it may run now; if so, it does.
    pub(crate) fn take(&mut self, at_most: AtMost, vm: Option<&str>, now: Mono) -> bool {
        let AtMost::Rate(rate) = at_most else { return true };
        let old = |at: &Mono| now.since(*at) >= rate.within;
        // VMs that are gone are not kept in mind for ever.
        self.0.retain(|_, times| times.back().is_some_and(|last| !old(last)));
        let times = self.0.entry(vm.map(str::to_owned)).or_default();
        while times.front().is_some_and(old) {
            times.pop_front();
        }
        let free = times.len() < rate.count as usize;
        if free {
            times.push_back(now);
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_so_many_within_the_time_and_each_vm_has_its_own() {
        let rate = AtMost::Rate(Rate::read("2 in 10s").unwrap());
        let mut runs = Runs::default();
        let at = |s: u64| Mono(s * 1_000_000_000);
        let mut takes = |vm: &str, s: u64| runs.take(rate, Some(vm), at(s));
        assert!(takes("a", 1) && takes("a", 2) && !takes("a", 3) && takes("b", 3));
        assert!(takes("a", 11) && !takes("a", 11) && takes("a", 12));
        assert_eq!(Rate::read("2 in 10s").unwrap().to_string(), "2 in 10s");
        assert_eq!(Rate::read("1 in 120m").unwrap().to_string(), "1 in 2h");
        for wrong in ["", "2", "x in 1s", "0 in 1s", "2 in 0", "2 in 5"] {
            assert!(Rate::read(wrong).unwrap_err().contains("expected"), "{wrong}");
        }
    }
}
