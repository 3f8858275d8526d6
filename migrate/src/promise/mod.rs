//! What a migration will be like: computed beforehand from what the guest writes, what the link carries, and what earlier migrations to the node have
//! shown. Arithmetic only.
//!
//! [`promise`] takes the mode that keeps all goals, the safest first. If none does, it says which goal fails, and what could be kept.

mod course;
pub(crate) mod reads;
mod writes;

use course::whole;
pub use course::{Beside, Course, Diverges, Hosts, Outlook, course};
pub use writes::Writes;

use vmove_types::goal::{Goal, Goals, Unit};
use vmove_types::promise::Promise;
use vmove_types::spec::Mode;
use vmove_types::units::{format_bytes, format_ms, format_rate, to_f64};

/// The safest first: a peer that is lost cannot hurt a guest that is moved by pre-copy, and what post-copy has not sent ahead is waited for.
const MODES: [Mode; 3] = [Mode::Precopy, Mode::Hybrid, Mode::Postcopy];
/// What could be kept is told with some room.
const ROOM: f64 = 1.2;
/// Steps in which the highest rate of writes is looked for.
const STEPS: u32 = 40;

/// Goals that cannot be kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Broken {
    /// What was expected, what was found, and what could be kept: for people.
    pub why: String,
}

/// A way to go.
#[derive(Debug, Clone, Copy)]
struct Way {
    mode: Mode,
    course: Course,
}

impl Way {
    fn of(&self, goal: Goal) -> f64 {
        match goal {
            Goal::MaxPause => self.course.pause_up_to_ms,
            Goal::Within => self.course.time_ms,
            // Kept by taking longer.
            Goal::HostCpu => self.course.host_cpu_percent.unwrap_or_default(),
        }
    }

    fn keeps(&self, goals: &Goals) -> bool {
        goals.each().all(|(goal, wanted)| self.of(goal) <= wanted)
    }
}

/// What a migration promises. `allowed`: the modes that it may take; `basis`: what the link's rate is known by.
///
/// # Errors
/// [`Broken`] if no such mode keeps all goals.
pub fn promise(goals: &Goals, allowed: &[Mode], outlook: &Outlook, basis: &str) -> Result<Promise, Broken> {
    let outlook = &for_goals(goals, outlook);
    let mut ways = Vec::new();
    let mut diverging = Vec::new();
    for mode in MODES.into_iter().filter(|mode| allowed.contains(mode)) {
        match course(mode, outlook) {
            Ok(course) => ways.push(Way { mode, course }),
            Err(why) => diverging.push(format!("{mode} {why}")),
        }
    }
    let basis = told(outlook, basis);
    let Some(way) = ways.iter().find(|way| way.keeps(goals)) else {
        let larger_share = larger_share(goals, allowed, outlook);
        return Err(Broken { why: broken(goals, (&ways, &diverging), larger_share, &basis) });
    };
    let holds = |rate: f64| {
        let busier = Outlook { writes: busier(outlook, rate), ..*outlook };
        keeping(goals, allowed, &busier).is_some()
    };
    Ok(Promise {
        mode: way.mode,
        pause_ms: way.course.pause_ms,
        pause_up_to_ms: Some(way.course.pause_up_to_ms),
        time_ms: way.course.time_ms,
        sent_bytes: whole(way.course.sent_bytes),
        rounds: way.course.rounds,
        dirty_bytes_per_s: outlook.writes.bytes_per_s,
        link_bytes_per_s: outlook.link_bytes_per_s,
        host_cpu_percent: way.course.host_cpu_percent,
        holds_to_bytes_per_s: if goals.is_empty() { None } else { highest(outlook, holds) },
        basis,
    })
}

/// The outlook with what goals change of it.
fn for_goals(goals: &Goals, outlook: &Outlook) -> Outlook {
    Outlook {
        within_ms: goals.within_ms.map(to_f64),
        hosts: Hosts { share: goals.host_cpu_percent.map(to_f64), ..outlook.hosts },
        ..*outlook
    }
}

/// A mode that keeps all goals.
fn keeping(goals: &Goals, allowed: &[Mode], outlook: &Outlook) -> Option<Mode> {
    let keeps =
        |mode: &Mode| course(*mode, outlook).is_ok_and(|course| Way { mode: *mode, course }.keeps(goals));
    MODES.into_iter().filter(|mode| allowed.contains(mode)).find(keeps)
}

/// The smallest share of the processors with which the other goals are kept, as an option takes it.
fn larger_share(goals: &Goals, allowed: &[Mode], outlook: &Outlook) -> Option<String> {
    let wanted = goals.host_cpu_percent?;
    let mut larger = (wanted + 1..=100).map(|share| Goals { host_cpu_percent: Some(share), ..*goals });
    larger.find_map(|goals| {
        let mode = keeping(&goals, allowed, &for_goals(&goals, outlook))?;
        Some(format!("{} {}% by {mode}", Goal::HostCpu, goals.host_cpu_percent?))
    })
}

