//! `/v1/leases`, `/v1/account`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;

use sched_bridge::place::ClusterRequest;
use sched_bridge::request::Catalog;
use vmove_http::{Answer, Json, Path, Query, Refusal};

use super::nearest;
use super::problem::{Code, Problem};
use super::visible::visible;
use super::vms::checked_start;
use super::{App, to_its_end};
use crate::access::Caller;
use crate::account::{Record, apel, csv, json_lines};
use crate::bridge::{BridgeError, GrantRequest, Granted, Wanted};
use crate::lease::{DEFAULT_TTL_MS, LeaseId, notes_on_shares};
use crate::request_text;
use crate::slurm::booking::BookingError;
use crate::slurm::follower::JOBS_PREFIX;
use crate::vms::{self, StartError};
use vmove_bridge_types::requests::{
    AccountQuery, LeaseAnswer, LeaseInfo, LeaseList, LeaseQuery, LeaseRequest, StartAll, StartVm, StartedVm,
};

/// All leases; for a tenant, its own.
#[utoipa::path(get, path = "/v1/leases", operation_id = "listLeases", tag = "leases", params(LeaseQuery),
    responses((status = 200, body = LeaseList), (status = "5XX", body = Problem)))]
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<LeaseQuery>,
) -> Answer<LeaseList> {
    let view = app.bridge.view()?;
    let wanted = |lease: &LeaseInfo| {
        caller.may_use(&lease.holder) && query.holder.as_ref().is_none_or(|holder| *holder == lease.holder)
    };
    let leases = view.leases().values().map(|known| app.bridge.info(&known.lease));
    Ok(axum::Json(LeaseList { leases: leases.filter(wanted).collect() }))
}

