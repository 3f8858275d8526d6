//! Extractors that refuse in the form of all refusals.

use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts};
use vmove_types::problem::{Code, Problem};

use crate::Refusal;

/// A JSON body.
#[derive(Debug, FromRequest)]
#[from_request(via(axum::Json), rejection(Refusal))]
pub struct Json<T>(pub T);

/// A query.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Refusal))]
pub struct Query<T>(pub T);

/// Parameters in the path, percent-decoded.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Refusal))]
pub struct Path<T>(pub T);

/// Every daemon has the word for this, with the same status and exit code.
fn bad_request(text: String) -> Refusal {
    Problem::<Code>::bad_request(text).into()
}

impl From<JsonRejection> for Refusal {
    fn from(rejection: JsonRejection) -> Self {
        bad_request(rejection.body_text())
    }
}

impl From<QueryRejection> for Refusal {
    fn from(rejection: QueryRejection) -> Self {
        bad_request(rejection.body_text())
    }
}

impl From<PathRejection> for Refusal {
    fn from(rejection: PathRejection) -> Self {
        bad_request(rejection.body_text())
    }
}
