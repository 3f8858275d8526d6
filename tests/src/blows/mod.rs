//! `./run soak --blows`: a guest moves to and fro between two daemons, is forked and promoted, and at random moments something is killed,
//! frozen, cut off or filled. Afterwards the guest must be where it belongs, once and whole, and nothing may be left.

pub mod aftermath;
pub mod deck;
pub mod family;
pub mod field;
pub mod harm;
pub mod moment;
pub mod operator;
pub mod patience;
pub mod strike;
pub mod tally;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use deck::{Card, Combination, Moment};
use field::Field;
use harm::{Harm, Kind};
use operator::{Settled, settle, settle_at_rest};
use strike::{Lengths, strike};
use tally::Tally;

/// What a soak is to do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Decides what each step does.
    pub seed: u64,
    /// The first step, from 0.
    pub first: u64,
    /// It ends after so many steps,
    pub steps: Option<u64>,
    /// or with the first step that ends after this time.
    pub time: Option<Duration>,
    /// What it deals from.
    pub deck: Vec<Combination>,
    /// The options that chose this deck, to take a step again.
    pub options: String,
    /// How long freezes, black holes and full disks last.
    pub lengths: Lengths,
}

/// Longer than a daemon waits for the other side.
pub const BEYOND_TIMEOUTS: Lengths =
    Lengths { silence: Duration::from_secs(18), full: Duration::from_secs(2) };

/// How a step ended.
#[derive(Debug)]
enum Step {
    Survived(Option<Duration>),
    /// The guest ended with its own QEMU.
    Ended,
    Missed,
}

/// Takes the steps of `plan`. `booted` is a folder for guests that have booted; `say` is told of each step.
///
/// # Errors
/// When there are no such cards, or no field can be set up. Harm is no error: the tally has it.
pub fn soak(plan: &Plan, booted: &Path, mut say: impl FnMut(&str)) -> Result<Tally> {
    let began = Instant::now();
    let mut tally = Tally::default();
    let mut field = None;
    let mut step = plan.first;
    while plan.steps.is_none_or(|steps| step - plan.first < steps)
        && plan.time.is_none_or(|time| began.elapsed() < time)
    {
        let Some(card) = deck::card(plan.seed, step, &plan.deck) else {
            bail!("there is no such blow; docs/testing.md names them all");
        };
        let mut on = match field.take() {
            Some(on) => on,
            None => Field::start(booted)?,
        };
        let at = began.elapsed().as_secs_f64();
        match take(&mut on, &card, &plan.lengths) {
            Ok(done) => {
                say(&told(step, at, &card, &done));
                match done {
                    Step::Survived(recovery) => tally.note_survived(&card, recovery),
                    Step::Ended => tally.ended(&card),
                    Step::Missed => tally.missed(),
                }
                field = Some(on);
            }
            Err(error) => {
                tally.harmed(&card, &error);
                on.keep();
                let again = again(plan, step);
                // Some have the end of a log with them, which is also in the folder.
                let error: String = format!("{error:#}").chars().take(600).collect();
                let logs = on.sandbox().path().display();
                say(&format!(
                    "{step:5} {at:6.1} s {card}: {error}\n      logs are in {logs}\n      again: {again}"
                ));
            }
        }
        step += 1;
    }
    if let Some(field) = field
        && let Err(error) = aftermath::nothing_left(field)
    {
        tally.at_the_end(&error);
        say(&format!("at the end: {error:#}"));
    }
    tally.took(began.elapsed());
    Ok(tally)
}

fn told(step: u64, at: f64, card: &Card, done: &Step) -> String {
    let end = match done {
        Step::Survived(Some(time)) => format!("survived, {:.0} ms", time.as_secs_f64() * 1e3),
        Step::Survived(None) => "survived".into(),
        Step::Ended => "the guest ended with its own QEMU; a new one was started".into(),
        Step::Missed => "came too late".into(),
    };
    format!("{step:5} {at:6.1} s {card}: {end}")
}

/// The command that takes this step only.
#[must_use]
pub fn again(plan: &Plan, step: u64) -> String {
    format!("./run soak --blows --seed {} --step {step}{}", plan.seed, plan.options)
}

/// One step, from a guest at rest to a guest at rest.
fn take(field: &mut Field, card: &Card, lengths: &Lengths) -> Result<Step> {
    if matches!(card.moment, Moment::Fork | Moment::Promote) {
        let Some((struck, settled)) = family::step(field, card, lengths)? else {
            aftermath::at_rest(field, field.home)?;
            return Ok(Step::Missed);
        };
        // The RAM file shows nothing of a guest whose memory is private: nobody watched.
        return close(field, struck.owner_killed, settled, field::Seen::default());
    }
    let watch = field.watch()?;
    let (id, reached) = if card.moment.migrates() {
        let (id, reached) = moment::bring(field, card)?;
        (Some(id), reached)
    } else {
        (None, true)
    };
    let struck = if reached { strike(field, card, id.as_deref(), lengths)? } else { None };
    let Some(struck) = struck else {
        field.link().heal();
        let nothing = strike::Struck { undone: Instant::now(), owner_killed: false };
        let settled = match &id {
            Some(id) => settle(field, id, &nothing)?,
            None => settle_at_rest(field, card.victim, &nothing)?,
        };
        close(field, false, settled, watch.seen())?;
        return Ok(Step::Missed);
    };
    let settled = match &id {
        Some(id) => settle(field, id, &struck)?,
        None => settle_at_rest(field, card.victim, &struck)?,
    };
    close(field, struck.owner_killed, settled, watch.seen())
}

/// Checks what a step has left, and starts a new guest if the old one ended.
fn close(field: &mut Field, may_end: bool, settled: Settled, seen: field::Seen) -> Result<Step> {
    match settled.at {
        Some(at) => {
            aftermath::check(field, at, seen)?;
            Ok(Step::Survived(settled.recovery))
        }
        None if may_end => {
            for node in &field.nodes {
                crate::scene::gone_from(node).map_err(|e| Harm::of(Kind::Left, format!("{e:#}")))?;
            }
            field.begin_anew()?;
            aftermath::check(field, field.home, field::Seen::default())?;
            Ok(Step::Ended)
        }
        None => Err(Harm::of(Kind::Lost, "the guest ended, and its own QEMU was not killed")),
    }
}
