//! `migrate`, `status`, `cancel`, `recover`, `history`.

use serde_json::json;

use super::follow::{Followed, Interrupt, follow};
use super::progress_text::{describe, final_object, note_missing, print_list, summary};
use super::visit::until_there;
use super::{Ended, groups};
use crate::args::vmove::{History, Migrate, Reclaim, Recover, Status};
use crate::failure::Failure;
use crate::output::{End, note, say, say_json};
use vmove_client::{Client, Error};
use vmove_types::choice::ReadsFrom;
use vmove_types::migration::ReclaimRequest;
use vmove_types::problem::{Code, Exit};
use vmove_types::progress::{Outcome, Progress};

pub async fn migrate(client: &Client, args: Migrate, json: bool) -> Result<Ended, End> {
    let mut requests = args.requests().map_err(Failure::bad_request)?;
    if requests.len() > 1 {
        return groups::migrate(client, requests, args.detach, json).await;
    }
    let Some(request) = requests.pop() else { return Err(Failure::bad_request("expected a VM").into()) };
    let taken = client.migrate(&request).await?;
    if let Some(first) = &taken.note {
        note(&format!("vmove: {first}"));
    }
    let choice = taken.choice.as_ref();
    if let Some(choice) = choice {
        note(&format!("vmove: {choice}"));
    }
    if args.detach {
        return started(&taken.id, json);
    }
    if choice.is_some_and(|choice| choice.choice == ReadsFrom::Visit) {
        return until_there(client, &taken.id, json).await;
    }
    finish(client, &taken.id, Interrupt::Cancels, json).await
}

pub async fn recover(client: &Client, args: Recover, json: bool) -> Result<Ended, End> {
    let taken = client.recover_migration(&args.id).await?;
    if args.detach {
        return started(&taken.id, json);
    }
    finish(client, &taken.id, Interrupt::Leaves, json).await
}

pub async fn reclaim(client: &Client, args: Reclaim, json: bool) -> Result<Ended, End> {
    let request = ReclaimRequest { guest_is_lost: args.guest_is_lost };
    let taken = client.reclaim_migration(&args.id, &request).await?;
    if json {
        say_json(&taken)?;
    } else {
        say(taken.note.as_deref().unwrap_or("The guest goes on at the source"))?;
    }
    Ok(Ended::With(Exit::Done))
}

pub async fn status(client: &Client, args: Status, json: bool) -> Result<Ended, End> {
    let Some(id) = args.id else {
        let mut all = client.migrations().await?;
        all.migrations.retain(|m| !m.outcome.is_end());
        print_list(&all, "No migration is at work on this node; see `vmove history`", json)?;
        return Ok(Ended::With(Exit::Done));
    };
    let progress = match client.migration(&id).await {
        Err(error) if is_unknown(&error) && client.group(&id).await.is_ok() => {
            return groups::status(client, &id, args.follow, json).await;
        }
        other => other?,
    };
    if args.follow {
        return finish(client, &id, Interrupt::Leaves, json).await;
    }
    if json {
        say_json(&progress)?;
    } else {
        say(&describe(&progress))?;
    }
    Ok(Ended::With(Exit::Done))
}

pub async fn cancel(client: &Client, id: &str, json: bool) -> Result<Exit, End> {
    let taken = match client.cancel_migration(id).await {
        Err(error) if is_unknown(&error) && client.group(id).await.is_ok() => {
            return groups::cancel(client, id, json).await;
        }
        other => other?,
    };
    if json {
        say_json(&taken)?;
    } else {
        say(&format!("Migration {0} is being called off; see: vmove status {0}", taken.id))?;
    }
    Ok(Exit::Done)
}

/// It may be the id of something else.
pub(super) fn is_unknown(error: &Error) -> bool {
    matches!(error, Error::Refused(problem) if problem.code == Code::UnknownMigration)
}

pub async fn history(client: &Client, args: History, json: bool) -> Result<Exit, End> {
    let mut all = client.migrations().await?;
    if let Some(vm) = &args.vm {
        all.migrations.retain(|m| m.vm == *vm);
    }
    all.migrations.truncate(args.limit);
    print_list(&all, "This node remembers no migration", json)?;
    Ok(Exit::Done)
}

pub(super) fn started(id: &str, json: bool) -> Result<Ended, End> {
    if json {
        say_json(&json!({ "id": id }))?;
    } else {
        say(&format!("Migration {id} is at work; follow it by: vmove status {id} --follow"))?;
    }
    Ok(Ended::With(Exit::Done))
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
