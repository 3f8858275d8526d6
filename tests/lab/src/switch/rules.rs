//! What the switch does to frames between two hosts.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// What happens to the frames of one direction. The default delivers all of them at once.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Rule {
    /// No frame passes.
    pub cut: bool,
    /// No frame of RoCE v2 passes; others do.
    pub cut_rdma: bool,
    /// Part of the frames that are lost, 0.0 to 1.0.
    pub drop: f64,
    /// Part of the frames to groups (multicast, broadcast) that are lost besides, 0.0 to 1.0.
    pub drop_multicast: f64,
    /// Time that each frame takes longer, in microseconds.
    pub delay_us: u64,
    /// Part of the frames that are held back so that later ones overtake them, 0.0 to 1.0.
    pub reorder: f64,
    /// Megabits per second; 0: as fast as the machine can. Frames that come faster wait: senders feel back pressure,
    /// nothing is lost.
    pub rate_mbit: u64,
}

/// How much later a frame comes that others are to overtake.
pub(super) const HOLD: Duration = Duration::from_millis(2);

impl Rule {
    /// Reads `drop=10% drop-multicast=10% delay=5ms reorder=1% rate=100 cut cut-rdma`, in any order; nothing or `clear` is the default.
    ///
    /// # Errors
    /// A word that is none of these, or a number out of its range.
    pub fn parse(words: &[String]) -> Result<Self> {
        let mut rule = Self::default();
        for word in words {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let what = || {
                format!(
                    "'{word}' is not a rule; expected drop=10% drop-multicast=10% delay=5ms reorder=1% rate=100 cut cut-rdma \
                     clear"
                )
            };
            match name {
                "clear" => rule = Self::default(),
                "cut" => rule.cut = true,
                "cut-rdma" => rule.cut_rdma = true,
                "drop" => rule.drop = part(value).with_context(what)?,
                "drop-multicast" => rule.drop_multicast = part(value).with_context(what)?,
                "reorder" => rule.reorder = part(value).with_context(what)?,
                "delay" => rule.delay_us = micros(value).with_context(what)?,
                "rate" => rule.rate_mbit = value.trim_end_matches("mbit").parse().with_context(what)?,
                _ => bail!(what()),
            }
        }
        Ok(rule)
    }
}

fn part(text: &str) -> Result<f64> {
    let part = match text.strip_suffix('%') {
        Some(percent) => percent.parse::<f64>()? / 100.0,
        None => text.parse()?,
    };
    if !(0.0..=1.0).contains(&part) {
        bail!("{text} is not between 0 and 1 or 0% and 100%");
    }
    Ok(part)
}

fn micros(text: &str) -> Result<u64> {
    if let Some(micros) = text.strip_suffix("us") {
        return Ok(micros.parse()?);
    }
    let millis: u64 = text.strip_suffix("ms").unwrap_or(text).parse()?;
    millis.checked_mul(1000).context("too long")
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.cut {
            return f.write_str("cut");
        }
        if self.cut_rdma {
            f.write_str("cut-rdma ")?;
        }
        if self.drop_multicast > 0.0 {
            write!(f, "drop-multicast={}% ", self.drop_multicast * 100.0)?;
        }
        write!(
            f,
            "drop={}% delay={}us reorder={}% rate={}",
            self.drop * 100.0,
            self.delay_us,
            self.reorder * 100.0,
            self.rate_mbit
        )
    }
}

/// Chances that are the same in every run of a lab.
#[derive(Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Whether something with this chance happens now.
    pub(super) fn roll(&mut self, chance: f64) -> bool {
        if chance <= 0.0 {
            return false;
        }
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let high = u32::try_from(self.0 >> 32).unwrap_or(u32::MAX);
        f64::from(high) / f64::from(u32::MAX) < chance
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Rule> {
        Rule::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn words_make_a_rule_and_others_are_named() {
        let rule = parse("drop=10% delay=5ms reorder=0.5 rate=100mbit").unwrap();
        assert_eq!(rule, Rule { drop: 0.1, delay_us: 5000, reorder: 0.5, rate_mbit: 100, ..Rule::default() });
        assert_eq!(parse("delay=250us").unwrap().delay_us, 250);
        assert_eq!(parse("cut clear").unwrap(), Rule::default());
        assert!((parse("drop-multicast=10%").unwrap().drop_multicast - 0.1).abs() < 1e-9);
        assert!(parse("cut").unwrap().cut);
        assert!(parse("cut-rdma").unwrap().cut_rdma);
        for wrong in ["drop=200%", "drop=", "delay=x", "rate=-1", "lose=1%"] {
            let error = parse(wrong).unwrap_err();
            assert!(format!("{error:#}").contains(wrong), "{error:#}");
        }
    }

    #[test]
    fn chances_come_out_as_asked_and_the_same_again() {
        let throw = |seed| {
            let mut dice = Dice::new(seed);
            (0..10_000).filter(|_| dice.roll(0.1)).count()
        };
        assert!((900..1100).contains(&throw(1)), "{}", throw(1));
        assert_eq!(throw(7), throw(7));
        let mut dice = Dice::new(1);
        assert!((0..1000).all(|_| !dice.roll(0.0) && dice.roll(1.0)));
    }
}
