//! Problems as HTTP answers, and extractors that refuse in the same form.

use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use vmove_migrate::engine::EngineError;

use crate::api::problem::{Code, Problem};
use crate::server::registry::store_problem;

/// What every handler answers.
pub type Answer<T> = Result<axum::Json<T>, Refusal>;

/// A problem on its way out.
#[derive(Debug)]
pub struct Refusal(pub Problem);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if status.is_server_error() {
            tracing::warn!(code = %self.0.code.word(), message = %self.0.message, "request failed");
        }
        let kind = [(header::CONTENT_TYPE, "application/problem+json")];
        let body = serde_json::to_string(&self.0).unwrap_or_default();
        (status, kind, body).into_response()
    }
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

/// An engine error as an answer.
pub fn engine_problem(error: &EngineError) -> Problem {
    let code = match error {
        EngineError::Vm(inner) => return store_problem(inner),
        EngineError::Busy { .. } => Code::Busy,
        EngineError::UnknownSession(_) => Code::UnknownMigration,
        EngineError::TooLate(_) => Code::TooLate,
        EngineError::BadSpec(_) => Code::BadOption,
        EngineError::NothingToRecover(..) => Code::NothingToRecover,
        // I/O, and what newer engines may add.
        _ => Code::Internal,
    };
    Problem::from_error(code, error)
}

impl From<EngineError> for Refusal {
    fn from(error: EngineError) -> Self {
        Self(engine_problem(&error))
    }
}

fn bad_request(text: &str) -> Refusal {
    Refusal(Problem::new(Code::BadRequest, text))
}

/// A JSON body.
#[derive(Debug, FromRequest)]
#[from_request(via(axum::Json), rejection(Refusal))]
pub struct Json<T>(pub T);

/// A query.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Refusal))]
pub struct Query<T>(pub T);

/// Parts of the path, percent-decoded.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Refusal))]
pub struct Path<T>(pub T);

impl From<JsonRejection> for Refusal {
    fn from(rejection: JsonRejection) -> Self {
        bad_request(&rejection.body_text())
    }
}

impl From<QueryRejection> for Refusal {
    fn from(rejection: QueryRejection) -> Self {
        bad_request(&rejection.body_text())
    }
}

impl From<PathRejection> for Refusal {
    fn from(rejection: PathRejection) -> Self {
        bad_request(&rejection.body_text())
    }
}
