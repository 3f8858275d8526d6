//! The report: what was struck how often, and what came of it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::deck::{Blow, Card, Combination, Victim};
use super::harm::{Harm, Kind};

/// What came of one combination.
#[derive(Debug, Default)]
struct Row {
    tried: u64,
    survived: u64,
    /// Guests that ended with their own QEMU, as it must be.
    ended: u64,
    recovery_ms: Vec<f64>,
    harm: HarmCount,
}

/// How often each harm was found.
#[derive(Debug, Default, Clone, Copy)]
struct HarmCount {
    corrupt: u64,
    doubled: u64,
    lost: u64,
    stuck: u64,
    left: u64,
    /// The soak could not go on.
    failed: u64,
}

impl HarmCount {
    const fn all(&self) -> u64 {
        self.corrupt + self.doubled + self.lost + self.stuck + self.left + self.failed
    }

    const fn add(&mut self, other: &Self) {
        self.corrupt += other.corrupt;
        self.doubled += other.doubled;
        self.lost += other.lost;
        self.stuck += other.stuck;
        self.left += other.left;
        self.failed += other.failed;
    }

    fn note(&mut self, error: &anyhow::Error) {
        match error.downcast_ref::<Harm>().map(|harm| harm.kind) {
            Some(Kind::Corrupt(pages)) => self.corrupt += pages,
            Some(Kind::Doubled) => self.doubled += 1,
            Some(Kind::Lost) => self.lost += 1,
            Some(Kind::Stuck) => self.stuck += 1,
            Some(Kind::Left) => self.left += 1,
            None => self.failed += 1,
        }
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Tally {
    rows: BTreeMap<Combination, Row>,
    at_the_end: HarmCount,
    steps: u64,
    migrations: u64,
    missed: u64,
    seconds: f64,
}

impl Tally {
    /// A blow that the guest survived, after this time.
    pub fn note_survived(&mut self, card: &Card, recovery: Option<Duration>) {
        let row = self.row(card);
        row.survived += 1;
        row.recovery_ms.extend(recovery.map(|time| time.as_secs_f64() * 1e3));
    }

    /// A guest that ended with its own QEMU.
    pub fn ended(&mut self, card: &Card) {
        self.row(card).ended += 1;
    }

    /// A step that did harm, or that could not be taken.
    pub fn harmed(&mut self, card: &Card, error: &anyhow::Error) {
        self.row(card).harm.note(error);
    }

    /// A step whose victim was not there, or whose migration ended before its moment.
    pub fn missed(&mut self, card: &Card) {
        self.step(card);
        self.missed += 1;
    }

    /// What was found after the last step.
    pub fn at_the_end(&mut self, error: &anyhow::Error) {
        self.at_the_end.note(error);
    }

    /// How long it all took.
    pub const fn took(&mut self, time: Duration) {
        self.seconds = time.as_secs_f64();
    }

    fn step(&mut self, card: &Card) {
        self.steps += 1;
        self.migrations += u64::from(card.moment.migrates());
    }

    fn row(&mut self, card: &Card) -> &mut Row {
        self.step(card);
        let row = self.rows.entry((card.moment, card.victim, card.blow)).or_default();
        row.tried += 1;
        row
    }

    fn harm(&self) -> HarmCount {
        let mut sum = self.at_the_end;
        self.rows.values().for_each(|row| sum.add(&row.harm));
        sum
    }

    /// Blows that were dealt.
    #[must_use]
    pub fn tried(&self) -> u64 {
        self.rows.values().map(|row| row.tried).sum()
    }

    /// Those of them that the guest survived.
    #[must_use]
    pub fn survived(&self) -> u64 {
        self.rows.values().map(|row| row.survived).sum()
    }

    /// Whether nothing was found that must not be.
    #[must_use]
    pub fn is_harmless(&self) -> bool {
        self.harm().all() == 0
    }

    /// For people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = String::from(
            "moment      victim            blow        tried survived ended  recovery ms p50/max  corrupt doubled lost stuck left failed\n",
        );
        for ((moment, victim, blow), row) in &self.rows {
            let (p50, max) = quantiles(&row.recovery_ms);
            let Row { tried, survived, ended, harm, .. } = row;
            let HarmCount { corrupt, doubled, lost, stuck, left, failed } = harm;
            let _ = writeln!(
                out,
                "{moment:<11} {victim:<17} {blow:<11} {tried:>5} {survived:>8} {ended:>5} {p50:>11.0} / {max:>7.0} {corrupt:>8} {doubled:>7} {lost:>4} {stuck:>5} {left:>4} {failed:>6}",
            );
        }
        let (p50, max) = quantiles(&self.recoveries(|_| true));
        let (restarted_p50, restarted_max) = quantiles(&self.recoveries(is_restart));
        let HarmCount { corrupt, doubled, lost, stuck, left, failed } = self.harm();
        let ended: u64 = self.rows.values().map(|row| row.ended).sum();
        let _ = writeln!(
            out,
            "\n{} migrations, {} blows in {:.0} s: {} survived, {} guests ended with their own QEMU, {} steps came too late\n\
             recovery p50 {p50:.0} ms, max {max:.0} ms; after a daemon's restart p50 {restarted_p50:.0} ms, max {restarted_max:.0} ms\n\
             corrupt {corrupt}, doubled {doubled}, lost {lost}, stuck {stuck}, left over {left}, failed {failed}",
            self.migrations,
            self.tried(),
            self.seconds,
            self.survived(),
            ended,
            self.missed,
        );
        out
    }

