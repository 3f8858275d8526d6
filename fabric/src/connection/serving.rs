//! A thread that answers the peer.

use std::sync::Arc;

use crate::endpoint::{CompletionKind, Completions, Endpoint};
use crate::error::FabricError;
use crate::serve::{ServeHandle, ServeState};
use crate::socket::Socket;
use crate::thread::ThreadOptions;

/// See [`Endpoint::serve`]. `socket` is the endpoint's own: shutting it down ends the thread.
pub(super) fn serve<E: Endpoint + 'static>(
    endpoint: E,
    socket: std::io::Result<Socket>,
    options: ThreadOptions,
) -> Result<ServeHandle, FabricError> {
    let socket = socket.map_err(FabricError::io("duplicate the connection's socket"))?;
    let counters = endpoint.counters_handle();
    let state = Arc::new(ServeState::default());
    let seen_by_thread = Arc::clone(&state);
    let name = options.name.clone();
    let body = move |applied: std::io::Result<_>| {
        if let Err(error) = &applied {
            tracing::warn!(thread = %name, %error, "thread options not applied; serving anyway");
        }
        seen_by_thread.started(applied.ok());
        seen_by_thread.finished(answer(endpoint));
    };
    let thread = options.spawn(body).map_err(FabricError::io("start a thread that answers requests"))?;
    Ok(ServeHandle::new(counters, state, socket, thread))
}

/// Answers until the connection ends; why, unless the peer closed it.
fn answer(mut endpoint: impl Endpoint) -> Option<FabricError> {
    let mut found = Completions::default();
    loop {
        match endpoint.poll(&mut found) {
            Err(FabricError::PeerClosed { outstanding: 0 }) => return None,
            Err(error) => return Some(error),
            Ok(0) => {
                if let Err(error) = endpoint.wait(None) {
                    return Some(error);
                }
            }
            Ok(_) => {
                if found.iter().any(|completion| matches!(completion.kind, CompletionKind::Received(_))) {
                    return Some(FabricError::protocol("a message on a connection that only answers"));
                }
            }
        }
    }
}
