//! `migrate`, `status`, `cancel`, `recover`, `history`.

use super::follow::Interrupt;
use super::progress_text::{describe, print_list};
use super::waiting::{asked, finish, started, until_there};
use super::{Ended, groups};
use crate::args::vmove::{History, Migrate, Reclaim, Recover, Status};
use crate::failure::Failure;
use crate::output::{End, note, say, say_json};
use vmove_client::{Client, Error};
use vmove_types::choice::ReadsFrom;
use vmove_types::disk::cost_of_disks_after;
use vmove_types::migration::ReclaimRequest;
use vmove_types::problem::{Code, Exit};

pub async fn migrate(client: &Client, args: Migrate, json: bool) -> Result<Ended, End> {
    let mut requests = args.requests().map_err(Failure::bad_request)?;
    if requests.len() > 1 {
        return groups::migrate(client, requests, args.detach, json).await;
    }
    let Some(request) = requests.pop() else { return Err(Failure::bad_request("expected a VM").into()) };
    if request.options.disks_after {
        note(&format!("vmove: {}", cost_of_disks_after("the node that it leaves", &request.to)));
    }
    let taken = asked(&[&request.vm], json).answer(client.migrate(&request)).await?;
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
