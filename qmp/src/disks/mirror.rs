//! The begin of `blockdev-mirror`, without a write of the guest being lost.
//!
//! While a mirror begins, QEMU 8.0 to 11.0 looks which blocks of the disk are in use, and notes no writes yet. A write to a fresh block that is under
//! way when QEMU looks, and ends before the mirror is ready to note it, is in no copy ever: seen with 10.0.2 (`qmp/tests/mirror.rs`), not with
//! 7.2 and 11.1.2. So no write may be under way: the guest stands still until the mirror notes writes. It is told for how long.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use vmove_types::vm::Running;

use super::TIMEOUT;
use crate::client::QemuVersion;
use crate::{Client, QmpError};

/// From this release on QEMU may lose a write, major and minor.
const LOSES_WRITES: (u32, u32) = (8, 0);
/// From this one on it was tried, and does not. An earlier one may have it mended as well.
const MENDED: (u32, u32) = (11, 1);
/// Between looks; the guest waits.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// So long a guest may stand still for it. QEMU reads the tables of the image meanwhile: some milliseconds, more for images of terabytes on slow
/// storage.
const LONGEST: Duration = Duration::from_secs(2);

/// What did not end in that time.
const TOO_SLOW: &str = "blockdev-mirror (the guest stands still until QEMU has looked at its disk; for one that is paused there is no limit)";

/// How what the guest writes comes into a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// Behind the guest's back: it never waits for the network.
    Later,
    /// With each write of the guest, which waits for both disks: so that little is missing when it stops.
    AtOnce,
}

impl Writes {
    /// What QEMU calls it.
    fn copy_mode(self) -> &'static str {
        match self {
            Self::Later => "background",
            Self::AtOnce => "write-blocking",
        }
    }
}

/// A mirror that is to begin.
#[derive(Debug)]
pub(super) struct Mirror {
    job: String,
    /// Of `blockdev-mirror`.
    arguments: Value,
}

impl Mirror {
    /// Of the disk with this node into that one. `speed`: bytes per second, 0 for no limit.
    pub(super) fn new(job: String, disk: &str, target: &str, speed: u64, writes: Writes) -> Self {
        let arguments = json!({
            "job-id": job, "device": disk, "target": target, "sync": "full", "speed": speed,
            "copy-mode": writes.copy_mode(), "on-source-error": "report", "on-target-error": "report",
            "auto-finalize": true, "auto-dismiss": false,
        });
        Self { job, arguments }
    }
}

/// From here on the guest's writes go to both sides of a mirror at once. QEMUs before 8.2 cannot change over.
pub(super) async fn hold_in_step(client: &Client, job: &str) -> Result<(), QmpError> {
    let arguments = json!({ "id": job, "type": "mirror", "copy-mode": "write-blocking" });
    client.execute_raw("block-job-change", arguments, TIMEOUT).await.map(drop)
}

/// Limits a job to so many bytes per second; 0 for no limit. One that has ended has no speed: whoever asks how far it is hears why.
pub(super) async fn set_speed(client: &Client, job: &str, speed: u64) -> Result<(), QmpError> {
    let arguments = json!({ "device": job, "speed": speed });
    match client.execute_raw("block-job-set-speed", arguments, TIMEOUT).await {
        Err(error) if error.is_refusal() => Ok(()),
        other => other.map(drop),
    }
}

/// Whether this QEMU may lose what a guest writes while a mirror begins.
#[must_use]
pub fn loses_writes(version: &QemuVersion) -> bool {
    (LOSES_WRITES..MENDED).contains(&(version.major, version.minor))
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
    let stops =
        loses_writes(client.version()) && client.run_state(TIMEOUT).await.map_err(first)? == "running";
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
