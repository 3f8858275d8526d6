//! The promises about forks. Each is about a fork of one size; other sizes are reported and not judged.

use super::again::{Again, Series};
use super::local::{Forks, Times};
use super::report::Report;
use crate::bench::goals::Goal;
use crate::bench::spread::Spread;

/// Memory of the guest (MiB), number of children, and the limits in milliseconds until all children run: prepared, and not prepared.
const RUNNING: [(u32, usize, Option<f64>, Option<f64>); 2] =
    [(1024, 32, Some(300.0), Some(1500.0)), (256, 100, Some(1500.0), None)];
/// Longest pause of a guest that is forked or saved.
const PAUSE_MS: f64 = 10.0;
/// Largest number of copies of the guest's memory on the host: one, and some allowance for pages that nobody had touched before the
/// fork.
const TEMPLATES: f64 = 1.05;
/// Number of hosts, and how often the guest's memory may cross the parent's link to them by multicast.
const HOSTS: (u8, f64) = (4, 1.15);

/// All promises for which `report` has figures.
#[must_use]
pub fn judge(report: &Report) -> Vec<Goal> {
    let mut goals = Vec::new();
    for forks in &report.forks {
        let size = |(memory, children, ..): &&(u32, usize, _, _)| {
            (*memory, *children) == (forks.memory_mib, forks.children)
        };
        if let Some((_, _, prepared, cold)) = RUNNING.iter().find(size) {
            forked(&mut goals, forks, "prepared", &forks.prepared, *prepared);
            forked(&mut goals, forks, "not prepared", &forks.cold, *cold);
        }
    }
    if let Some(spread) = Spread::of(&report.saves_ms) {
        let promise = "`template save` of 1024 MiB (thp): pause in ms";
        goals.push(Goal::median_at_most(PAUSE_MS, spread, promise));
    }
    if let Some(series) = &report.again {
        forked_again(&mut goals, series);
    }
    if let Some(memory) = &report.memory {
        let promise = format!("{} idle children: templates / the guest's memory", memory.children.len());
        goals.push(Goal::at_most(TEMPLATES, memory.template_mib / memory.guest_mib, promise));
    }
    for spreading in report.hosts.iter().filter(|s| s.hosts == HOSTS.0 && s.way == "multicast") {
        let what = format!("{} hosts, {}", HOSTS.0, spreading.label());
        if spreading.loss > 0.0 {
            let unverified = f64::from(spreading.hosts) - spreading.verified as f64;
            goals.push(Goal::at_most(0.0, unverified, format!("{what}: children not verified")));
        } else {
            let promise = format!("{what}: bytes on the parent's link / non-zero memory");
            goals.push(Goal::at_most(HOSTS.1, spreading.copies(), promise));
        }
    }
    goals
}

/// How much longer a fork may take than the first, and a migration right after a fork than one without it.
const AGAIN: f64 = 1.5;
const MOVED: f64 = 1.2;
/// Most work that a guest of 1 GiB may lose by a fork, in milliseconds.
const LOST_MS: f64 = 150.0;

fn forked_again(goals: &mut Vec<Goal>, series: &Series) {
    let what = format!("{} MiB, forked {} times, one each second", series.memory_mib, series.forks.len());
    let worst = |of: fn(&Again) -> f64| series.forks.iter().map(of).fold(0.0, f64::max);
    if let Some(first) = series.forks.first() {
        let ratio = worst(|fork| fork.answered_ms) / first.answered_ms;
        goals.push(Goal::at_most(AGAIN, ratio, format!("{what}: longest / first")));
        let ratio = worst(|fork| fork.all_running_ms) / first.all_running_ms;
        goals.push(Goal::at_most(AGAIN, ratio, format!("{what}: longest until the child runs / first")));
        let still = worst(|fork| fork.stood_still_ms);
        goals.push(Goal::at_most(PAUSE_MS, still, format!("{what}: most that it stood still, in ms")));
        let lost = worst(|fork| fork.lost_work_ms);
        goals.push(Goal::at_most(LOST_MS, lost, format!("{what}: most work lost, in ms")));
    }
    if let (Some(without), Some(with)) =
        (Spread::of(&series.moves_ms), Spread::of(&series.moves_after_fork_ms))
    {
        let promise = format!("{what}: migration right after a fork / without one (medians)");
        goals.push(Goal::at_most(MOVED, with.median / without.median, promise));
    }
}

fn forked(goals: &mut Vec<Goal>, forks: &Forks, how: &str, times: &Times, limit: Option<f64>) {
    let what = format!("{} children of {} MiB, {how}", forks.children, forks.memory_mib);
    if let (Some(limit), Some(spread)) = (limit, Spread::of(&times.all_running_ms)) {
        goals.push(Goal::median_at_most(limit, spread, format!("{what}: all running, in ms")));
    }
    if let Some(spread) = Spread::of(&times.pause_ms) {
        goals.push(Goal::median_at_most(PAUSE_MS, spread, format!("{what} (thp): parent's pause in ms")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::fork::report::tests::report;

    #[test]
    fn the_median_decides_and_other_sizes_are_not_judged() {
        let mut report = report();
        let goals = judge(&report);
        let lines: Vec<_> = goals.iter().map(Goal::line).collect();
        assert!(lines[0].starts_with("reached") && lines[0].contains("211, from 181 to 400"), "{lines:?}");
        assert!(lines[2].starts_with("FALLS SHORT") && lines[2].contains("1600"), "{lines:?}");
        assert_eq!(goals.iter().filter(|goal| !goal.holds).count(), 1, "{lines:?}");
        assert!(!lines.iter().any(|line| line.contains("8 children")), "{lines:?}");
        if let Some(memory) = &mut report.memory {
            memory.template_mib *= 2.0;
        }
        assert_eq!(
            judge(&report).iter().filter(|goal| !goal.holds).count(),
            2,
            "two templates are one too many"
        );
    }
}
