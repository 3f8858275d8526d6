//! Why a request has no answer.

use std::io;

use vmove_http::client::{Endpoint, HttpError};
use vmove_http::tls_refusal::TlsRefusal;
use vmove_types::problem::{Code, Problem};

/// Why a request has no answer. `C` are the words of the daemon that was asked; without it, those of `vmoved`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error<C: std::fmt::Debug + 'static = Code> {
    /// The daemon refused it.
    #[error(transparent)]
    Refused(Problem<C>),
    /// There is no connection: the daemon has not seen the request.
    #[error("Expected {daemon} at {endpoint}, found: {source}")]
    Unreachable {
        /// The program that was expected.
        daemon: &'static str,
        /// The socket that was tried.
        endpoint: Endpoint,
        /// The kernel's answer.
        source: io::Error,
    },
    /// TLS failed: the daemon has not seen the request.
    #[error("Expected {daemon} with TLS at {endpoint}, found: {why}")]
    Tls {
        /// The program that was expected.
        daemon: &'static str,
        /// The port that was tried.
        endpoint: Endpoint,
        /// Which end refused the other, and why.
        why: TlsRefusal,
    },
    /// The connection broke: whether the daemon acted on the request is not known.
    #[error("Lost the connection to {daemon} at {endpoint} ({source})")]
    Lost {
        /// The program that was asked.
        daemon: &'static str,
        /// Its socket.
        endpoint: Endpoint,
        /// What happened.
        source: HttpError,
    },
    /// What answers is not the expected daemon, or another version of it.
    #[error("Expected {daemon} of this version at {endpoint}, found something else ({found})")]
    Unexpected {
        /// The program that was expected.
        daemon: &'static str,
        /// The socket that was asked.
        endpoint: Endpoint,
        /// What was answered.
        found: String,
    },
    /// The request cannot be written as JSON.
    #[error("The request cannot be written")]
    Request(#[source] serde_json::Error),
}

impl<C: std::fmt::Debug + 'static> Error<C> {
    /// Whether no daemon of this version answers. Then the same request may succeed later.
    #[must_use]
    pub const fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. } | Self::Tls { .. } | Self::Lost { .. } | Self::Unexpected { .. }
        )
    }
}
