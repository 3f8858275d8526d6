//! `vmove place`.

use sched_bridge::model::ClusterName;
use vmove_bridge_types::problem::Code;
use vmove_bridge_types::requests::{LeaseAnswer, LeaseRequest, StartAll};

use super::input::bridge;
use super::{request, show, types};
use crate::args::cluster::Start;
use crate::args::clusters::PlaceArgs;
use crate::failure::Failure;
use crate::output::{End, say_either};

pub async fn run(args: PlaceArgs, json: bool) -> Result<(), End> {
    place(args, false, json).await
}

/// `named`: without an id, the name of the cluster is that of its lease.
async fn place(args: PlaceArgs, named: bool, json: bool) -> Result<(), End> {
    let bridge = bridge(&args.at)?;
    if args.types {
        return say_either(&bridge.types().await?, json, types::table_of);
    }
    let wanted = LeaseRequest {
        id: args.id.map(|id| id.parse()).transpose().map_err(Failure::bad_request)?,
        named,
        holder: args.holder,
        ttl_ms: Some(args.ttl),
        project: args.project,
        together: args.together,
        what_if: args.what_if || args.explain,
        explain: args.explain,
        request: None,
        text: Some(request::text(&args.request)?),
        assignments: None,
        cluster: args.request.cluster.map(ClusterName::new).transpose().map_err(Failure::bad_request)?,
        start: args.run.then(|| StartAll {
            command_line: args.command_line,
            template: args.template,
            fields: args.field.into_iter().collect(),
            memory: args.memory,
        }),
    };
    let answer = bridge.grant_lease(&wanted).await?;
    if let Some(why) = &answer.refused {
        say_either(&answer, json, |answer| {
            let nodes = answer.explanation.as_ref().map(show::explanation).unwrap_or_default();
            nodes + &answer.nearest.as_ref().map(types::nearest).unwrap_or_default()
        })?;
        return Err(Failure::new(Code::NoRoom, why).into());
    }
    say_either(&answer, json, describe)
}

/// `vmove cluster start`: the same, by the name of the cluster, and with its VMs.
pub async fn start(args: Start, json: bool) -> Result<(), End> {
    let Start { at, request, holder, ttl, project, together, id, template, field, memory, command_line } =
        args;
    let args = PlaceArgs {
        at,
        request,
        holder,
        ttl,
        project,
        together,
        id,
        what_if: false,
        types: false,
        explain: false,
        run: true,
        template,
        field,
        memory,
        command_line,
    };
    place(args, true, json).await
}

fn describe(answer: &LeaseAnswer) -> String {
    let mut out = String::new();
    if let Some(lease) = &answer.lease {
        out.push_str(&show::lease(lease));
    } else if let Some(placement) = &answer.placement {
        out.push_str(&show::assignments(&placement.assignments));
    }
    if let Some(placement) = &answer.placement {
        out.push_str(&show::score(&placement.score));
    }
    out.push_str(&show::started(&answer.vms));
    for text in &answer.notes {
        out.push_str(&format!("note: {text}\n"));
    }
    if let Some(explanation) = &answer.explanation {
        out.push_str(&show::explanation(explanation));
    }
    out
}