    /// For programs.
    #[must_use]
    pub fn json(&self, seed: u64) -> Value {
        let harm = |h: &HarmCount| json!({"corrupt": h.corrupt, "doubled": h.doubled, "lost": h.lost, "stuck": h.stuck, "left": h.left, "failed": h.failed});
        let rows = self.rows.iter().map(|((moment, victim, blow), row)| {
            let (p50, max) = quantiles(&row.recovery_ms);
            json!({
                "moment": moment.to_string(), "victim": victim.to_string(), "blow": blow.to_string(),
                "tried": row.tried, "survived": row.survived, "ended": row.ended,
                "recovery_p50_ms": p50, "recovery_max_ms": max, "harm": harm(&row.harm),
            })
        });
        let rows: Vec<_> = rows.collect();
        let (p50, max) = quantiles(&self.recoveries(|_| true));
        let (restarted_p50, restarted_max) = quantiles(&self.recoveries(is_restart));
        json!({
            "seed": seed, "steps": self.steps, "migrations": self.migrations, "blows": self.tried(), "missed": self.missed,
            "seconds": self.seconds, "recovery_p50_ms": p50, "recovery_max_ms": max,
            "restart_recovery_p50_ms": restarted_p50, "restart_recovery_max_ms": restarted_max,
            "harm": harm(&self.harm()), "rows": rows,
        })
    }

    fn recoveries(&self, of: impl Fn(&Combination) -> bool) -> Vec<f64> {
        let rows = self.rows.iter().filter(|(combination, _)| of(combination));
        rows.flat_map(|(_, row)| row.recovery_ms.iter().copied()).collect()
    }
}

/// A daemon was killed and started again.
fn is_restart((_, victim, blow): &Combination) -> bool {
    *blow == Blow::Kill && matches!(victim, Victim::Source | Victim::Destination | Victim::Both)
}

/// Median and maximum; 0 of nothing.
fn quantiles(values: &[f64]) -> (f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    (sorted.get(sorted.len() / 2).copied().unwrap_or(0.0), sorted.last().copied().unwrap_or(0.0))
}

#[cfg(test)]
mod tests {
    use super::super::deck::{all, card};
    use super::*;

    #[test]
    fn any_harm_counts() {
        let card = card(1, 0, &all()).expect("a card");
        let mut tally = Tally::default();
        tally.note_survived(&card, Some(Duration::from_millis(20)));
        tally.note_survived(&card, Some(Duration::from_millis(40)));
        assert!(tally.is_harmless());
        tally.harmed(&card, &Harm::of(Kind::Corrupt(3), "three pages"));
        assert!(!tally.is_harmless());
        let json = tally.json(1);
        assert_eq!((&json["blows"], &json["harm"]["corrupt"]), (&json!(3), &json!(3)));
        assert_eq!((&json["recovery_p50_ms"], &json["recovery_max_ms"]), (&json!(40.0), &json!(40.0)));
        assert!(tally.table().contains("corrupt 3, doubled 0"), "{}", tally.table());
        let mut tally = Tally::default();
        tally.at_the_end(&Harm::of(Kind::Left, "a file"));
        assert!(!tally.is_harmless());
        let mut tally = Tally::default();
        tally.harmed(&card, &anyhow::anyhow!("something else"));
        assert_eq!(tally.json(1)["harm"]["failed"], 1);
    }
}
