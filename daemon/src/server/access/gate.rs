//! What every request passes: who sent it, what it is for, whether that is allowed, and how large it is.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError};
use hyper::body::Body;
use metrics::counter;
use vmove_http::{Refusal, RefusedWith, fallback};
use vmove_types::problem::{Code, Problem};

use super::audit::{self, Line, Who};
use super::{Access, Certificate, Known, Operation, Origin};
use crate::config::Role;

/// Largest body of a request.
pub const LARGEST_BODY: usize = 2 << 20;
/// Within it, the whole body must have arrived.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a body that is too large is taken and thrown away, so that its sender reads the refusal.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a request does not get to its handler.
#[derive(Debug)]
enum Stop {
    Problem(Problem),
    /// Asked too often: when the client may ask again.
    TooOften(Problem, Duration),
    /// The path takes other methods only.
    WrongMethod,
}

/// Lets a request through to its handler, or refuses it. A layer around all paths.
pub async fn admit(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let origin = request.extensions().get::<ConnectInfo<Origin>>().map(|info| info.0.clone());
    let template = request.extensions().get::<MatchedPath>().cloned();
    let operation = template.as_ref().and_then(|path| Operation::find(request.method(), path.as_str()));
    let asked = Asked {
        method: request.method().clone(),
        uri: request.uri().clone(),
        found: template.is_some(),
        operation,
    };
    let response = match judge(&access, origin.as_ref(), &asked) {
        Ok(()) => match with_whole_body(request, operation).await {
            Ok(request) => next.run(request).await,
            Err(problem) => Refusal::from(problem).into_response(),
        },
        Err(Stop::Problem(problem)) => Refusal::from(problem).into_response(),
        Err(Stop::TooOften(problem, wait)) => {
            let mut response = Refusal::from(problem).into_response();
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
            response
        }
        Err(Stop::WrongMethod) => {
            let (method, uri) = (asked.method.clone(), asked.uri.clone());
            fallback::wrong_method(method, uri).await.into_response()
        }
    };
    let from = word(origin.as_ref());
    counter!("vmove_requests_total", "from" => from, "outcome" => outcome(response.status())).increment(1);
    if let Some(audit) = &access.audit
        && is_told(&asked, response.status())
    {
        audit.tell(Line {
            time: audit::now(),
            who: who(&access, origin.as_ref()),
            operation: asked.operation.map_or("", |operation| operation.id),
            method: asked.method.to_string(),
            path: asked.uri.path().to_owned(),
            status: response.status().as_u16(),
            code: response.extensions().get::<RefusedWith>().map(|code| code.0.clone()),
            ms: audit::milliseconds(begun.elapsed()),
            lost: 0,
        });
    }
    response
}

/// Whether a request is in the audit log: whatever may change something, and what its sender may not do. Questions that were answered are not.
fn is_told(asked: &Asked, status: StatusCode) -> bool {
    let question = asked.method == Method::GET || asked.method == Method::HEAD;
    !question || matches!(status, StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS)
}

/// All that [`word`] may say.
pub(in crate::server) const ORIGINS: [&str; 3] = ["socket", "tls", "plain"];

fn word(origin: Option<&Origin>) -> &'static str {
    match origin {
        Some(Origin::Socket(_)) => "socket",
        Some(Origin::Tls(..)) => "tls",
        Some(Origin::Plain(_)) | None => "plain",
    }
}

fn who(access: &Access, origin: Option<&Origin>) -> Who {
    let from = word(origin);
    match origin {
        Some(Origin::Socket(user)) => {
            let uid = user.as_ref().map(tokio::net::unix::UCred::uid);
            Who { from, uid, pid: user.as_ref().and_then(tokio::net::unix::UCred::pid), ..Who::default() }
        }
        Some(Origin::Tls(certificate, address)) => {
            let known = access.find(certificate);
            Who {
                from,
                address: Some(address.to_string()),
                subject: Some(certificate.subject.clone()),
                role: known.as_ref().map(|known| known.client.role.to_string()),
                client: known.map(|known| known.client.named.to_string()),
                ..Who::default()
            }
        }
        Some(Origin::Plain(address)) => Who { from, address: Some(address.to_string()), ..Who::default() },
        None => Who { from, ..Who::default() },
    }
}

/// All that [`outcome`] may say.
pub(in crate::server) const OUTCOMES: [&str; 5] = ["done", "refused", "forbidden", "limited", "failed"];

/// How a request ended, for the metric.
fn outcome(status: StatusCode) -> &'static str {
    match status {
        StatusCode::FORBIDDEN => "forbidden",
        StatusCode::TOO_MANY_REQUESTS => "limited",
        status if status.is_client_error() => "refused",
        status if status.is_server_error() => "failed",
        _ => "done",
    }
}

/// What a request wants.
struct Asked {
    method: Method,
    uri: Uri,
    /// The router knows its path.
    found: bool,
    operation: Option<&'static Operation>,
}

