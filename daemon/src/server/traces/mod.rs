//! Traces of migrations and forks, for a collector of [OpenTelemetry](https://opentelemetry.io/docs/specs/otlp/): one for each that has ended, as OTLP over HTTP
//! in JSON. What cannot be delivered is counted and dropped: nothing waits for a collector.

mod fork;
mod migration;
mod spans;

use std::time::Duration;

use bytes::Bytes;
use hyper::{Method, StatusCode};
use metrics::{counter, describe_counter};
use serde_json::Value;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use vmove_http::client::{Endpoint, HttpClient};
use vmove_types::fork_report::ForkProgress;
use vmove_types::problem::chain;
use vmove_types::progress::Progress;

const LOST: &str = "vmove_traces_lost_total";
/// Traces that wait: more migrations do not end while a collector is restarted.
const WAITING: usize = 256;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const TRIES: u32 = 3;
const AGAIN: Duration = Duration::from_secs(5);

/// Describes the metrics of this module.
pub(super) fn describe() {
    describe_counter!(LOST, "Traces that the collector did not take.");
    counter!(LOST).absolute(0);
}

/// Takes traces of what has ended.
#[derive(Debug)]
pub(super) struct Traces {
    node: String,
    waiting: Sender<Bytes>,
}

impl Traces {
    /// For a collector, and what carries them there.
    pub(super) fn to(collector: Endpoint, node: &str) -> (Self, impl Future<Output = ()> + use<>) {
        let (waiting, traces) = channel(WAITING);
        let client = HttpClient::new(collector, ANSWER_TIMEOUT);
        (Self { node: node.to_owned(), waiting }, deliver(client, traces))
    }

    /// A migration has ended.
    pub(super) fn tell(&self, ended: &Progress) {
        self.send(migration::of(ended, &self.node));
    }

    /// A fork has.
    pub(super) fn tell_fork(&self, ended: &ForkProgress) {
        self.send(fork::of(ended, &self.node));
    }

    fn send(&self, trace: Option<Value>) {
        let Some(trace) = trace else { return };
        if self.waiting.try_send(trace.to_string().into()).is_err() {
            counter!(LOST).increment(1);
        }
    }
}

async fn deliver(client: HttpClient, mut traces: Receiver<Bytes>) {
    let mut was_lost = false;
    while let Some(trace) = traces.recv().await {
        let lost = send(&client, &trace).await;
        match &lost {
            Some(why) => {
                counter!(LOST).increment(1);
                if !was_lost {
                    tracing::warn!("traces do not reach the collector at {}: {why}", client.endpoint());
                }
            }
            None if was_lost => tracing::info!("traces reach the collector at {} again", client.endpoint()),
            None => {}
        }
        was_lost = lost.is_some();
    }
}

/// Why it was not taken, in the end.
async fn send(client: &HttpClient, trace: &Bytes) -> Option<String> {
    let mut why = None;
    for tried in 0..TRIES {
        if tried > 0 {
            tokio::time::sleep(AGAIN).await;
        }
        why = match client.send(Method::POST, "/v1/traces", trace.clone()).await {
            Ok((StatusCode::OK, _)) => return None,
            Ok((status, body)) => Some(format!("{status} {}", String::from_utf8_lossy(&body))),
            Err(error) => Some(chain(&error)),
        };
    }
    why
}
