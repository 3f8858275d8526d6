//! `visit`: a guest goes to another node by demand, comes home, or stays.

use super::Ended;
use super::follow::{Followed, Interrupt, follow_until};
use super::migrations::{ended, finish, left, started};
use super::progress_text::when;
use crate::args::visit::Visit;
use crate::failure::Failure;
use crate::output::{End, say, say_json};
use vmove_client::Client;
use vmove_types::problem::{Code, Exit};
use vmove_types::progress::{Phase, Progress, Role, VISIT};
use vmove_types::spec::Visit as Step;

pub async fn visit(client: &Client, args: Visit, json: bool) -> Result<Ended, End> {
    match &args.to {
        Some(to) => go(client, &args, to, json).await,
        None if args.back => {
            let visit = visit_of(client, &args.vm).await?;
            let taken = client.migrate(&args.request(Step::Back, visit.peer)).await?;
            if args.detach {
                return started(&taken.id, json);
            }
            finish(client, &taken.id, Interrupt::Cancels, json).await
        }
        None => {
            let visit = visit_of(client, &args.vm).await?;
            client.stay(&visit.id).await?;
            if args.detach {
                return started(&visit.id, json);
            }
            finish(client, &visit.id, Interrupt::Leaves, json).await
        }
    }
}

/// Ends when the guest runs there.
async fn go(client: &Client, args: &Visit, to: &str, json: bool) -> Result<Ended, End> {
    let taken = client.migrate(&args.request(Step::Go, to.to_owned())).await?;
    if args.detach {
        return started(&taken.id, json);
    }
    until_there(client, &taken.id, json).await
}

/// Follows a guest that goes for a visit until it runs there.
pub(super) async fn until_there(client: &Client, id: &str, json: bool) -> Result<Ended, End> {
    let is_there = |p: &Progress| p.phase == Phase::Fetch;
    let progress = match follow_until(client, id, Interrupt::Cancels, json, is_there).await? {
        Followed::Ended(progress) if progress.outcome.is_end() => return ended(&progress, json),
        Followed::Ended(progress) => progress,
        Followed::Left => return left(id, json),
    };
    if json {
        say_json(&progress)?;
    } else {
        let (vm, peer) = (&progress.vm, &progress.peer);
        let itself = progress
            .going_home
            .as_ref()
            .map(|going| format!("It goes home by itself {}.\n", when(&going.when)));
        let itself = itself.unwrap_or_default();
        say(&format!(
            "{vm} visits {peer}: its memory is here, and follows as {vm} touches it (migration {id}).\n{itself}On {peer}: `vmove visit {vm} --back` takes it home, `vmove visit {vm} --stay` lets it stay"
        ))?;
    }
    Ok(Ended::With(Exit::Done))
}

/// The visit by which a VM is on this node.
async fn visit_of(client: &Client, vm: &str) -> Result<Progress, End> {
    let all = client.migrations().await?.migrations;
    let is_it = |p: &Progress| {
        p.vm == vm && p.role == Role::Destination && p.mode.as_deref() == Some(VISIT) && !p.outcome.is_end()
    };
    if let Some(visit) = all.iter().find(|p| is_it(p)) {
        return Ok(visit.clone());
    }
    let from_here = |p: &&Progress| p.vm == vm && p.role == Role::Source && !p.outcome.is_end();
    let message = match all.iter().find(from_here) {
        Some(there) => format!("{vm:?} is not on this node: it visits {}. Ask vmoved there", there.peer),
        None => format!("{vm:?} is not here for a visit: `vmove status` shows the visits of this node"),
    };
    Err(Failure::new(Code::NotVisiting, message).into())
}
