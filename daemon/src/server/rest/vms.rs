//! `/v1/vms`.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use vmove_http::{Answer, Json, Path, Query, Refusal};
use vmove_node::migrations::Migrations as _;
use vmove_node::registry::RegistryError;
use vmove_types::check::CheckReport;
use vmove_types::device::VmDevice;
use vmove_types::goal::Goals;

use crate::server::grants::Entered;
use crate::server::problem::IntoProblem;
use crate::server::tuning::Starting;
use crate::server::{App, detached};
use vmove_types::migration::CheckQuery;
use vmove_types::problem::{Code, Problem};
use vmove_types::spec::{Bandwidth, MigrationSpec};
use vmove_types::vm::{
    AdoptRequest, RunRequest, Running, StateRequest, StopQuery, Stopped, VmDetail, VmList, VmSummary,
};

/// A day.
const LONGEST_PAUSE_MS: u64 = 24 * 3600 * 1000;

/// All VMs of this node.
#[utoipa::path(get, path = "/v1/vms", operation_id = "listVms", tag = "vms", responses((status = 200, body = VmList)))]
pub async fn list(State(app): State<Arc<App>>) -> axum::Json<VmList> {
    let mut vms = app.registry.list().await;
    app.forks.mark_unreadable(&mut vms);
    mark_leases(&app, &mut vms);
    vms.extend(app.carrier.domains.all().await.iter().map(|domain| {
        let migration = app.sessions.of_vm(&domain.record.name);
        domain.summary(migration.map(|migration| migration.id))
    }));
    axum::Json(VmList { node: app.config.node.clone(), vms })
}

/// Starts a VM that can be moved.
#[utoipa::path(post, path = "/v1/vms", operation_id = "runVm", tag = "vms", request_body = RunRequest,
    responses((status = 201, body = VmDetail), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn run(
    State(app): State<Arc<App>>,
    Json(mut request): Json<RunRequest>,
) -> Result<(StatusCode, axum::Json<VmDetail>), Refusal> {
    let entered = app.grants.as_ref().map(|grants| grants.enter(&request)).transpose()?.flatten();
    let pinned = app.tuning.start(&app.registry, &mut request)?;
    let vm = detached(async move { run_in_grant(&app, request, entered, pinned).await }).await?;
    Ok((StatusCode::CREATED, axum::Json(vm)))
}

/// Starts a VM. If it has more than its grant gives, it is ended.
async fn run_in_grant(
    app: &App,
    request: RunRequest,
    entered: Option<Entered>,
    pinned: Option<Starting>,
) -> Result<VmDetail, Problem> {
    let mut vm = app.registry.run(request).await.map_err(IntoProblem::into_problem)?;
    if let Some(entered) = entered
        && let Err(problem) = entered.started(&vm)
    {
        app.registry.stop(&vm.summary.name, true).await.map_err(IntoProblem::into_problem)?;
        return Err(problem);
    }
    if let Some(pinned) = pinned {
        pinned.started();
    }
    mark_leases(app, std::slice::from_mut(&mut vm.summary));
    app.tuning.mark(&mut vm);
    Ok(vm)
}

/// Notes into which leases VMs were started.
fn mark_leases(app: &App, vms: &mut [VmSummary]) {
    let Some(grants) = &app.grants else { return };
    for vm in vms {
        vm.lease = grants.lease_of(&vm.name);
    }
}

/// Takes in a QEMU that somebody else started.
#[utoipa::path(post, path = "/v1/vms:adopt", operation_id = "adoptVm", tag = "vms", request_body = AdoptRequest,
    responses((status = 201, body = VmDetail), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn adopt(
    State(app): State<Arc<App>>,
    Json(request): Json<AdoptRequest>,
) -> Result<(StatusCode, axum::Json<VmDetail>), Refusal> {
    let vm = detached(async move { app.registry.adopt(request).await }).await?;
    Ok((StatusCode::CREATED, axum::Json(vm)))
}

/// Everything about one VM.
#[utoipa::path(get, path = "/v1/vms/{name}", operation_id = "showVm", tag = "vms", params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, body = VmDetail), (status = 404, body = Problem)))]
pub async fn show(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer<VmDetail> {
    let mut vm = app.registry.show(&name).await.map_err(IntoProblem::into_problem)?;
    app.forks.mark_unreadable(std::slice::from_mut(&mut vm.summary));
    mark_leases(&app, std::slice::from_mut(&mut vm.summary));
    app.tuning.mark(&mut vm);
    Ok(axum::Json(vm))
}

/// Ends a VM.
#[utoipa::path(delete, path = "/v1/vms/{name}", operation_id = "stopVm", tag = "vms",
    params(("name" = String, Path, description = "Name of the VM"), StopQuery),
    responses((status = 200, body = Stopped), (status = 404, body = Problem), (status = 409, body = Problem)))]
pub async fn stop(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Query(query): Query<StopQuery>,
) -> Answer<Stopped> {
    let work = async move {
        let stopped = app.registry.stop(&name, query.force).await?;
        if let Some(grants) = &app.grants {
            grants.end(&name);
        }
        app.tuning.pins().end(&name);
        Ok::<_, RegistryError>(stopped)
    };
    Ok(axum::Json(detached(work).await?))
}

/// Pauses a guest, or lets it run: one that was moved with `paused`, for instance.
#[utoipa::path(put, path = "/v1/vms/{name}/state", operation_id = "setVmState", tag = "vms",
    params(("name" = String, Path, description = "Name of the VM")), request_body = StateRequest,
    responses((status = 200, body = VmDetail), (status = 404, body = Problem), (status = 409, body = Problem), (status = "5XX", body = Problem)))]
