//! `vmove page` and `vmove fleet page`: serve a page on this host that shows what a daemon or a bridge tells the caller, and changes nothing.
//!
//! They are asked with the caller's own rights: through a socket, over TLS with the caller's certificate, or with the caller's token.

mod asked;
mod files;
mod fleet;
mod gate;
mod questions;

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use serde::Serialize;
use tokio::net::TcpListener;
use vmove_client::bridge::Bridge;
use vmove_http::listener::{self, Bounds};
use vmove_types::problem::{Code, Exit};

use self::asked::Asked;
use self::gate::Gate;
use crate::args::Global;
use crate::args::page::Listen;
use crate::failure::Failure;
use crate::output::{End, say_either};

/// Where the page is.
#[derive(Serialize)]
struct Served {
    url: String,
}

/// A page of the node whose daemon `global` names.
pub async fn of_node(global: &Global, at: Listen, json: bool) -> Result<Exit, End> {
    let global = global.clone();
    let certificate = global.elsewhere.tls_cert.clone();
    let daemon = Asked::new(Box::new(move || global.client()), certificate)?;
    serve(at, files::of_node().merge(questions::router(daemon)), json).await
}

/// A page of the fleet of the bridge to which `connect` leads.
pub async fn of_fleet(
    connect: impl Fn() -> Result<Bridge, Failure> + Send + Sync + 'static,
    at: Listen,
    json: bool,
) -> Result<Exit, End> {
    let bridge = Asked::new(Box::new(connect), None)?;
    serve(at, files::of_fleet().merge(fleet::router(bridge)), json).await
}

async fn serve(at: Listen, inner: Router, json: bool) -> Result<Exit, End> {
    let cannot_listen = |error: std::io::Error| {
        let message = format!(
            "cannot listen at {}: {error}; choose another address by --listen, or leave it out",
            at.listen
        );
        Failure::new(Code::LocalFile, message)
    };
    let listener = TcpListener::bind(at.listen).await.map_err(cannot_listen)?;
    let address = listener.local_addr().map_err(cannot_listen)?;
    let gate = Gate::new();
    let served = Served { url: format!("http://{address}/{}/", gate.secret()) };
    say_either(&served, json, |served| {
        format!("{}\nOpen it in a browser on this host. Ctrl-C ends it.\n", served.url)
    })?;
    tokio::select! {
        () = listener::serve(listener, None, router(gate, inner), Bounds::default()) => {}
        pressed = tokio::signal::ctrl_c() => pressed?,
    }
    Ok(Exit::Done)
}

/// Everything is below the secret, and behind the gate.
fn router(gate: Gate, inner: Router) -> Router {
    let below = format!("/{}/", gate.secret());
    Router::new()
        .nest(&below, inner)
        .fallback(gate::not_found)
        .layer(from_fn_with_state(Arc::new(gate), gate::pass))
}
