//! What a daemon tells systemd: that it is ready, that it ends, and to a watchdog that it answers.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use tokio::time::MissedTickBehavior;

pub use sd_notify::NotifyState;

use crate::client::{Endpoint, HttpClient, HttpError};

/// How often the watchdog is told within its time: one answer may come late, and another one be lost.
const TOLD_WITHIN: u32 = 3;

/// Tells systemd, if it has started us. That it cannot be told is no reason to end.
pub fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "systemd could not be told");
    }
}

/// Tells systemd's watchdog (`WatchdogSec=` of the unit) that this daemon answers, for as long as it does: asked for `/healthz` on its control
/// socket, as its users ask. Ends at once if there is no watchdog.
///
/// A daemon whose worker threads are all blocked, which waits for ever for a lock that `/healthz` takes, or which takes no connections does not
/// answer: systemd then puts another in its place.
pub async fn tell_watchdog(control: &Path) {
    let Some(time) = sd_notify::watchdog_enabled().filter(|time| !time.is_zero()) else { return };
    let every = time / TOLD_WITHIN;
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match answers(control, every).await {
            Ok(()) => tell(&[NotifyState::Watchdog]),
            Err(error) => {
                tracing::error!(%error, "no answer on the own control socket: the watchdog is not told");
            }
        }
    }
}

/// Whether the daemon there answers within `timeout`. A refusal is an answer: a bridge that has lost its store would do no better anew.
async fn answers(control: &Path, timeout: Duration) -> Result<(), HttpError> {
    // A new connection each time, since users make new ones, too.
    let client = HttpClient::new(Endpoint::Unix(control.to_owned()), timeout);
    client.send(Method::GET, "/healthz", Bytes::new()).await.map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::Router;
    use axum::http::StatusCode;
    use axum::routing::get;

    use super::*;
    use crate::socket;

    const SOON: Duration = Duration::from_millis(300);

    #[tokio::test]
    #[expect(clippy::await_holding_lock, reason = "only the server, on a thread of its own, waits for it")]
    async fn whoever_refuses_answers_and_whoever_waits_for_a_lock_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock");
        assert!(matches!(answers(&path, SOON).await, Err(HttpError::Connect { .. })), "nobody is there");
        // The server has threads of its own: a worker of ours that waited for the lock might be the one that watches sockets and clocks for all,
        // and nobody would notice that the time is over.
        let servers =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (listener, _socket) = {
            let _within = servers.enter();
            socket::listen(&path).unwrap()
        };
        assert!(matches!(answers(&path, SOON).await, Err(HttpError::Timeout { .. })), "nobody accepts");
        let lock = Arc::new(Mutex::new(()));
        let taken = lock.clone();
        let health = move || {
            drop(taken.lock().unwrap());
            async { StatusCode::SERVICE_UNAVAILABLE }
        };
        let server = axum::serve(listener, Router::new().route("/healthz", get(health)));
        servers.spawn(async move { server.await });
        answers(&path, Duration::from_secs(10)).await.unwrap();
        let held = lock.lock().unwrap();
        let asked = answers(&path, SOON).await;
        drop(held);
        assert!(matches!(asked, Err(HttpError::Timeout { .. })), "{asked:?}");
        servers.shutdown_background();
    }
}
