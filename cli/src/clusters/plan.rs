//! `vmove plan`.

use serde_json::json;
use vmove_bridge_types::plan::PlanRequest;

use super::input::bridge;
use super::{ids, request, show};
use crate::args::clusters::{PlanAction, PlanArgs};
use crate::output::{End, say_either};
use crate::waiting::Wait;

/// What is waited for while a plan is run.
pub fn running(id: &str, json: bool) -> Wait {
    let left = format!("plan {id} goes on: `vmove plan show {id}` shows how far it is");
    Wait::of_vmove(json, format!("plan {id} is run"), left)
}

pub async fn run(args: PlanArgs, json: bool) -> Result<(), End> {
    let bridge = bridge(&args.at)?;
    let plan = match args.action {
        PlanAction::Evacuate { node } => bridge.make_plan(&PlanRequest::Evacuate { node }).await?,
        PlanAction::Compact { cluster, .. } => bridge.make_plan(&PlanRequest::Compact { cluster }).await?,
        PlanAction::MakeRoom { request } => {
            let text = request::text(&request)?;
            let origin = request::Origin::of(&request);
            let wanted = PlanRequest::MakeRoom { text, cluster: request.cluster };
            bridge.make_plan(&wanted).await.map_err(|error| origin.failed(error))?
        }
        PlanAction::List => return say_either(&bridge.plans().await?, json, show::plans),
        PlanAction::Show { id } => bridge.plan(&ids::of_plan(&bridge, &id).await?).await?,
        PlanAction::Run { id } => {
            let id = ids::of_plan(&bridge, &id).await?;
            let plan = running(&id, json).answer(bridge.run_plan(&id)).await?;
            return show::ran(&plan, json);
        }
        PlanAction::Delete { id } => {
            let id = ids::of_plan(&bridge, &id).await?;
            bridge.remove_plan(&id).await?;
            return say_either(&json!({ "deleted": id }), json, |_| format!("plan {id} is deleted"));
        }
    };
    say_either(&plan, json, show::plan)
}