/// Places a virtual cluster and leases what it needs: all of it or nothing.
#[utoipa::path(post, path = "/v1/leases", operation_id = "grantLease", tag = "leases", request_body = LeaseRequest,
    responses((status = 200, body = LeaseAnswer, description = "It was there already, or was only tried"), (status = 201, body = LeaseAnswer),
        (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn grant(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Json(request): Json<LeaseRequest>,
) -> Result<(StatusCode, axum::Json<LeaseAnswer>), Refusal> {
    check_holder(&caller, &request)?;
    let (wanted, notes) = wanted(&request, &app.types.current())?;
    let start = request.start.as_ref().map(|start| checked_start(&app, &caller, start)).transpose()?;
    if request.what_if && start.is_some() {
        return Err(Problem::bad_request(
            "what_if leases nothing, so nothing can be started: leave out start",
        )
        .into());
    }
    if request.what_if {
        let Wanted::Cluster(wanted) = wanted else {
            return Err(Problem::bad_request(
                "what_if takes a request or a text: assignments are placed already",
            )
            .into());
        };
        let mut answer = LeaseAnswer { notes, ..what_if(&app, *wanted, request.explain).await? };
        let placed = answer.placement.iter().flat_map(|placement| &placement.assignments);
        answer.notes.extend(notes_on_shares(&placed));
        if let (Some(quota), Some(placement)) = (app.quotas.of(&request.holder), &answer.placement) {
            let checked =
                quota.check(app.bridge.view()?.all_leases(), &request.holder, &placement.assignments);
            answer.notes.extend(checked.err().map(|over| format!("a lease would be refused: {over}")));
        }
        return Ok((StatusCode::OK, axum::Json(answer)));
    }
    let quota = app.quotas.of(&request.holder).cloned();
    let id = match request.id {
        Some(id) => id,
        None if request.named => wanted.cluster().as_str().parse().map_err(Problem::bad_request)?,
        None => LeaseId::unique(),
    };
    let grant = GrantRequest {
        id,
        holder: request.holder,
        project: request.project,
        wanted,
        ttl_ms: request.ttl_ms.unwrap_or(DEFAULT_TTL_MS),
        together: request.together,
        start: start.clone(),
        quota,
    };
    let asked = match &grant.wanted {
        Wanted::Cluster(asked) => Some(asked.clone()),
        Wanted::Assignments(..) => None,
    };
    // Finished even if the client hangs up, so that its repeated request finds the lease.
    let work = {
        let app = Arc::clone(&app);
        async move { grant_and_start(&app, grant, start).await }
    };
    let (granted, vms) = match (to_its_end(work).await, asked) {
        (Ok(done), _) => done,
        (Err(problem), Some(asked)) if problem.code == Code::NoRoom => {
            return Err(nearest::told(&app, &asked, problem).await.into());
        }
        (Err(problem), _) => return Err(without_other_holder(&caller, problem).into()),
    };
    let status = if granted.again { StatusCode::OK } else { StatusCode::CREATED };
    let lease = Some(app.bridge.info(&granted.lease));
    let mut notes = notes;
    notes.extend(notes_on_shares(&granted.lease.at_home().map(|held| &held.assignment)));
    Ok((
        status,
        axum::Json(LeaseAnswer {
            lease,
            placement: granted.placement,
            again: granted.again,
            explanation: None,
            refused: None,
            nearest: None,
            notes,
            vms,
        }),
    ))
}

/// Grants a lease and starts its VMs. If one does not start, a new lease is given back.
async fn grant_and_start(
    app: &App,
    grant: GrantRequest,
    start: Option<StartAll>,
) -> Result<(Granted, Vec<StartedVm>), Problem> {
    let mut granted = match &app.slurm {
        Some(slurm) => slurm.book(&app.bridge, grant).await?,
        None => app.bridge.grant(grant).await?,
    };
    let Some(start) = start else { return Ok((granted, Vec::new())) };
    let id = granted.lease.id.clone();
    let wanted: Vec<StartVm> = granted.lease.vms().map(|vm| start.of(vm.clone())).collect();
    let error = match vms::start(&app.bridge, &app.driver, &id, &wanted).await {
        Ok(started) => {
            granted.lease = Arc::clone(&app.bridge.view()?.lease(&id)?.lease);
            return Ok((granted, started));
        }
        Err(error) => error,
    };
    let kept = granted.again || matches!(error, StartError::StillRunning { .. });
    let problem = Problem::from(error);
    let end = if kept {
        format!("lease {id} is kept")
    } else {
        match app.bridge.release(&id).await {
            Ok(_) | Err(BridgeError::UnknownLease(_)) => format!("lease {id} is given back"),
            Err(error) => format!("lease {id} could not be given back ({error}): release it"),
        }
    };
    if let (false, Some(slurm)) = (kept, &app.slurm) {
        slurm.lease_ended(&id).await;
    }
    Err(Problem::new(problem.code, format!("{}; {end}", problem.message)))
}

/// A tenant leases for itself, and not with the ids that stand for jobs of Slurm.
fn check_holder(caller: &Caller, request: &LeaseRequest) -> Result<(), Problem> {
    let Caller::Tenant(name) = caller else { return Ok(()) };
    if !caller.may_use(&request.holder) {
        let message =
            format!("{caller} leases for itself: expected the holder {name:?}, found {:?}", request.holder);
        return Err(Problem::new(Code::Forbidden, message));
    }
    request.id.as_ref().map_or(Ok(()), |id| check_id(caller, id.as_str()))
}

/// A tenant takes no id that stands for a job of Slurm.
pub(super) fn check_id(caller: &Caller, id: &str) -> Result<(), Problem> {
    if matches!(caller, Caller::Tenant(_)) && id.starts_with(JOBS_PREFIX) {
        let message = format!("ids that begin with {JOBS_PREFIX} stand for jobs of Slurm: choose another id");
        return Err(Problem::new(Code::Forbidden, message));
    }
    Ok(())
}

/// A tenant does not learn who has the id that it asked for.
pub(super) fn without_other_holder(caller: &Caller, problem: Problem) -> Problem {
    match (caller, problem.code) {
        (Caller::Tenant(_), Code::IdTaken) => Problem::new(
            Code::IdTaken,
            "the id is taken, by a lease of another holder or for another cluster: choose another id",
        ),
        _ => problem,
    }
}

impl From<BookingError> for Problem {
    fn from(error: BookingError) -> Self {
        let code = match error {
            BookingError::Bridge(error) => return error.into(),
            BookingError::Slurm(_) => Code::SlurmUnreachable,
            BookingError::Overtaken => Code::Contended,
        };
        Self::new(code, error.to_string())
    }
}

/// Where a request would be placed, and, with `explain`, why.
async fn what_if(app: &App, wanted: ClusterRequest, explain: bool) -> Result<LeaseAnswer, Refusal> {
    let mut answer = LeaseAnswer {
        lease: None,
        placement: None,
        again: false,
        explanation: None,
        refused: None,
        nearest: None,
        notes: Vec::new(),
        vms: Vec::new(),
    };
    if explain {
        let (placement, explanation) = app.bridge.explain(wanted.clone()).await?;
        answer.explanation = Some(explanation);
        match placement {
            Ok(placement) => answer.placement = Some(placement),
            Err(reason) => {
                answer.refused = Some(reason.to_string());
                answer.nearest = nearest::explained(app, wanted).await;
            }
        }
    } else {
        match app.bridge.what_if(wanted.clone()).await {
            Ok(placement) => answer.placement = Some(placement),
            Err(error) => return Err(nearest::told(app, &wanted, error.into()).await.into()),
        }
    }
    Ok(answer)
}

/// What is wanted: exactly one of `request`, `text` and `assignments`; and what of a text is left to whoever starts the VMs.
fn wanted(request: &LeaseRequest, catalog: &Catalog) -> Result<(Wanted, Vec<String>), Problem> {
    match (&request.request, &request.text, &request.assignments) {
        (Some(cluster), None, None) => Ok((Wanted::Cluster(Box::new(cluster.clone())), Vec::new())),
        (None, Some(text), None) => {
            let parsed =
                request_text::parse(text, request.cluster.as_ref(), catalog).map_err(Problem::bad_request)?;
            Ok((Wanted::Cluster(Box::new(parsed.request)), parsed.notes))
        }
        (None, None, Some(assignments)) => {
            let name = request
                .cluster
                .clone()
                .ok_or_else(|| Problem::bad_request("assignments need the name of a cluster"))?;
            Ok((Wanted::Assignments(name, assignments.clone()), Vec::new()))
        }
        _ => Err(Problem::bad_request("expected exactly one of request, text and assignments")),
    }
}

/// A lease.
#[utoipa::path(get, path = "/v1/leases/{id}", operation_id = "showLease", tag = "leases", params(("id" = String, Path, description = "Id of the lease")),
    responses((status = 200, body = LeaseInfo), (status = 404, body = Problem), (status = "5XX", body = Problem)))]