/// The same guest if it wrote that much, to all of its memory.
const fn busier(outlook: &Outlook, bytes_per_s: f64) -> Writes {
    Writes { bytes_per_s, reach: outlook.content_bytes }
}

/// Up to which rate of writes something holds, of rates up to twice that of the link: `None` if for all of them.
fn highest(outlook: &Outlook, holds: impl Fn(f64) -> bool) -> Option<f64> {
    let most = 2.0 * outlook.link_bytes_per_s;
    let at = |step: u32| most * f64::from(step) / f64::from(STEPS);
    let failing = (0..=STEPS).find(|step| !holds(at(*step)))?;
    Some(at(failing.saturating_sub(1)))
}

/// What it is computed from.
fn told(outlook: &Outlook, basis: &str) -> String {
    let Hosts { bytes_per_s, is_known, share } = outlook.hosts;
    let how = if is_known { "as earlier moves have shown" } else { "assumed" };
    let processors = share.map(|share| {
        let rate = format_rate(bytes_per_s);
        format!("{share:.0} % of the processors, which all together move {rate} ({how}); ")
    });
    format!(
        "{} in memory, of which the guest writes {} at {}; {}{basis}",
        format_bytes(whole(outlook.content_bytes)),
        format_bytes(whole(outlook.writes.reach)),
        format_rate(outlook.writes.bytes_per_s),
        processors.unwrap_or_default()
    )
}

/// Which goal cannot be kept, and what could be.
fn broken(
    goals: &Goals,
    (ways, diverging): (&[Way], &[String]),
    larger_share: Option<String>,
    basis: &str,
) -> String {
    let mut parts = Vec::new();
    for (goal, wanted) in goals.each() {
        let best = ways.iter().min_by(|a, b| a.of(goal).total_cmp(&b.of(goal)));
        if let Some(way) = best.filter(|way| way.of(goal) > wanted) {
            parts.push(format!(
                "{goal} {} cannot be kept: {} would take {}",
                short(goal, wanted),
                way.mode,
                goal.unit().format(way.of(goal))
            ));
        }
    }
    if parts.is_empty() {
        let wanted: Vec<_> =
            goals.each().map(|(goal, value)| format!("{goal} {}", short(goal, value))).collect();
        let each: Vec<_> = ways
            .iter()
            .map(|way| {
                let (pause, time) = (format_ms(way.course.pause_up_to_ms), format_ms(way.course.time_ms));
                format!("{} would pause for {pause} and take {time}", way.mode)
            })
            .collect();
        parts.push(match wanted.as_slice() {
            [] => "no mode comes to an end".to_owned(),
            _ => format!("no mode keeps {}: {}", wanted.join(" and "), each.join("; ")),
        });
    }
    parts.extend(diverging.iter().cloned());
    let mut could = what_could(goals, ways);
    could.extend(larger_share);
    if !could.is_empty() {
        parts.push(format!("what could be kept: {}", could.join("; or ")));
    }
    format!("{} ({basis})", parts.join("; "))
}

/// For each goal, what it would have to be if the others stay; or all together if that does not help.
fn what_could(goals: &Goals, ways: &[Way]) -> Vec<String> {
    let mut could = Vec::new();
    for (goal, wanted) in goals.each() {
        let others = |way: &&Way| goals.each().all(|(other, ms)| other == goal || way.of(other) <= ms);
        let best = ways.iter().filter(others).min_by(|a, b| a.of(goal).total_cmp(&b.of(goal)));
        if let Some(way) = best.filter(|way| way.of(goal) > wanted) {
            could.push(format!("{goal} {} by {}", roomy(goal, way.of(goal)), way.mode));
        }
    }
    if could.is_empty()
        && let Some(way) = ways.first()
    {
        let all: Vec<_> = goals
            .each()
            .map(|(goal, wanted)| {
                let value = way.of(goal);
                if value > wanted {
                    format!("{goal} {}", roomy(goal, value))
                } else {
                    format!("{goal} {}", short(goal, wanted))
                }
            })
            .collect();
        if !all.is_empty() {
            could.push(format!("{} by {}", all.join(" and "), way.mode));
        }
    }
    could
}

/// A value as the option takes it.
fn short(goal: Goal, value: f64) -> String {
    match goal.unit() {
        Unit::Ms => short_ms(value),
        Unit::Percent => format!("{value:.0}%"),
    }
}

fn short_ms(ms: f64) -> String {
    if ms >= 1000.0 { format!("{}s", (ms / 100.0).round() / 10.0) } else { format!("{ms:.0}ms") }
}

/// A value that is a goal with some room, as the option takes it.
fn roomy(goal: Goal, value: f64) -> String {
    let ms = value * ROOM;
    if goal.unit() == Unit::Percent {
        return format!("{:.0}%", ms.min(100.0).ceil());
    }
    if ms >= 1000.0 { format!("{:.0}s", (ms / 1000.0).ceil()) } else { format!("{:.0}ms", ms.ceil()) }
}

#[cfg(test)]
mod tests;
