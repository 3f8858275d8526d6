//! What an operator does after a blow, and how long the guest and its migration take to go on.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::Value;

use super::deck::Victim;
use super::field::Field;
use super::harm::{Harm, Kind};
use super::patience::Patience;
use super::strike::Struck;
use crate::daemon::Node;
use crate::fleet::qemu_pids;
use crate::scene::{NAME, vmove};

/// For a migration to end once nothing is in its way any more. QEMU itself may take up to a minute to answer on a busy machine.
const END_TIMEOUT: Duration = Duration::from_secs(150);
/// Between two requests of an operator who was told to try again.
const AGAIN: Duration = Duration::from_secs(2);

/// How a step ended.
#[derive(Debug, Clone, Copy)]
pub struct Settled {
    /// The node that has the guest; none if its QEMU was killed as its owner.
    pub at: Option<usize>,
    /// From the end of the blow until the guest was served and the migration went on or had ended.
    pub recovery: Option<Duration>,
}

/// What a daemon says of a migration.
#[derive(Debug, Default)]
struct Told {
    state: String,
    guest: String,
    error: String,
}

impl Told {
    fn of(node: &Node, id: &str) -> Self {
        let Ok((code, status)) = node.rest("GET", &format!("/v1/migrations/{id}"), &Value::Null) else {
            return Self::default();
        };
        if code == 404 {
            // Killed before it had written anything down: there is no such migration.
            return Self { state: "unknown".into(), guest: "source".into(), error: String::new() };
        }
        let word = |field: &str| status["outcome"][field].as_str().unwrap_or_default().to_owned();
        Self { state: word("state"), guest: word("guest"), error: word("error") }
    }

    fn has_ended(&self) -> bool {
        matches!(self.state.as_str(), "done" | "failed" | "refused" | "unknown")
    }

    /// The destination has stopped with an error, and says so to the source that dials.
    fn wants_the_other_side(&self) -> bool {
        self.state == "reconnecting" && self.error.contains("`vmove recover` there")
    }

    /// The guest is the destination's, and the source could not free its side, or note that it did. `recover` tries again.
    fn is_unreleased(&self, field: &Field) -> bool {
        self.state == "failed" && self.guest == "destination" && !qemu_pids(field.source()).is_empty()
    }

    fn is_paused(&self) -> bool {
        self.state == "failed" && self.guest.starts_with("paused")
    }
}

/// Sees the migration to its end.
///
/// # Errors
/// [`Kind::Stuck`] if it does not end.
pub fn settle(field: &Field, id: &str, struck: &Struck) -> Result<Settled> {
    let before = field.beacons();
    let mut recovery = None;
    let mut patience = Patience::of(END_TIMEOUT);
    let mut asked = Instant::now();
    loop {
        let told = Told::of(field.source(), id);
        if recovery.is_none() && (told.state == "running" || told.has_ended() && !told.is_paused()) {
            let now = field.beacons();
            let goes_on = (0..2).any(|n| match (&before[n], &now[n]) {
                (Some(before), Some(now)) => now.beats > before.beats,
                (None, Some(_)) => true,
                _ => false,
            });
            recovery = goes_on.then(|| struck.undone.elapsed());
        }
        if struck.owner_killed {
            if told.has_ended() || told.state == "reconnecting" {
                return after_the_owners_death(field, id, struck);
            }
        } else if told.is_paused() || told.is_unreleased(field) {
            if asked.elapsed() > AGAIN {
                // As its message says. Whether it went on, the next look tells.
                recover(field.source(), id);
                asked = Instant::now();
            }
        } else if told.wants_the_other_side() {
            if asked.elapsed() > AGAIN {
                recover(field.destination(), id);
                asked = Instant::now();
            }
        } else if told.has_ended() && (recovery.is_some() || told.state == "refused") {
            let gone = told.state == "done" || told.guest == "destination";
            let at = if gone { 1 - field.home } else { field.home };
            return Ok(Settled { at: Some(at), recovery });
        }
        if patience.is_over() {
            let text = format!("migration {id} {}: {} (guest {})", told.state, told.error, told.guest);
            return Err(Harm::of(stuck_or_lost(field), text));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Asks a daemon to take a migration up again, and does not wait for its end.
fn recover(node: &Node, id: &str) {
    let asked = node.rest("POST", &format!("/v1/migrations/{id}/recover"), &Value::Null);
    if let Err(error) = asked {
        eprintln!("node {} did not answer to recover {id}: {error:#}", node.name());
    }
}

/// The guest has ended with its QEMU. If the other QEMU turns out to have it after all, it goes on there; otherwise what is left is ended.
fn after_the_owners_death(field: &Field, id: &str, struck: &Struck) -> Result<Settled> {
    // A QEMU killed just before it was given the guest: it goes on at the source.
    let mut patience = Patience::of(Duration::from_secs(3));
    while !patience.is_over() {
        let told = Told::of(field.source(), id);
        let at = match (told.state.as_str(), told.guest.as_str()) {
            ("done", _) => Some(1 - field.home),
            ("failed", "source") => Some(field.home),
            _ => None,
        };
        if let Some(at) = at.filter(|at| !qemu_pids(&field.nodes[*at]).is_empty()) {
            return Ok(Settled { at: Some(at), recovery: Some(struck.undone.elapsed()) });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    end_everything(field)?;
    Ok(Settled { at: None, recovery: None })
}

/// Ends the guest and what is left of it, as the daemons say it is to be done: `vmove stop --force` on either node.
///
/// # Errors
/// [`Kind::Stuck`] if they do not let go.
pub fn end_everything(field: &Field) -> Result<()> {
    let mut patience = Patience::of(END_TIMEOUT);
    loop {
        let mut left = Vec::new();
        for node in &field.nodes {
            for name in node.vms()? {
                let stopped = vmove(node, &["stop", "--force", &name])?;
                left.push(format!("{name} at {}: {}", node.name(), stopped.said.trim()));
            }
        }
        if left.is_empty() {
            return Ok(());
        }
        if patience.is_over() {
            return Err(Harm::of(Kind::Stuck, format!("not to be ended: {}", left.join("; "))));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until the guest is served after a blow without a migration. A QEMU that was its own victim is gone.
///
/// # Errors
/// [`Kind::Stuck`] if it is not served.
pub fn settle_at_rest(field: &Field, victim: Victim, struck: &Struck) -> Result<Settled> {
    if struck.owner_killed && victim == Victim::SourceQemu {
        end_everything(field)?;
        return Ok(Settled { at: None, recovery: None });
    }
    let mut patience = Patience::of(END_TIMEOUT);
    loop {
        if field.source().vm(NAME).is_ok_and(|vm| vm.status == "running") {
            return Ok(Settled { at: Some(field.home), recovery: Some(struck.undone.elapsed()) });
        }
        if patience.is_over() {
            let text = format!("node {} does not serve its guest", field.source().name());
            return Err(Harm::of(stuck_or_lost(field), text));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn stuck_or_lost(field: &Field) -> Kind {
    if field.qemus().iter().all(Vec::is_empty) { Kind::Lost } else { Kind::Stuck }
}
