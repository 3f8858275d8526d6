//! What is answered where nothing is.

use axum::http::{Method, Uri};
use vmove_types::problem::{Code, Problem};

use crate::Refusal;

/// There is no such path.
pub async fn unknown_path(uri: Uri) -> Refusal {
    Problem::new(
        Code::UnknownPath,
        format!("Expected a path of /openapi.json, found {}; names are percent-encoded", uri.path()),
    )
    .into()
}

/// The path is there, and does not take this method.
pub async fn wrong_method(method: Method, uri: Uri) -> Refusal {
    Problem::new(Code::MethodNotAllowed, format!("{} does not take {method}: see /openapi.json", uri.path()))
        .into()
}
