//! `/v1/glue2`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use sched_bridge::glue2::{Described, Format, render};
use vmove_bridge_types::requests::Glue2Query;
use vmove_http::{Query, Refusal};

use super::App;
use super::problem::Problem;

/// All nodes as entities of GLUE 2 (OGF GFD.147): the bridge as a service, each node as an execution environment.
#[utoipa::path(get, path = "/v1/glue2", operation_id = "showGlue2", tag = "nodes", params(Glue2Query),
    responses((status = 200, body = String, content_type = "text/plain"), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn show(
    State(app): State<Arc<App>>,
    Query(query): Query<Glue2Query>,
) -> Result<impl IntoResponse, Refusal> {
    let format = query.format.as_deref().unwrap_or("xml").parse::<Format>().map_err(Problem::bad_request)?;
    let site = query.site.as_deref().map(str::trim).filter(|site| !site.is_empty()).unwrap_or("vmove");
    let view = app.bridge.view()?;
    let (fleet, occupancy) = (view.fleet(), view.occupancy());
    let described: Vec<Described<'_>> = fleet
        .nodes()
        .iter()
        .map(|node| {
            let used = fleet.find(node.name.as_str()).map(|at| occupancy.vms(at) > 0);
            Described { node, used }
        })
        .collect();
    let content = match format {
        Format::Json => "application/json",
        Format::Ldif => "text/plain; charset=utf-8",
        _ => "application/xml",
    };
    Ok(([(header::CONTENT_TYPE, content)], render(site, &described, format)))
}
