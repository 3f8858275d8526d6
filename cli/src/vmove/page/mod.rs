//! `vmove page`: serves a page on this host that shows what the daemon tells the caller, and changes nothing.
//!
//! The daemon is asked with the caller's own rights: through its socket, or over TLS with the caller's certificate.

mod files;
mod gate;
mod questions;

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use serde::Serialize;
use tokio::net::TcpListener;
use vmove_http::listener::{self, Bounds};
use vmove_types::problem::{Code, Exit};

use self::gate::Gate;
use self::questions::Daemon;
use crate::args::Global;
use crate::args::page::Page;
use crate::failure::Failure;
use crate::output::{End, say_either};

/// Where the page is.
#[derive(Serialize)]
struct Served {
    url: String,
}

pub async fn serve(global: &Global, args: &Page, json: bool) -> Result<Exit, End> {
    let daemon = Arc::new(Daemon::new(global.clone())?);
    let cannot_listen = |error: std::io::Error| {
        let message = format!(
            "cannot listen at {}: {error}; choose another address by --listen, or leave it out",
            args.listen
        );
        Failure::new(Code::LocalFile, message)
    };
    let listener = TcpListener::bind(args.listen).await.map_err(cannot_listen)?;
    let address = listener.local_addr().map_err(cannot_listen)?;
    let gate = Gate::new();
    let served = Served { url: format!("http://{address}/{}/", gate.secret()) };
    say_either(&served, json, |served| {
        format!("{}\nOpen it in a browser on this host. Ctrl-C ends it.\n", served.url)
    })?;
    tokio::select! {
        () = listener::serve(listener, None, router(gate, daemon), Bounds::default()) => {}
        pressed = tokio::signal::ctrl_c() => pressed?,
    }
    Ok(Exit::Done)
}

/// Everything is below the secret, and behind the gate.
fn router(gate: Gate, daemon: Arc<Daemon>) -> Router {
    let below = format!("/{}/", gate.secret());
    let inner = files::router().merge(questions::router(daemon));
    Router::new()
        .nest(&below, inner)
        .fallback(gate::not_found)
        .layer(from_fn_with_state(Arc::new(gate), gate::pass))
}
