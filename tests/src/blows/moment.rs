//! Brings a migration to the moment at which it is to be struck. The proxy holds back what would lead on from there.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::deck::{Card, Moment};
use super::field::Field;
use super::harm::{Harm, Kind};
use super::patience::Patience;
use crate::daemon::Node;
use crate::proxy::{Direction, Fault, Rule};
use crate::scene::{CONTROL, NAME, SLOW, device_state};

/// For a migration to come to a moment.
const TIMEOUT: Duration = Duration::from_secs(60);
/// For a rule of the proxy to apply to everything on its way.
const RULE_APPLIES: Duration = Duration::from_millis(200);

/// The last state in a journal of a migration; empty if there is none.
#[must_use]
pub fn journaled(node: &Node, id: &str, file: &str) -> String {
    let journal = node.folder().join("state/sessions").join(id).join(file);
    let text = std::fs::read_to_string(journal).unwrap_or_default();
    // A line that is being written has no end yet.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let record: Option<Value> = whole.lines().last().and_then(|line| serde_json::from_str(line).ok());
    record.and_then(|record| record["state"].as_str().map(str::to_owned)).unwrap_or_default()
}

/// The states of source and destination.
#[must_use]
pub fn states(field: &Field, id: &str) -> (String, String) {
    (journaled(field.source(), id, "source.jsonl"), journaled(field.destination(), id, "destination.jsonl"))
}

/// Starts a migration and brings it to the card's moment. Returns its id, and whether it got there: it may have ended before.
///
/// # Errors
/// When the daemon does not accept the request. [`Kind::Stuck`] if the migration is refused.
pub fn bring(field: &Field, card: &Card) -> Result<(String, bool)> {
    let link = field.link();
    let first = link.connections();
    let holds = matches!(card.moment, Moment::Switchover | Moment::Loaded | Moment::Committed);
    if holds {
        link.add(device_state(first, Fault::Stall));
    }
    let to = field.destination().name();
    let request = ["migrate", NAME, "--to", to, "--detach", "--mode", card.mode, "--bandwidth", SLOW];
    let taken = field.source().ask(&request)?;
    let id = taken["id"].as_str().context("an id")?.to_owned();
    let come = |source: &[&str], destination: &[&str]| {
        wait(field, &id, |(s, d)| source.contains(&s.as_str()) && destination.contains(&d.as_str()))
    };
    let reached = match card.moment {
        Moment::Prepare => true,
        Moment::Rounds => in_rounds(field, &id)?,
        Moment::Switchover => come(&["stopped"], &["filling"]),
        Moment::Loaded | Moment::Committed => {
            come(&["stopped"], &["filling"]) && {
                let back = card.moment == Moment::Loaded;
                let direction = if back { Direction::Back } else { Direction::Forth };
                // Time for everything else on its way to arrive.
                std::thread::sleep(RULE_APPLIES * 2);
                link.add(Rule {
                    connection: Some(first + CONTROL),
                    direction,
                    after: 0,
                    fault: Fault::Stall,
                });
                std::thread::sleep(RULE_APPLIES);
                // Of two rules for the same byte, the later one applies.
                link.add(device_state(first, Fault::Delay(Duration::ZERO)));
                if back { come(&["stopped"], &["loaded"]) } else { come(&["committed"], &["loaded"]) }
            }
        }
        Moment::Fetch => come(&["committed"], &["owner"]),
        Moment::Complete => {
            come(&["committed"], &["owner"]) && {
                let direction = Direction::Back;
                link.add(Rule {
                    connection: Some(first + CONTROL),
                    direction,
                    after: 0,
                    fault: Fault::Stall,
                });
                come(&["committed"], &["complete"])
            }
        }
        Moment::Idle | Moment::Fork | Moment::Promote => false,
    };
    if !reached {
        let (_, status) = field.source().rest("GET", &format!("/v1/migrations/{id}"), &Value::Null)?;
        if status["outcome"]["state"] == "refused" {
            let text = format!("refused with nothing in the way: {}", status["outcome"]["blockers"]);
            return Err(Harm::of(Kind::Stuck, text));
        }
    }
    std::thread::sleep(card.delay);
    Ok((id, reached))
}

/// Waits until the journals say so; false if the migration ends before, or does not get there.
fn wait(field: &Field, id: &str, so: impl Fn(&(String, String)) -> bool) -> bool {
    let mut patience = Patience::of(TIMEOUT);
    while !patience.is_over() {
        let found = states(field, id);
        if so(&found) {
            return true;
        }
        if matches!(found.0.as_str(), "aborted" | "released") {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

fn in_rounds(field: &Field, id: &str) -> Result<bool> {
    let mut patience = Patience::of(TIMEOUT);
    while !patience.is_over() {
        let (_, status) = field.source().rest("GET", &format!("/v1/migrations/{id}"), &Value::Null)?;
        if status["outcome"]["state"] != "running" {
            return Ok(false);
        }
        if status["phase"] == "rounds" {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(false)
}
