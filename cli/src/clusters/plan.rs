//! `vmove plan`.

use serde_json::json;
use vmove_bridge_types::plan::{PlanRequest, PlanState};
use vmove_bridge_types::problem::Code;

use super::input::bridge;
use super::{ids, request, show};
use crate::args::clusters::{PlanAction, PlanArgs};
use crate::failure::Failure;
use crate::output::{End, say_either};

pub async fn run(args: PlanArgs, json: bool) -> Result<(), End> {
    let bridge = bridge(&args.at)?;
    let plan = match args.action {
        PlanAction::Evacuate { node } => bridge.make_plan(&PlanRequest::Evacuate { node }).await?,
        PlanAction::Compact { cluster, .. } => bridge.make_plan(&PlanRequest::Compact { cluster }).await?,
        PlanAction::MakeRoom { request } => {
            let text = request::text(&request)?;
            bridge.make_plan(&PlanRequest::MakeRoom { text, cluster: request.cluster }).await?
        }
        PlanAction::List => return say_either(&bridge.plans().await?, json, show::plans),
        PlanAction::Show { id } => bridge.plan(&ids::of_plan(&bridge, &id).await?).await?,
        PlanAction::Run { id } => {
            let id = ids::of_plan(&bridge, &id).await?;
            let plan = bridge.run_plan(&id).await?;
            say_either(&plan, json, show::plan)?;
            return match &plan.state {
                PlanState::Stopped { reason } => {
                    Err(Failure::new(Code::Busy, format!("the plan has stopped: {reason}")).into())
                }
                _ => Ok(()),
            };
        }
        PlanAction::Delete { id } => {
            let id = ids::of_plan(&bridge, &id).await?;
            bridge.remove_plan(&id).await?;
            return say_either(&json!({ "deleted": id }), json, |_| format!("plan {id} is deleted"));
        }
    };
    say_either(&plan, json, show::plan)
}
