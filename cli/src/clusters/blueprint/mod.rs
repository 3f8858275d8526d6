//! `vmove blueprint`: splits a blueprint; with `--run`, leases what its VMs need, starts them through the daemons of their nodes, and
//! passes networks and the rest to adapters, all of it or nothing; tells what each element does, and stops all of them.

mod elements;
mod handed;
mod launch;
mod networks;
mod stop;

use std::collections::BTreeSet;
use std::path::Path;

use sched_bridge::blueprint::{ConnectivityGroup, Decomposed, Language, decompose, read as parse};
use sched_bridge::request::Catalog;
use vmove_bridge_types::lease::LeaseId;
use vmove_bridge_types::problem::Code;
use vmove_client::bridge::Bridge;
use vmove_types::problem::ProblemCode;

use super::input::{bridge, read};
use super::{show, types};
use crate::args::blueprint::{BlueprintAction, BlueprintArgs, ProgramArgs, RunningArgs};
use crate::args::bridge::Where;
use crate::failure::Failure;
use crate::output::{End, say_either};
use crate::waiting::Wait;

pub async fn run(args: BlueprintArgs, json: bool) -> Result<(), End> {
    match args.action {
        Some(BlueprintAction::Status(args)) => {
            let read = Read::of(args).await?;
            say_either(&elements::status(&read).await, json, elements::told)
        }
        Some(BlueprintAction::Stop(args)) => stop::run(&Read::of(args).await?, json).await,
        None => {
            let file = args.file.as_deref().unwrap_or(Path::new("-"));
            // Before anything waits: Ctrl-C ends a command that reads from a terminal.
            let text = read(file)?;
            let begun = Read::from(file, &text, &args.at, args.programs, !args.run);
            if !args.run {
                return say_either(&begun.await?.parts, json, show::parts);
            }
            let what = "the bridge says what a blueprint may ask for";
            let begun = Wait::of_vmove(json, what, "nothing was started").answer(begun).await?;
            launch::run(begun, &args.lease, json).await
        }
    }
}

/// A blueprint that was read, and with whom one speaks about it.
struct Read {
    name: String,
    parts: Decomposed,
    bridge: Bridge,
    /// What requests may name there.
    catalog: Catalog,
    programs: ProgramArgs,
}

impl Read {
    async fn of(args: RunningArgs) -> Result<Self, Failure> {
        let text = read(&args.file)?;
        Self::from(&args.file, &text, &args.at, args.programs, false).await
    }

    /// `alone`: to look at a blueprint needs no bridge, if it names what ships.
    async fn from(
        file: &Path,
        text: &str,
        at: &Where,
        programs: ProgramArgs,
        alone: bool,
    ) -> Result<Self, Failure> {
        let wrong =
            |error: &dyn std::fmt::Display| Failure::bad_request(format!("{}: {error}", file.display()));
        let blueprint = parse(text, Language::guess(text)).map_err(|e| wrong(&e))?;
        let bridge = bridge(at)?;
        let catalog = match types::catalog(&bridge).await {
            Ok(catalog) => catalog,
            Err(failure) if alone && failure.code == Code::BridgeUnreachable.word() => Catalog::default(),
            Err(failure) => return Err(failure),
        };
        let parts = decompose(&blueprint, &catalog).map_err(|e| wrong(&e))?;
        Ok(Self { name: blueprint.name, parts, bridge, catalog, programs })
    }

    /// The lease of a connected group.
    fn lease_id(&self, number: usize) -> Result<LeaseId, Failure> {
        format!("{}.{number}", self.name).parse().map_err(Failure::bad_request)
    }

    /// The nodes of the VMs of a group: what is connected with them should run close to them.
    async fn near(&self, number: usize, together: &ConnectivityGroup) -> BTreeSet<String> {
        let (Some(_), Ok(id)) = (&together.request, self.lease_id(number)) else { return BTreeSet::new() };
        // If there is no lease, its VMs are nowhere.
        let lease = self.bridge.lease(id.as_str()).await;
        let held = lease.iter().flat_map(|lease| &lease.held);
        held.map(|held| held.assignment.node.to_string()).collect()
    }
}
