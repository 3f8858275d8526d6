//! HTTP and JSON as `vmoved`, `vbridged` and their clients speak it.
//!
//! The feature `server` has what both daemons answer with: a [`Refusal`] for every problem, extractors that refuse in the same form
//! ([`Json`], [`Query`], [`Path`]), streams of snapshots ([`events`]), a span for each request ([`span`]), private control sockets
//! ([`socket`]), a listener for TCP ([`listener`]) and checks of an OpenAPI description ([`openapi`]). The feature `client` has the
//! other side: connections that are kept ([`client::HttpClient`]). Both can speak [`tls`]. The feature `systemd` has what daemons tell [`systemd`].
//!
//! ```
//! use axum::{Router, routing::get};
//! use vmove_http::client::{Endpoint, HttpClient};
//! use vmove_http::{Answer, Path, fallback};
//! use vmove_types::problem::{Code, Problem};
//!
//! async fn twice(Path(number): Path<u32>) -> Answer<u32> {
//!     let twice = number.checked_mul(2).ok_or_else(|| Problem::new(Code::BadRequest, "expected a smaller number"))?;
//!     Ok(axum::Json(twice))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("control.sock");
//! let (listener, _socket) = vmove_http::socket::listen(&path)?;
//! let router = Router::new().route("/twice/{number}", get(twice)).fallback(fallback::unknown_path);
//! tokio::spawn(async move { axum::serve(listener, router).await });
//!
//! let client = HttpClient::new(Endpoint::Unix(path), std::time::Duration::from_secs(10));
//! let (status, body) = client.send(hyper::Method::GET, "/twice/21", bytes::Bytes::new()).await?;
//! assert_eq!((status.as_u16(), &body[..]), (200, &b"42"[..]));
//! let (status, _) = client.send(hyper::Method::GET, "/twice/x", bytes::Bytes::new()).await?;
//! assert_eq!(status.as_u16(), 400);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "server")]
pub mod events;
#[cfg(feature = "server")]
mod extract;
#[cfg(feature = "server")]
pub mod fallback;
#[cfg(feature = "server")]
pub mod listener;
#[cfg(feature = "server")]
pub mod metrics;
#[cfg(feature = "server")]
pub mod openapi;
#[cfg(feature = "server")]
mod refusal;
#[cfg(feature = "server")]
pub mod socket;
#[cfg(feature = "server")]
pub mod span;
#[cfg(feature = "systemd")]
pub mod systemd;
#[cfg(any(feature = "client", feature = "server"))]
pub mod tls;
#[cfg(feature = "client")]
pub mod tls_refusal;

#[cfg(feature = "server")]
pub use extract::{Json, Path, Query};
#[cfg(feature = "server")]
pub use refusal::{Answer, Refusal, RefusedWith};
