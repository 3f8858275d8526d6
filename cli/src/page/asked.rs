//! The daemon that a page shows, asked with the rights of the caller.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use serde_json::json;
use vmove_client::bridge::Bridge;
use vmove_client::{Client, Error};
use vmove_http::tls_refusal::TlsRefusal;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::failure::Failure;

/// Why there is no answer.
pub(super) struct Unanswered {
    failure: Failure,
    tls: Option<TlsRefusal>,
}

impl<C: std::fmt::Debug + 'static> From<Error<C>> for Unanswered
where
    Failure: From<Error<C>>,
{
    fn from(error: Error<C>) -> Self {
        let tls = if let Error::Tls { why, .. } = &error { Some(why.clone()) } else { None };
        Self { tls, failure: error.into() }
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

/// Codes of the page alone: which certificate is out of date.
const OWN_EXPIRED: &str = "own-certificate-expired";
const THEIR_EXPIRED: &str = "their-certificate-expired";

type Connect<C> = Box<dyn Fn() -> Result<C, Failure> + Send + Sync>;

/// Who is asked.
pub(super) struct Asked<C> {
    connect: Connect<C>,
    client: Mutex<C>,
    /// The certificate that it is shown.
    certificate: Option<PathBuf>,
}

impl<C: Asks> Asked<C> {
    pub(super) fn new(connect: Connect<C>, certificate: Option<PathBuf>) -> Result<Self, Failure> {
        let client = Mutex::new(connect()?);
        Ok(Self { connect, client, certificate })
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
        let Unanswered { mut failure, tls } = unanswered.into();
        if tls.is_some() {
            self.renew();
        }
        match tls {
            Some(TlsRefusal::OwnExpired) => {
                OWN_EXPIRED.clone_into(&mut failure.code);
                if let Some(which) = self.certificate.as_deref().and_then(validity) {
                    failure.message = format!("{}. {which}", failure.message);
                }
            }
            Some(TlsRefusal::TheirsExpired) => THEIR_EXPIRED.clone_into(&mut failure.code),
            _ => {}
        }
        let told = json!({ "code": failure.code, "message": failure.message });
        (StatusCode::BAD_GATEWAY, axum::Json(told)).into_response()
    }
}

/// Which certificate that is, when it is valid, and what to do.
fn validity(file: &Path) -> Option<String> {
    let der = CertificateDer::from_pem_file(file).ok()?;
    let (_, own) = X509Certificate::from_der(&der).ok()?;
    let times = own.validity();
    // A new one is there already, and is shown next.
    if times.is_valid() {
        return None;
    }
    Some(format!(
        "The certificate is {} ({}), valid from {} to {}. A new one in its place is read by itself",
        file.display(),
        own.subject(),
        times.not_before,
        times.not_after
    ))
}
