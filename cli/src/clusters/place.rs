//! `vmove place`.

use sched_bridge::model::ClusterName;
use serde_json::json;
use vmove_bridge_types::problem::Code;
use vmove_bridge_types::requests::{LeaseAnswer, LeaseRequest, StartAll};
use vmove_client::bridge::Bridge;

use super::input::bridge;
use super::request::Origin;
use super::{request, show, types};
use crate::args::bridge::{HolderArgs, RequestArgs};
use crate::args::cluster::Start;
use crate::args::clusters::PlaceArgs;
use crate::failure::Failure;
use crate::output::{End, say, say_either};
use crate::waiting::Wait;

pub async fn run(args: PlaceArgs, json: bool) -> Result<(), End> {
    let bridge = bridge(&args.at)?;
    if args.types {
        return say_either(&bridge.types().await?, json, types::table_of);
    }
    let start = args.run.then(|| StartAll {
        command_line: args.command_line,
        template: args.template,
        fields: args.field.into_iter().collect(),
        memory: args.memory,
    });
    let origin = Origin::of(&args.request);
    let wanted = LeaseRequest {
        what_if: args.what_if || args.explain,
        explain: args.explain,
        start,
        ..lease_request(args.request, args.lease, args.id)?
    };
    grant(&bridge, &wanted, &origin, json).await
}

/// `vmove cluster start`: the same, by the name of the cluster, and with its VMs.
pub async fn start(args: Start, json: bool) -> Result<(), End> {
    let bridge = bridge(&args.at)?;
    let start = StartAll {
        command_line: args.command_line,
        template: args.template,
        fields: args.field.into_iter().collect(),
        memory: args.memory,
    };
    let origin = Origin::of(&args.request);
    let wanted = lease_request(args.request, args.lease, args.id)?;
    grant(&bridge, &LeaseRequest { named: true, start: Some(start), ..wanted }, &origin, json).await
}

/// A request for a lease alone.
fn lease_request(args: RequestArgs, lease: HolderArgs, id: Option<String>) -> Result<LeaseRequest, Failure> {
    Ok(LeaseRequest {
        id: id.map(|id| id.parse()).transpose().map_err(Failure::bad_request)?,
        named: false,
        holder: lease.holder,
        ttl_ms: Some(lease.ttl),
        project: lease.project,
        together: lease.together,
        what_if: false,
        explain: false,
        request: None,
        text: Some(request::text(&args)?),
        assignments: None,
        cluster: args.cluster.map(ClusterName::new).transpose().map_err(Failure::bad_request)?,
        start: None,
    })
}

async fn grant(bridge: &Bridge, wanted: &LeaseRequest, origin: &Origin, json: bool) -> Result<(), End> {
    let what =
        if wanted.start.is_some() { "a place is found, and VMs are started" } else { "a place is found" };
    let left = "the bridge finishes this: `vmove lease list` shows a new lease, `vmove cluster stop ID` ends its VMs and gives it back";
    let asked = async { bridge.grant_lease(wanted).await.map_err(|error| origin.failed(error)) };
    let answer = Wait::of_vmove(json, what, left).answer(asked).await?;
    if let Some(why) = &answer.refused {
        let refused = Failure::new(Code::NoRoom, why);
        if json {
            // In the one object that says why, as the bridge does for a refused lease.
            let details = json!({ "nearest": answer.nearest, "explanation": answer.explanation });
            return Err(Failure { details: Some(details), ..refused }.into());
        }
        let nodes = answer.explanation.as_ref().map(show::explanation).unwrap_or_default();
        say(&(nodes + &answer.nearest.as_ref().map(types::nearest).unwrap_or_default()))?;
        return Err(refused.into());
    }
    say_either(&answer, json, describe)
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