fn judge(access: &Access, origin: Option<&Origin>, asked: &Asked) -> Result<(), Stop> {
    match origin {
        Some(Origin::Socket(_)) => Ok(()),
        Some(Origin::Tls(certificate, _)) => match access.find(certificate) {
            Some(known) => client(access, &known, certificate, asked),
            None => no_client(access, certificate, asked),
        },
        Some(Origin::Plain(_)) | None if asked.operation.is_some_and(|asked| asked.public) => Ok(()),
        Some(Origin::Plain(_)) | None => {
            let message = format!(
                "{} {} is not served on the peer port without TLS: use the control socket of that node, or a client's certificate on a node with TLS",
                asked.method,
                asked.uri.path()
            );
            Err(Stop::Problem(Problem::new(Code::ReadOnly, message)))
        }
    }
}

/// Of a client that the configuration names.
fn client(access: &Access, known: &Known, certificate: &Certificate, asked: &Asked) -> Result<(), Stop> {
    in_force(certificate)?;
    known.bucket.take(Instant::now()).map_err(|wait| too_often(access, known, wait))?;
    let role = known.client.role;
    let Some(operation) = asked.operation else {
        // What has no role is for nobody; an unknown path is told so.
        return if asked.found { Err(Stop::WrongMethod) } else { Ok(()) };
    };
    let needs = operation.needs(&asked.uri);
    if role >= needs {
        return Ok(());
    }
    let message = format!(
        "Expected the role {needs} for {}, found {role} of the client {} ({}): change its [[client]] entry in {}, and reload vmoved there (SIGHUP)",
        what(asked),
        known.client.named,
        certificate.subject,
        access.place()
    );
    Err(forbidden(message, role, needs, asked))
}

/// Of a certificate that is no client's: a node's may ask what nodes may.
fn no_client(access: &Access, certificate: &Certificate, asked: &Asked) -> Result<(), Stop> {
    in_force(certificate)?;
    let needs = match asked.operation {
        Some(operation) if operation.public && !certificate.for_clients_only => return Ok(()),
        Some(operation) => operation.needs(&asked.uri),
        None if asked.found => return Err(Stop::WrongMethod),
        None => Role::Viewer,
    };
    let message = format!(
        "Expected the role {needs} for {}, found no [[client]] entry for the certificate {} (names {:?}, URIs {:?}): add one in {}, and reload vmoved there (SIGHUP); or use the control socket of that node",
        what(asked),
        certificate.subject,
        certificate.names,
        certificate.uris,
        access.place()
    );
    Err(forbidden(message, Role::None, needs, asked))
}

/// A connection may be kept for longer than its certificate is good for.
fn in_force(certificate: &Certificate) -> Result<(), Stop> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    if i64::try_from(now).is_ok_and(|now| now <= certificate.ends) {
        return Ok(());
    }
    let message = format!(
        "Expected a certificate in force, found {}, which has ended: connect with a new one",
        certificate.subject
    );
    Err(Stop::Problem(Problem::new(Code::Forbidden, message)))
}

fn what(asked: &Asked) -> String {
    match asked.operation {
        Some(operation) if !operation.id.is_empty() => operation.id.to_owned(),
        _ => format!("{} {}", asked.method, asked.uri.path()),
    }
}

fn forbidden(message: String, found: Role, needs: Role, asked: &Asked) -> Stop {
    let mut problem = Problem::new(Code::Forbidden, message);
    let (role, needed) = (found.to_string(), needs.to_string());
    problem.details = Some(serde_json::json!({ "role": role, "needed": needed, "operation": what(asked) }));
    Stop::Problem(problem)
}

fn too_often(access: &Access, known: &Known, wait: Duration) -> Stop {
    let rate = known.bucket.rate();
    let message = format!(
        "Expected at most {} requests a second and {} at once from the client {}, found more: try again in {} ms, or raise requests-per-second and burst of its [[client]] entry in {}",
        rate.per_second,
        rate.burst,
        known.client.named,
        wait.as_millis() + 1,
        access.place()
    );
    let mut problem = Problem::new(Code::RateLimited, message);
    problem.details = Some(serde_json::json!({ "retry_after_ms": wait.as_secs_f64() * 1e3 }));
    Stop::TooOften(problem, wait)
}

/// Takes the body before the handler begins, so that no client lets it wait, and none makes it hold more than it may.
async fn with_whole_body(request: Request, operation: Option<&Operation>) -> Result<Request, Problem> {
    if operation.is_none_or(Operation::is_question) {
        return Ok(request);
    }
    let (head, mut body) = request.into_parts();
    if body.size_hint().lower() > LARGEST_BODY as u64 {
        // Closing with unread bytes would reset the connection, and the refusal with it.
        let rest = async { while let Some(Ok(_)) = body.frame().await {} };
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, rest).await;
        return Err(too_large());
    }
    match tokio::time::timeout(BODY_TIMEOUT, axum::body::to_bytes(body, LARGEST_BODY)).await {
        Ok(Ok(body)) => Ok(Request::from_parts(head, body.into())),
        Ok(Err(error)) if error.source().is_some_and(|why| why.is::<LengthLimitError>()) => Err(too_large()),
        Ok(Err(_)) => Err(Problem::bad_request("Expected a whole body, found a part of it: send it again")),
        Err(_) => Err(Problem::bad_request(format!(
            "Expected a body within {} s, found only a part of it: send it again",
            BODY_TIMEOUT.as_secs()
        ))),
    }
}

fn too_large() -> Problem {
    let message = format!("Expected a body of at most {LARGEST_BODY} bytes, found a longer one: send less");
    Problem::new(Code::TooLarge, message)
}
