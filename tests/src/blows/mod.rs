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
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use deck::{Card, Combination, Moment};
use field::{Field, Kind};
use harm::Harm;
use operator::{Settled, settle, settle_at_rest};
use strike::{Lengths, strike};
use tally::Tally;

/// A recovery that takes longer is looked into: its logs are kept.
const SLOW: Duration = Duration::from_secs(20);

/// What a soak is to do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Decides what each step does.
    pub seed: u64,
    /// The first step, from 0.
    pub first: u64,
    /// When no further step begins.
    pub until: Until,
    /// What it deals from.
    pub deck: Vec<Combination>,
    /// The options that chose this deck, to take a step again.
    pub options: String,
    /// How long freezes, black holes and full disks last.
    pub lengths: Lengths,
    /// Fields that take steps at the same time, since most steps wait.
    pub lanes: usize,
    /// What moves.
    pub guest: Kind,
}

/// What ends a soak.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    /// So many steps.
    Steps(u64),
    /// Steps with so many migrations among them.
    Moves(u64),
    /// This time.
    Time(Duration),
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
pub fn soak(plan: &Plan, booted: &Path, say: impl FnMut(&str) + Send) -> Result<Tally> {
    ensure!(!plan.deck.is_empty(), "there is no such blow; docs/testing.md names them all");
    let migrates = plan.deck.iter().any(|(moment, ..)| moment.migrates());
    ensure!(
        migrates || !matches!(plan.until, Until::Moves(_)),
        "in none of these steps is there a migration: give --minutes"
    );
    let table = Table {
        plan,
        booted,
        began: Instant::now(),
        dealt: Mutex::default(),
        report: Mutex::new((Tally::default(), say)),
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..plan.lanes.max(1)).map(|_| scope.spawn(|| table.lane())).collect();
        lanes.into_iter().try_for_each(|lane| lane.join().ok().context("a lane panicked")?)
    })?;
    let (mut tally, _) = table.report.into_inner().unwrap_or_else(PoisonError::into_inner);
    tally.took(table.began.elapsed());
    Ok(tally)
}

/// What lanes share: the deck from which they are dealt, and the report.
struct Table<'a, S> {
    plan: &'a Plan,
    booted: &'a Path,
    began: Instant,
    dealt: Mutex<Dealt>,
    report: Mutex<(Tally, S)>,
}

/// How many cards have been dealt.
#[derive(Debug, Default)]
struct Dealt {
    steps: u64,
    moves: u64,
    /// A lane cannot go on: nobody is dealt any more.
    over: bool,
}

impl<S: FnMut(&str)> Table<'_, S> {
    /// Takes steps on a field of its own until none is left.
    fn lane(&self) -> Result<()> {
        let mut field = None;
        while let Some((step, card)) = self.deal() {
            let on = match field.take() {
                Some(on) => on,
                None => Field::start(self.booted, self.plan.guest)
                    .inspect_err(|_| locked(&self.dealt).over = true)?,
            };
            field = self.step(on, step, &card);
        }
        if let Some(field) = field
            && let Err(error) = aftermath::nothing_left(field)
        {
            let (tally, say) = &mut *locked(&self.report);
            tally.at_the_end(&error);
            say(&format!("at the end: {error:#}"));
        }
        Ok(())
    }

    /// The next step, and its card.
    fn deal(&self) -> Option<(u64, Card)> {
        let plan = self.plan;
        let mut dealt = locked(&self.dealt);
        let enough = match plan.until {
            Until::Steps(steps) => dealt.steps >= steps,
            Until::Moves(moves) => dealt.moves >= moves,
            Until::Time(time) => self.began.elapsed() >= time,
        };
        if enough || dealt.over {
            return None;
        }
        let step = plan.first + dealt.steps;
        let card = deck::card(plan.seed, step, &plan.deck)?;
        dealt.steps += 1;
        dealt.moves += u64::from(card.moment.migrates());
        Some((step, card))
    }

    /// Takes a step. Gives the field back unless it was harmed.
    fn step(&self, mut field: Field, step: u64, card: &Card) -> Option<Field> {
        let at = self.began.elapsed().as_secs_f64();
        let done = take(&mut field, card, &self.plan.lengths);
        let (tally, say) = &mut *locked(&self.report);
        match done {
            Ok(done) => {
                say(&told(step, at, card, &done));
                if matches!(done, Step::Survived(Some(time)) if time > SLOW) {
                    let name = format!("vmove-soak-slow-{}-{step}", self.plan.seed);
                    match field.copy_logs(&std::env::temp_dir().join(name)) {
                        Ok(folder) => say(&format!("      so late: its logs are in {}", folder.display())),
                        Err(error) => {
                            say(&format!("      so late, and its logs could not be copied: {error}"));
                        }
                    }
                }
                match done {
                    Step::Survived(recovery) => tally.note_survived(card, recovery),
                    Step::Ended => tally.ended(card),
                    Step::Missed => tally.missed(card),
                }
                Some(field)
            }
            Err(error) => {
                tally.harmed(card, &error);
                field.keep();
                let again = again(self.plan, step);
                // Some have the end of a log with them, which is also in the folder.
                let error: String = format!("{error:#}").chars().take(600).collect();
                let logs = field.sandbox().path().display();
                say(&format!(
                    "{step:5} {at:6.1} s {card}: {error}\n      logs are in {logs}\n      again: {again}"
                ));
                None
            }
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
                crate::scene::gone_from(node).map_err(|e| Harm::of(harm::Kind::Left, format!("{e:#}")))?;
            }
            field.begin_anew()?;
            aftermath::check(field, field.home, field::Seen::default())?;
            Ok(Step::Ended)
        }
        None => Err(Harm::of(harm::Kind::Lost, "the guest ended, and its own QEMU was not killed")),
    }
}
