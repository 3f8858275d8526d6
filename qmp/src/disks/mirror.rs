//! The begin of `blockdev-mirror`, without a write of the guest being lost.
//!
//! While a mirror begins, QEMU from 8.0 on looks which blocks of the disk are in use, and notes no writes yet. A write to a fresh block that is under
//! way when QEMU looks, and ends before the mirror is ready to note it, is in no copy ever: seen with 10.0.2 (`qmp/tests/mirror.rs`), not with
//! 7.2. So no write may be under way: the guest stands still until the mirror notes writes. It is told for how long.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use vmove_types::vm::Running;

use super::TIMEOUT;
use crate::client::QemuVersion;
use crate::{Client, QmpError};

/// The first QEMU that may lose a write.
const LOSES_WRITES: u32 = 8;
/// Between looks; the guest waits.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// So long a guest may stand still for it. QEMU reads the tables of the image meanwhile: some milliseconds, more for images of terabytes on slow
/// storage.
const LONGEST: Duration = Duration::from_secs(2);

/// What did not end in that time.
const TOO_SLOW: &str = "blockdev-mirror (the guest stands still until QEMU has looked at its disk; for one that is paused there is no limit)";

/// A mirror that is to begin.
#[derive(Debug)]
pub(super) struct Mirror {
    pub job: String,
    /// Of `blockdev-mirror`.
    pub arguments: Value,
}

/// Whether this QEMU may lose what a guest writes while a mirror begins.
#[must_use]
pub fn loses_writes(version: &QemuVersion) -> bool {
    version.major >= LOSES_WRITES
}

/// Begins mirrors, all of them or none. How long the guest stood still for it.
///
/// # Errors
/// The place of the mirror that cannot begin, and [`QmpError`]; then no mirror is left, unless QEMU does not answer. The guest runs again if it
/// ran, unless QEMU does not answer.
pub(super) async fn begin_mirrors(
    client: &Client,
    mirrors: &[Mirror],
) -> Result<Duration, (usize, QmpError)> {
    let first = |error| (0, error);
    let stops = loses_writes(client.version()) && is_running(client).await.map_err(first)?;
    let begun = Instant::now();
    if stops {
        client.set_running(Running::Paused, TIMEOUT).await.map_err(first)?;
    }
    let began = begin(client, mirrors, stops.then(|| begun + LONGEST)).await;
    let mut still = Duration::ZERO;
    if stops {
        // Refused or not answered: the guest may stand still, so this is no refusal of which nothing is left.
        let resumed = client.set_running(Running::Running, TIMEOUT).await;
        resumed.map_err(|_| first(late("cont (the guest may stand still)", TIMEOUT)))?;
        still = begun.elapsed();
    }
    if began.is_err() {
        for mirror in mirrors {
            end(client, &mirror.job).await;
        }
    }
    began.map(|()| still)
}

fn late(command: &str, waited: Duration) -> QmpError {
    QmpError::Timeout { command: command.to_owned(), waited }
}

async fn is_running(client: &Client) -> Result<bool, QmpError> {
    let status = client.execute_raw("query-status", Value::Null, TIMEOUT).await?;
    Ok(status.get("status").and_then(Value::as_str) == Some("running"))
}

async fn begin(client: &Client, mirrors: &[Mirror], until: Option<Instant>) -> Result<(), (usize, QmpError)> {
    for (place, mirror) in mirrors.iter().enumerate() {
        let begun = client.execute_raw("blockdev-mirror", mirror.arguments.clone(), TIMEOUT).await;
        begun.map_err(|error| (place, error))?;
    }
    while let Some(until) = until {
        let jobs = client.execute_raw("query-block-jobs", Value::Null, TIMEOUT).await;
        let jobs = jobs.map_err(|error| (0, error))?;
        let Some(slow) = mirrors.iter().position(|mirror| !notes_writes(&jobs, &mirror.job)) else { break };
        if Instant::now() >= until {
            return Err((slow, late(TOO_SLOW, LONGEST)));
        }
        sleep(LOOK_AGAIN).await;
    }
    Ok(())
}

/// Whether a mirror has begun to note writes: it knows how much it has to copy then. One that is not there has ended.
fn notes_writes(jobs: &Value, name: &str) -> bool {
    let mut jobs = jobs.as_array().into_iter().flatten();
    let job = jobs.find(|job| job.get("device").and_then(Value::as_str) == Some(name));
    job.is_none_or(|job| {
        let ended = job.get("status").and_then(Value::as_str) == Some("concluded");
        let ready = job.get("ready").and_then(Value::as_bool) == Some(true);
        ended || ready || job.get("len").and_then(Value::as_u64).is_some_and(|len| len > 0)
    })
}

/// Takes back a mirror of which nothing came. What is left is found later by its name.
async fn end(client: &Client, job: &str) {
    let _ = client.execute_raw("block-job-cancel", json!({ "device": job, "force": true }), TIMEOUT).await;
    for _ in 0..100 {
        let dismissed = client.execute_raw("job-dismiss", json!({ "id": job }), TIMEOUT).await;
        let jobs = client.execute_raw("query-jobs", Value::Null, TIMEOUT).await;
        let is_there = |jobs: &Value| {
            jobs.as_array()
                .is_some_and(|all| all.iter().any(|one| one.get("id").and_then(Value::as_str) == Some(job)))
        };
        if dismissed.is_ok() || !jobs.is_ok_and(|jobs| is_there(&jobs)) {
            return;
        }
        sleep(LOOK_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_notes_writes_when_it_knows_how_much_there_is() {
        let jobs = |more: Value| {
            let mut job = json!({ "device": "m", "len": 0, "ready": false, "status": "running" });
            more.as_object().unwrap().iter().for_each(|(key, value)| job[key] = value.clone());
            json!([{ "device": "other", "len": 0 }, job])
        };
        assert!(!notes_writes(&jobs(json!({})), "m"));
        for more in [json!({ "len": 65536 }), json!({ "ready": true }), json!({ "status": "concluded" })] {
            assert!(notes_writes(&jobs(more), "m"));
        }
        assert!(notes_writes(&json!([]), "m"), "it has ended");
    }
}
