//! Waiting for a migration, and how its end is told.

use serde_json::json;

use super::Ended;
use super::follow::{Followed, Interrupt, follow, follow_until};
use super::progress_text::{describe, final_object, note_missing, summary, when};
use crate::output::{End, note, say, say_json};
use crate::waiting::Wait;
use vmove_client::Client;
use vmove_types::problem::Exit;
use vmove_types::progress::{Outcome, Phase, Progress, Role};

pub(super) fn started(id: &str, json: bool) -> Result<Ended, End> {
    if json {
        say_json(&json!({ "id": id }))?;
    } else {
        say(&format!("Migration {id} is at work; follow it by: vmove status {id} --follow"))?;
    }
    Ok(Ended::With(Exit::Done))
}

/// What is waited for until a migration has begun.
pub(super) fn asked(vms: &[&str], json: bool) -> Wait {
    let vms = vms.join(", ");
    let what = format!("the migration of {vms} begins; memory that is private since a fork is copied first");
    let left = format!(
        "the migration of {vms} may still begin: `vmove status` shows it, `vmove cancel ID` calls it off"
    );
    Wait::of_vmove(json, what, left)
}

/// Waits for the end and says how it was.
pub(super) async fn finish(
    client: &Client,
    id: &str,
    interrupt: Interrupt,
    json: bool,
) -> Result<Ended, End> {
    match follow(client, id, interrupt, json).await? {
        Followed::Ended(progress) => ended(&progress, json),
        Followed::Left => left(id, json),
    }
}

/// Says that nobody waits for a migration any more.
pub(super) fn left(id: &str, json: bool) -> Result<Ended, End> {
    if json {
        say_json(&json!({ "id": id, "error": "interrupted; the migration goes on", "guest": null }))?;
    }
    Ok(Ended::LeftRunning)
}

/// Says how a migration has ended.
pub(super) fn ended(progress: &Progress, json: bool) -> Result<Ended, End> {
    let exit = Exit::of_progress(progress);
    if json {
        say_json(&final_object(progress, exit))?;
    }
    match &progress.outcome {
        Outcome::Done { report } if !json => say(&summary(report))?,
        Outcome::Done { .. } | Outcome::Running | Outcome::Reconnecting { .. } => {}
        Outcome::Refused { .. } | Outcome::Failed { .. } => note(&format!("vmove: {}", describe(progress))),
    }
    note_missing(progress);
    Ok(Ended::With(exit))
}

/// Follows a guest that goes for a visit until it runs there.
pub(super) async fn until_there(client: &Client, id: &str, json: bool) -> Result<Ended, End> {
    let is_there = |p: &Progress| p.phase == Phase::Fetch;
    let progress = match follow_until(client, id, Interrupt::Cancels, json, is_there).await? {
        Followed::Ended(progress) if progress.outcome.is_end() => return ended(&progress, json),
        Followed::Ended(progress) => progress,
        Followed::Left => return left(id, json),
    };
    say_visiting(&progress, json)?;
    Ok(Ended::With(Exit::Done))
}

/// Says that a guest is on a visit, from its home or from where it is.
pub(super) fn say_visiting(progress: &Progress, json: bool) -> Result<(), End> {
    if json {
        return say_json(progress);
    }
    let (vm, peer, id) = (&progress.vm, &progress.peer, &progress.id);
    let itself = progress.going_home.as_ref();
    let itself = itself.map(|going| format!("It goes home by itself {}.\n", when(&going.when)));
    let itself = itself.unwrap_or_default();
    let (visits, there) = match progress.role {
        Role::Source => {
            (format!("{vm} visits {peer}: its memory is here, and follows"), format!("On {peer}: "))
        }
        Role::Destination => {
            (format!("{vm} is here for a visit: {peer} keeps its memory, which follows"), String::new())
        }
    };
    say(&format!(
        "{visits} as {vm} touches it (migration {id}).\n{itself}{there}`vmove visit {vm} --back` takes it home, `vmove visit {vm} --stay` lets it stay"
    ))
}
