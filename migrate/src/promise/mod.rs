//! What a migration will be like: computed beforehand from what the guest writes, what the link carries, and what earlier migrations to the node have
//! shown. Arithmetic only.
//!
//! [`promise`] takes the mode that keeps all goals, the safest first. If none does, it says which goal fails, and what could be kept.

mod course;
pub(crate) mod reads;
mod writes;

use course::whole;
pub use course::{Beside, Course, Diverges, Outlook, course};
pub use writes::Writes;

use vmove_types::goal::{Goal, Goals};
use vmove_types::promise::Promise;
use vmove_types::spec::Mode;
use vmove_types::units::{format_bytes, format_ms, format_rate};

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
    const fn of(&self, goal: Goal) -> f64 {
        match goal {
            Goal::MaxPause => self.course.pause_ms,
            Goal::Within => self.course.time_ms,
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
    let outlook = &Outlook { within_ms: goals.within_ms.map(vmove_types::units::to_f64), ..*outlook };
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
        return Err(Broken { why: broken(goals, &ways, &diverging, &basis) });
    };
    let holds = |rate: f64| {
        let busier = Outlook { writes: busier(outlook, rate), ..*outlook };
        allowed
            .iter()
            .any(|mode| course(*mode, &busier).is_ok_and(|course| Way { mode: *mode, course }.keeps(goals)))
    };
    Ok(Promise {
        mode: way.mode,
        pause_ms: way.course.pause_ms,
        time_ms: way.course.time_ms,
        sent_bytes: whole(way.course.sent_bytes),
        rounds: way.course.rounds,
        dirty_bytes_per_s: outlook.writes.bytes_per_s,
        link_bytes_per_s: outlook.link_bytes_per_s,
        holds_to_bytes_per_s: if goals.is_empty() { None } else { highest(outlook, holds) },
        basis,
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
    format!(
        "{} in memory, of which the guest writes {} at {}; {basis}",
        format_bytes(whole(outlook.content_bytes)),
        format_bytes(whole(outlook.writes.reach)),
        format_rate(outlook.writes.bytes_per_s)
    )
}

/// Which goal cannot be kept, and what could be.
fn broken(goals: &Goals, ways: &[Way], diverging: &[String], basis: &str) -> String {
    let mut parts = Vec::new();
    for (goal, wanted) in goals.each() {
        let best = ways.iter().min_by(|a, b| a.of(goal).total_cmp(&b.of(goal)));
        if let Some(way) = best.filter(|way| way.of(goal) > wanted) {
            parts.push(format!(
                "{goal} {} cannot be kept: {} would take {}",
                short(wanted),
                way.mode,
                format_ms(way.of(goal))
            ));
        }
    }
    if parts.is_empty() {
        let wanted: Vec<_> = goals.each().map(|(goal, ms)| format!("{goal} {}", short(ms))).collect();
        let each: Vec<_> = ways
            .iter()
            .map(|way| {
                let (pause, time) = (format_ms(way.course.pause_ms), format_ms(way.course.time_ms));
                format!("{} would pause for {pause} and take {time}", way.mode)
            })
            .collect();
        parts.push(match wanted.as_slice() {
            [] => "no mode comes to an end".to_owned(),
            _ => format!("no mode keeps {}: {}", wanted.join(" and "), each.join("; ")),
        });
    }
    parts.extend(diverging.iter().cloned());
    let could = what_could(goals, ways);
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
            could.push(format!("{goal} {} by {}", roomy(way.of(goal)), way.mode));
        }
    }
    if could.is_empty()
        && let Some(way) = ways.first()
    {
        let all: Vec<_> = goals
            .each()
            .map(|(goal, wanted)| {
                let ms = way.of(goal);
                if ms > wanted {
                    format!("{goal} {}", roomy(ms))
                } else {
                    format!("{goal} {}", short(wanted))
                }
            })
            .collect();
        if !all.is_empty() {
            could.push(format!("{} by {}", all.join(" and "), way.mode));
        }
    }
    could
}

/// A time as an option takes it.
fn short(ms: f64) -> String {
    if ms >= 1000.0 { format!("{}s", (ms / 100.0).round() / 10.0) } else { format!("{ms:.0}ms") }
}

/// A time that is a goal with some room, as an option takes it.
fn roomy(ms: f64) -> String {
    let ms = ms * ROOM;
    if ms >= 1000.0 { format!("{:.0}s", (ms / 1000.0).ceil()) } else { format!("{:.0}ms", ms.ceil()) }
}

#[cfg(test)]
mod tests;
