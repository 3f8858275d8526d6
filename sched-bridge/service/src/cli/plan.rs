//! `vmove plan`.

use hyper::Method;
use serde_json::{Value, json};

use super::args::{PlanAction, PlanArgs};
use super::client::{Client, segment};
use super::{Said, place, show};
use crate::api::problem::{Code, Problem};

pub async fn run(args: PlanArgs, as_json: bool) -> Said {
    let client = Client::new(&args.at)?;
    let path = |id: &str| format!("/v1/plans/{}", segment(id));
    let make = |body: Value| {
        let client = &client;
        async move { client.ask(Method::POST, "/v1/plans", Some(&body)).await }
    };
    let plan = match args.action {
        PlanAction::Evacuate { node } => make(json!({ "for": "evacuate", "node": node })).await?,
        PlanAction::Compact { cluster, .. } => make(json!({ "for": "compact", "cluster": cluster })).await?,
        PlanAction::MakeRoom { request } => {
            let mut body = place::body(&request)?;
            body["for"] = json!("make-room");
            make(body).await?
        }
        PlanAction::List => return show(&client.get("/v1/plans").await?, as_json, super::show::plans),
        PlanAction::Show { id } => client.get(&path(&id)).await?,
        PlanAction::Run { id } => {
            let plan = client.ask(Method::POST, &format!("{}/run", path(&id)), None::<&()>).await?;
            show(&plan, as_json, super::show::plan)?;
            return match plan["state"]["reason"].as_str() {
                Some(reason) => Err(Problem::new(Code::Busy, format!("the plan has stopped: {reason}"))),
                None => Ok(()),
            };
        }
        PlanAction::Delete { id } => {
            client.ask(Method::DELETE, &path(&id), None::<&()>).await?;
            return show(&json!({ "deleted": id }), as_json, |_| format!("plan {id} is forgotten"));
        }
    };
    show(&plan, as_json, super::show::plan)
}
