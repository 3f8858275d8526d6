//! `visit`: a guest goes to another node by demand, comes home, or stays; or a migration becomes a visit.

use super::Ended;
use super::follow::Interrupt;
use super::waiting::{finish, say_visiting, started, until_there};
use crate::args::visit::Visit;
use crate::failure::Failure;
use crate::output::End;
use vmove_client::Client;
use vmove_types::problem::{Code, Exit};
use vmove_types::progress::{Progress, Role, VISIT};
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
        None if args.keep_home => keep_home(client, &args, json).await,
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

/// Turns the migration that brings a VM to this node into a visit.
async fn keep_home(client: &Client, args: &Visit, json: bool) -> Result<Ended, End> {
    let all = client.migrations().await?.migrations;
    let comes = |p: &&Progress| p.vm == args.vm && p.role == Role::Destination && !p.outcome.is_end();
    let Some(migration) = all.iter().find(comes) else {
        let message = format!(
            "No migration brings {:?} to this node: `vmove status` shows those there are. Ask on the node that it goes to, while its memory follows it",
            args.vm
        );
        return Err(Failure::new(Code::NotVisiting, message).into());
    };
    let id = &migration.id;
    client.turn_into_visit(id, &args.go_home.go_home()).await?;
    if args.detach {
        return started(id, json);
    }
    say_visiting(&client.migration(id).await?, json)?;
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