pub async fn set_state(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Json(request): Json<StateRequest>,
) -> Answer<VmDetail> {
    let StateRequest { state, for_ms } = request;
    let Some(for_ms) = for_ms else {
        return Ok(axum::Json(detached(async move { app.registry.set_running(&name, state).await }).await?));
    };
    if state != Running::Paused || !(1..=LONGEST_PAUSE_MS).contains(&for_ms) {
        let message =
            format!("for_ms {for_ms} with {state:?}: expected Paused, for 1 to {LONGEST_PAUSE_MS} ms");
        return Err(Problem::new(Code::BadOption, message).into());
    }
    let time = Duration::from_millis(for_ms);
    Ok(axum::Json(detached(async move { app.registry.pause_for(&name, time).await }).await?))
}

/// Lets go of an adopted VM; it runs on.
#[utoipa::path(post, path = "/v1/vms/{name}/forget", operation_id = "forgetVm", tag = "vms",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, body = Stopped), (status = 404, body = Problem), (status = 409, body = Problem)))]
pub async fn forget(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer<Stopped> {
    let task = async move {
        app.registry.forget(&name).await?;
        Ok::<_, RegistryError>(Stopped { name, how: "released, still running".to_owned(), owed: None })
    };
    Ok(axum::Json(detached(task).await?))
}

/// Everything in the way of a migration. Changes nothing.
#[utoipa::path(get, path = "/v1/vms/{name}/check", operation_id = "checkVm", tag = "vms",
    params(("name" = String, Path, description = "Name of the VM"), CheckQuery),
    responses((status = 200, body = CheckReport), (status = 404, body = Problem), (status = 422, body = Problem)))]
pub async fn check(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Query(query): Query<CheckQuery>,
) -> Answer<CheckReport> {
    let to = app.known.target(&query.to).map_err(IntoProblem::into_problem)?;
    let default = MigrationSpec::default();
    let spec = MigrationSpec {
        devices: parts(query.devices.as_deref())?,
        disks: parts(query.disks.as_deref())?,
        disk_map: parts(query.disk_map.as_deref())?,
        disks_after: query.disks_after.unwrap_or_default(),
        mode: query.mode.unwrap_or_default(),
        bandwidth: query.bandwidth.map(Bandwidth),
        max_downtime_ms: query.max_downtime_ms.unwrap_or(default.max_downtime_ms),
        goals: Goals {
            max_pause_ms: query.max_pause_ms,
            within_ms: query.within_ms,
            host_cpu_percent: query.host_cpu_percent,
        },
        reads_bytes: query.reads_bytes,
        reads_near_bytes_per_s: query.reads_near_bytes_per_s,
        ..default
    };
    Ok(axum::Json(app.engine.check(&name, to, spec).await.map_err(IntoProblem::into_problem)?))
}

/// Gives a VM a device that its record names and that it lacks, such as after a move. One that it has stays.
#[utoipa::path(post, path = "/v1/vms/{name}/devices/{role}/attach", operation_id = "attachDevice", tag = "vms",
    params(("name" = String, Path, description = "Name of the VM"), ("role" = String, Path, description = "What the device is to it")),
    responses((status = 200, body = VmDevice), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn attach_device(
    State(app): State<Arc<App>>,
    Path((name, role)): Path<(String, String)>,
) -> Answer<VmDevice> {
    let engine = app.engine.clone();
    app.forks.not_at_work(&name).map_err(IntoProblem::into_problem)?;
    Ok(axum::Json(detached(async move { engine.attach_device(&name, &role).await }).await?))
}

/// The parts of a list with `;` between them.
fn parts<T: FromStr<Err: Display>>(list: Option<&str>) -> Result<Vec<T>, Problem> {
    let texts = list.unwrap_or_default().split(';').filter(|text| !text.is_empty());
    let parsed: Result<Vec<T>, _> = texts.map(str::parse).collect();
    parsed.map_err(|why| Problem::new(Code::BadOption, why.to_string()))
}
