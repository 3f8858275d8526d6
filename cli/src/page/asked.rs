//! The daemon that a page shows, asked with the rights of the caller.

use std::sync::{Mutex, PoisonError};

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use vmove_client::bridge::Bridge;
use vmove_client::{Client, Error};

use crate::failure::Failure;

/// Why there is no answer.
pub(super) struct Unanswered {
    failure: Failure,
    by_tls: bool,
}

impl<C: std::fmt::Debug + 'static> From<Error<C>> for Unanswered
where
    Failure: From<Error<C>>,
{
    fn from(error: Error<C>) -> Self {
        Self { by_tls: matches!(error, Error::Tls { .. }), failure: error.into() }
    }
}

/// A client whose answers are passed on as they are.
pub(super) trait Asks: Clone + Send + Sync + 'static {
    /// Said to those who are not known, or no longer.
    const STRANGER: StatusCode;

    /// The answer to `GET path`.
    fn get(&self, path: &str) -> impl Future<Output = Result<(StatusCode, Bytes), Unanswered>> + Send;
}

impl Asks for Client {
    const STRANGER: StatusCode = StatusCode::FORBIDDEN;

    async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), Unanswered> {
        Ok(self.ask(path).await?)
    }
}

impl Asks for Bridge {
    /// Whose token is known, and may not ask this, is told that it is forbidden.
    const STRANGER: StatusCode = StatusCode::UNAUTHORIZED;

    async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), Unanswered> {
        Ok(self.ask(path).await?)
    }
}

type Connect<C> = Box<dyn Fn() -> Result<C, Failure> + Send + Sync>;

/// Who is asked.
pub(super) struct Asked<C> {
    connect: Connect<C>,
    client: Mutex<C>,
}

impl<C: Asks> Asked<C> {
    pub(super) fn new(connect: Connect<C>) -> Result<Self, Failure> {
        let client = Mutex::new(connect()?);
        Ok(Self { connect, client })
    }

    pub(super) fn client(&self) -> C {
        self.client.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// After a refusal: the files of the certificate or token are read again, since they may have been renewed.
    fn renew(&self) {
        if let Ok(client) = (self.connect)() {
            *self.client.lock().unwrap_or_else(PoisonError::into_inner) = client;
        }
    }

    /// The answer to a question, or that there is none.
    pub(super) async fn ask(&self, path: &str) -> Response {
        self.ask_and(path, |body| body).await
    }

    /// The same, after `form` has given a good answer another form.
    pub(super) async fn ask_and(&self, path: &str, form: impl FnOnce(Bytes) -> Bytes) -> Response {
        match self.client().get(path).await {
            Ok((status, body)) => {
                if status == C::STRANGER {
                    self.renew();
                }
                let body = if status.is_success() { form(body) } else { body };
                (status, [(CONTENT_TYPE, "application/json")], body).into_response()
            }
            Err(unanswered) => self.no_answer(unanswered),
        }
    }

    pub(super) fn no_answer(&self, unanswered: impl Into<Unanswered>) -> Response {
        let Unanswered { failure, by_tls } = unanswered.into();
        if by_tls {
            self.renew();
        }
        let told = json!({ "code": failure.code, "message": failure.message });
        (StatusCode::BAD_GATEWAY, axum::Json(told)).into_response()
    }
}
