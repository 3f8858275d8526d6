//! Problems as HTTP answers.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use vmove_types::problem::{Problem, ProblemCode};

/// What a handler answers.
pub type Answer<T> = Result<axum::Json<T>, Refusal>;

/// A [`Problem`] on its way out, as `application/problem+json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    status: StatusCode,
    code: String,
    message: String,
    body: String,
}

impl<C: ProblemCode> From<Problem<C>> for Refusal {
    fn from(problem: Problem<C>) -> Self {
        Self {
            status: StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            code: problem.code.word(),
            body: serde_json::to_string(&problem).unwrap_or_default(),
            message: problem.message,
        }
    }
}

/// The stable word of a refusal, among the extensions of its response: for those who note what became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedWith(pub String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        if self.status.is_server_error() {
            tracing::warn!(code = %self.code, message = %self.message, "request failed");
        }
        let told = [(header::CONTENT_TYPE, "application/problem+json")];
        let mut response = (self.status, told, self.body).into_response();
        response.extensions_mut().insert(RefusedWith(self.code));
        response
    }
}

#[cfg(test)]
mod tests {
    use vmove_types::problem::Code;

    use super::*;

    #[tokio::test]
    async fn a_refusal_has_the_status_of_its_problem_and_is_that_problem() {
        let problem = Problem::new(Code::UnknownVm, "no VM \"a\"");
        let response = Refusal::from(problem.clone()).into_response();
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/problem+json");
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        assert_eq!(serde_json::from_slice::<Problem>(&body).unwrap(), problem);
    }
}
