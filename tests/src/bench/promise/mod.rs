//! `./run bench promise`: what migrations promise beforehand beside what was measured, over many moves of drawn guests over drawn links.
//!
//! The guests are [payloads](crate::payload), which differ in how much memory they hold, how much of it they write and how fast; the links differ by
//! `--bandwidth`. Two daemons remember what earlier moves took, as any would.

mod draw;
mod plot;
mod report;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::Value;

use crate::beacon;
use crate::blows::deck::Dice;
use crate::daemon::{Node, NodeOptions};
use crate::guest::Accel;
use crate::payload::{self, KvmPages};
use crate::sandbox::Sandbox;
use crate::scene::vmove;

pub use draw::{Drawn, Link};
pub use plot::picture;
pub use report::{Report, text};

const NAME: &str = "guest";
/// For the end of the move before.
const SETTLED_TIMEOUT: Duration = Duration::from_secs(10);
/// So much longer or shorter than promised may be what is measured.
pub const RIGHT: f64 = 1.5;

/// What was promised of a figure, and what was measured. Unit: milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Pair {
    /// Beforehand.
    pub promised: f64,
    /// Afterwards.
    pub measured: f64,
}

impl Pair {
    /// Whether they differ by no more than [`RIGHT`].
    #[must_use]
    pub fn is_right(self) -> bool {
        let ratio = self.measured / self.promised;
        (RIGHT.recip()..=RIGHT).contains(&ratio)
    }

    /// Whether it was no more than so many times what was promised.
    #[must_use]
    pub fn is_kept(self, times: f64) -> bool {
        self.measured <= times * self.promised
    }
}

/// One move.
#[derive(Debug, Clone, Serialize)]
pub struct Move {
    /// The guest.
    pub guest: Drawn,
    /// The link, and how the mode was asked for.
    pub link: Link,
    /// Mode that was promised and taken.
    pub mode: String,
    /// Earlier moves to that node.
    pub known: usize,
    /// The guest's pause, as it usually is.
    pub pause: Pair,
    /// The same beside what it was to be at most in nine of ten moves.
    pub pause_up_to: Pair,
    /// The whole.
    pub time: Pair,
    /// What the promise was computed from.
    pub basis: String,
}

/// What a move came to.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It was promised, and done.
    Moved(Box<Move>),
    /// Nothing was promised, and it did not begin. Why.
    Refused(String),
}

/// Those that were done.
fn done<'a>(outcomes: &'a [Outcome]) -> Vec<&'a Move> {
    let moved = |outcome: &'a Outcome| match outcome {
        Outcome::Moved(one) => Some(&**one),
        Outcome::Refused(_) => None,
    };
    outcomes.iter().filter_map(moved).collect()
}

/// Moves `guests` drawn guests to and fro, each so many times.
///
/// # Errors
/// When a node or a guest does not start, a move fails that was promised, or a guest has found wrong memory.
pub fn run(guests: usize, moves: usize, seed: u64, accel: Accel) -> Result<Vec<Outcome>> {
    payload::ready(accel)?;
    let mut dice = Dice::from(seed);
    let sandbox = Sandbox::new()?;
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default())?;
    let mut outcomes = Vec::new();
    let mut known = [0, 0];
    for number in 0..guests {
        let drawn = Drawn::new(&mut dice);
        eprintln!("guest {} of {guests}: {drawn}", number + 1);
        let guest = payload::guest(sandbox.path(), accel, &drawn.config(), KvmPages::None)?;
        a.run_guest(NAME, "thp", &guest)?;
        let mut here = 0;
        for _ in 0..moves {
            let link = Link::new(&mut dice);
            let (from, to) = if here == 0 { (&a, "b") } else { (&b, "a") };
            let outcome = one(from, to, drawn, link, known[here])?;
            if let Outcome::Moved(moved) = &outcome {
                eprintln!("  {}", report::line(moved));
                known[here] += 1;
                here = 1 - here;
            }
            outcomes.push(outcome);
        }
        let at = if here == 0 { &a } else { &b };
        sound(at)?;
        at.ask(&["stop", NAME, "--force"])?;
    }
    Ok(outcomes)
}

fn one(from: &Node, to: &str, guest: Drawn, link: Link, known: usize) -> Result<Outcome> {
    let options = link.options();
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    // A goal that any move keeps: it is what asks for a promise.
    let command = [&["migrate", NAME, "--to", to, "--within", "30m"], &options[..]].concat();
    let deadline = Instant::now() + SETTLED_TIMEOUT;
    let end = loop {
        let end = vmove(from, &command)?;
        // The node that has just got the guest may not have heard yet that the other one is free.
        if end.answer["code"] != "busy" || Instant::now() > deadline {
            break end;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    if end.code == 3 {
        return Ok(Outcome::Refused(end.error().to_owned()));
    }
    ensure!(end.code == 0, "a move ended with {}: {} {}", end.code, end.answer, end.said);
    let number =
        |value: &Value, key: &str| value[key].as_f64().with_context(|| format!("no {key} in {value}"));
    let (answer, promise) = (&end.answer, &end.answer["promise"]);
    let downtime = number(answer, "downtime_ms")?;
    Ok(Outcome::Moved(Box::new(Move {
        guest,
        link,
        mode: answer["mode"].as_str().unwrap_or_default().to_owned(),
        known,
        pause: Pair { promised: number(promise, "pause_ms")?, measured: downtime },
        pause_up_to: Pair { promised: number(promise, "pause_up_to_ms")?, measured: downtime },
        time: Pair { promised: number(promise, "time_ms")?, measured: number(answer, "total_ms")? },
        basis: promise["basis"].as_str().unwrap_or_default().to_owned(),
    })))
}

/// The guest works, and has found no error.
fn sound(node: &Node) -> Result<()> {
    let (_, page) = beacon::find(&node.vm(NAME)?.ram_files())?;
    let now = page.read().context("no beacon")?;
    ensure!(now.errors == 0, "the guest found wrong memory: {}", now.verdict());
    Ok(())
}