pub async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<LeaseId>,
) -> Answer<LeaseInfo> {
    let view = app.bridge.view()?;
    Ok(axum::Json(app.bridge.info(visible(&view, &caller, &id)?)))
}

/// Records a heartbeat. Status 404: the lease has ended, and its holder must stop using everything in it.
#[utoipa::path(post, path = "/v1/leases/{id}/renew", operation_id = "renewLease", tag = "leases", params(("id" = String, Path, description = "Id of the lease")),
    responses((status = 200, body = LeaseInfo), (status = 404, body = Problem), (status = "5XX", body = Problem)))]
pub async fn renew(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<LeaseId>,
) -> Answer<LeaseInfo> {
    let renewed = app.bridge.renew_if(&id, |holder| caller.may_use(holder)).await?;
    Ok(axum::Json(app.bridge.info(&renewed)))
}

/// Releases a lease. The answer is its accounting record. Refused (409) while one of its VMs is moved by a plan.
#[utoipa::path(delete, path = "/v1/leases/{id}", operation_id = "releaseLease", tag = "leases", params(("id" = String, Path, description = "Id of the lease")),
    responses((status = 200, body = Record), (status = 404, body = Problem), (status = 409, body = Problem), (status = "5XX", body = Problem)))]
pub async fn release(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<LeaseId>,
) -> Answer<Record> {
    let record = app.bridge.release_if(&id, |holder| caller.may_use(holder)).await?;
    if let Some(slurm) = &app.slurm {
        slurm.lease_ended(&id).await;
    }
    Ok(axum::Json(record))
}

/// Accounting records of leases that have ended; for a tenant, of its own.
#[utoipa::path(get, path = "/v1/account", operation_id = "account", tag = "account", params(AccountQuery),
    responses((status = 200, body = String, content_type = "text/plain"), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn account(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<AccountQuery>,
) -> Result<impl IntoResponse, Refusal> {
    let records = app.bridge.records().await?;
    let wanted = |record: &Record| {
        caller.may_use(&record.holder)
            && query.holder.as_ref().is_none_or(|holder| *holder == record.holder)
            && query.since_ms.is_none_or(|since| record.ended_wall_ms >= since)
    };
    let records: Vec<Record> =
        records.iter().filter_map(|(_, text)| serde_json::from_str(text).ok()).filter(wanted).collect();
    match query.format.as_deref() {
        None | Some("jsonl") => Ok(([(header::CONTENT_TYPE, "application/jsonl")], json_lines(&records))),
        Some("csv") => Ok(([(header::CONTENT_TYPE, "text/csv")], csv(&records))),
        Some("apel") => {
            let site = query.site.as_deref().filter(|site| !site.trim().is_empty()).ok_or_else(|| {
                Problem::bad_request("format apel: expected the name of the site (site, --site), found none")
            })?;
            let service = query.service.as_deref().unwrap_or("vmove");
            Ok(([(header::CONTENT_TYPE, "text/plain")], apel(&records, site, service)))
        }
        Some(other) => {
            Err(Problem::bad_request(format!("format {other:?}: expected jsonl, csv or apel")).into())
        }
    }
}

impl From<BookingError> for Refusal {
    fn from(error: BookingError) -> Self {
        Problem::from(error).into()
    }
}
