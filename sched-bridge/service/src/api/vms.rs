//! `/v1/leases/{id}/vms`: starts and ends the VMs of a lease through the daemons of their nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use sched_bridge::model::VmName;
use serde_json::json;
use vmove_bridge_types::requests::{StartAll, StartAnswer, StartRequest, StartVm, StopVms};
use vmove_http::{Answer, Json, Path, Refusal};

use super::problem::{Code, Problem};
use super::visible::visible;
use super::{App, to_its_end};
use crate::access::Caller;
use crate::lease::LeaseId;
use crate::template::Templates;
use crate::vms::{self, StartError};

/// Starts VMs of a lease on their nodes: all of them or none. VMs that run already are left as they are.
#[utoipa::path(post, path = "/v1/leases/{id}/vms", operation_id = "startVms", tag = "leases", params(("id" = String, Path, description = "Id of the lease")),
    request_body = StartRequest,
    responses((status = 200, body = StartAnswer), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn start(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<LeaseId>,
    Json(request): Json<StartRequest>,
) -> Answer<StartAnswer> {
    app.bridge.renew_if(&id, |holder| caller.may_use(holder)).await?;
    let wanted = request
        .vms
        .into_iter()
        .map(|vm| with_command_line(&app.templates, &caller, vm))
        .collect::<Result<Vec<StartVm>, Problem>>()?;
    let vms = to_its_end(async move { vms::start(&app.bridge, &app.driver, &id, &wanted).await }).await?;
    Ok(axum::Json(StartAnswer { vms }))
}

/// A VM with its command line: that of its template, or a free one, which only an operator may choose.
pub(super) fn with_command_line(
    templates: &Templates,
    caller: &Caller,
    vm: StartVm,
) -> Result<StartVm, Problem> {
    match &vm.template {
        Some(template) if vm.command_line.is_empty() => {
            let filled = templates.fill(template, &vm.fields);
            let command_line =
                filled.map_err(|error| Problem::new(Code::BadRequest, format!("VM {}: {error}", vm.vm)))?;
            Ok(StartVm { memory: vm.memory, ..StartVm::by_command_line(vm.vm, command_line) })
        }
        None if vm.fields.is_empty() && !vm.command_line.is_empty() => {
            if caller.is_operator() {
                return Ok(vm);
            }
            let message = format!(
                "{caller} may not choose a command line, which runs as root on the node: name a template, or use a token with the role operator"
            );
            Err(Problem::new(Code::Forbidden, message))
        }
        _ => Err(Problem::bad_request(format!(
            "VM {}: expected either a template, with its fields, or a command_line",
            vm.vm
        ))),
    }
}

/// How VMs are started, if the caller may start them so.
pub(super) fn checked_start(app: &App, caller: &Caller, start: &StartAll) -> Result<StartAll, Problem> {
    let any = VmName::new("any").map_err(Problem::bad_request)?;
    let StartVm { command_line, memory, .. } = with_command_line(&app.templates, caller, start.of(any))?;
    Ok(StartAll { command_line, memory, ..StartAll::default() })
}

/// Stops VMs of a lease. The lease stays.
#[utoipa::path(post, path = "/v1/leases/{id}/vms/stop", operation_id = "stopVms", tag = "leases", params(("id" = String, Path, description = "Id of the lease")),
    request_body = StopVms,
    responses((status = 200, body = StopVms), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn stop(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<LeaseId>,
    Json(request): Json<StopVms>,
) -> Answer<StopVms> {
    visible(&*app.bridge.view()?, &caller, &id)?;
    let vms = to_its_end(async move { vms::stop(&app.bridge, &app.driver, &id, &request.vms).await }).await?;
    Ok(axum::Json(StopVms { vms }))
}

impl From<StartError> for Problem {
    fn from(error: StartError) -> Self {
        let message = error.to_string();
        let (code, failed) = match error {
            StartError::Bridge(error) => return error.into(),
            StartError::NotInLease { .. } => (Code::UnknownVm, BTreeMap::new()),
            StartError::Stays { .. } => (Code::NotStarted, BTreeMap::new()),
            StartError::Refused { failed, .. } => (Code::NotStarted, failed),
            StartError::StillRunning { failed, .. } => (Code::NotStopped, failed),
        };
        let details = (!failed.is_empty()).then(|| json!({ "vms": failed }));
        Self { details, ..Self::new(code, message) }
    }
}

impl From<StartError> for Refusal {
    fn from(error: StartError) -> Self {
        Problem::from(error).into()
    }
}
