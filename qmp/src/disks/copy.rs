//! Copies of disks into another QEMU, while the guest runs.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::mirror::{self, Mirror, Writes, begin_mirrors};
use super::{PREFIX, TIMEOUT, export_name};
use crate::{Client, QmpError};

/// A disk to be copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyOrder {
    /// Its place among those that are copied.
    pub number: usize,
    /// Its topmost block node.
    pub node: String,
    /// The socket behind which the other QEMU exports its own disk of this number.
    pub socket: PathBuf,
    /// That disk is on a block device.
    pub is_device: bool,
}

/// Where a copy stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyState {
    /// Its place among those that are copied.
    pub number: usize,
    /// Bytes to be dealt with; it grows by what the guest writes.
    pub total: u64,
    /// Bytes of these that are dealt with.
    pub done: u64,
    /// It has reached the end once, and follows the guest.
    pub ready: bool,
    /// It lacks nothing but what the guest is writing. QEMUs before 9.0 do not tell: then this is `ready`.
    pub in_step: bool,
    /// Why it has ended.
    pub error: Option<String>,
}

/// Why a copy is none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// QEMU's answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// It has ended with an error.
    #[error("The copy of disk {number} ended: {why}")]
    Ended {
        /// Its place among those that are copied.
        number: usize,
        /// QEMU's reason.
        why: String,
    },
    /// It did not end.
    #[error("The copies of the disks were not whole within {0} ms after the guest stood still")]
    Slow(u128),
}

fn job_name(number: usize) -> String {
    format!("{PREFIX}{number}-copy")
}

fn node_name(number: usize) -> String {
    format!("{PREFIX}{number}-target")
}

/// Whether this is the name of a copy into another QEMU.
pub(super) fn is_copy(job: &str) -> bool {
    number_of(job).is_some()
}

/// The number in a name of ours.
fn number_of(name: &str) -> Option<usize> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

/// Begins copies, all of them or none. `speed`: bytes per second for each, 0 for no limit. How long the guest stood still for it: with QEMUs that
/// could lose its writes otherwise.
///
/// The NBD client drops flushes: the other QEMU flushes by itself ([`super::flush`]), since its disk would be waited for while the guest
/// stands still.
///
/// # Errors
/// The place of the disk that cannot be copied, and [`QmpError`]; nothing is left in QEMU then, unless it does not answer.
pub async fn begin(
    client: &Client,
    orders: &[CopyOrder],
    speed: u64,
    writes: Writes,
) -> Result<Duration, (usize, QmpError)> {
    let mut begun = Ok(Duration::ZERO);
    for (place, order) in orders.iter().enumerate() {
        if let Err(error) = attach(client, order).await {
            begun = Err((place, error));
            break;
        }
    }
    if begun.is_ok() {
        let mirrors: Vec<Mirror> = orders.iter().map(|order| mirror_of(order, speed, writes)).collect();
        begun = begin_mirrors(client, &mirrors).await;
    }
    if begun.is_err() {
        for order in orders {
            let _ = remove_node(client, order.number).await;
        }
    }
    begun
}

/// Connects QEMU to the other one's disk.
async fn attach(client: &Client, order: &CopyOrder) -> Result<(), QmpError> {
    // A device that cannot zero by itself would be zeroed, while the guest stands still, if it could discard.
    let (discard, detect_zeroes) = if order.is_device { ("ignore", "on") } else { ("unmap", "unmap") };
    let node = json!({
        "driver": "nbd", "node-name": node_name(order.number), "export": export_name(order.number),
        "server": { "type": "unix", "path": order.socket }, "discard": discard, "detect-zeroes": detect_zeroes,
        "cache": { "no-flush": true, "direct": false }, "read-only": false,
    });
    client.execute_raw("blockdev-add", node, TIMEOUT).await.map(drop)
}

fn mirror_of(order: &CopyOrder, speed: u64, writes: Writes) -> Mirror {
    Mirror::new(job_name(order.number), &order.node, &node_name(order.number), speed, writes)
}

/// How far all copies are. A copy that has ended says why.
///
/// # Errors
/// [`QmpError`].
pub async fn states(client: &Client) -> Result<Vec<CopyState>, QmpError> {
    let reply = client.execute_raw("query-block-jobs", Value::Null, TIMEOUT).await?;
    let mut found: Vec<CopyState> = reply.as_array().into_iter().flatten().filter_map(state).collect();
    found.sort_by_key(|state| state.number);
    Ok(found)
}

fn state(job: &Value) -> Option<CopyState> {
    let number = number_of(job.get("device")?.as_str()?)?;
    let count = |key: &str| job.get(key).and_then(Value::as_u64).unwrap_or(0);
    let flag = |key: &str| job.get(key).and_then(Value::as_bool);
    let concluded = job.get("status").and_then(Value::as_str) == Some("concluded");
    let error = job.get("error").and_then(Value::as_str).map(str::to_owned);
    let error = error.or_else(|| concluded.then(|| "QEMU does not say why".to_owned()));
    let ready = flag("ready").unwrap_or(false) && error.is_none();
    let in_step = ready && flag("actively-synced").unwrap_or(true);
    Some(CopyState { number, total: count("len"), done: count("offset"), ready, in_step, error })
}

/// Limits a copy to so many bytes per second; 0 for no limit.
///
/// # Errors
/// [`QmpError`].
pub async fn set_speed(client: &Client, number: usize, speed: u64) -> Result<(), QmpError> {
    mirror::set_speed(client, &job_name(number), speed).await
}

/// From here on the guest's writes go to both disks at once ([`Writes::AtOnce`]). QEMUs before 8.2 cannot change over: there a copy is begun
/// so.
///
/// # Errors
/// [`QmpError`].
pub async fn hold_in_step(client: &Client, number: usize) -> Result<(), QmpError> {
    mirror::hold_in_step(client, &job_name(number)).await
}

/// Ends copies of a guest that stands still: when this returns, each holds what the guest's disk holds, and this QEMU writes to none. The
/// guest's own disks stay as they are.
///
/// # Errors
/// [`CopyError`]; then no copy may be used.
pub async fn finish(client: &Client, numbers: &[usize], deadline: Duration) -> Result<(), CopyError> {
    let begun = Instant::now();
    let completed = |number: usize| {
        let name = job_name(number);
        client.expect("BLOCK_JOB_COMPLETED", move |event| event.text("device") == Some(&name))
    };
    let ends: Vec<_> = numbers.iter().map(|number| (*number, completed(*number))).collect();
    for number in numbers {
        // Of a copy that is ready, this is the end, and no cancel: QEMU waits until nothing is missing.
        let arguments = json!({ "device": job_name(*number), "force": false });
        client.execute_raw("block-job-cancel", arguments, TIMEOUT).await?;
    }
    for (number, end) in ends {
        let event = match end.wait(deadline.saturating_sub(begun.elapsed())).await {
            Err(QmpError::Timeout { .. }) => return Err(CopyError::Slow(deadline.as_millis())),
            other => other?,
        };
        if let Some(why) = event.text("error") {
            return Err(CopyError::Ended { number, why: why.to_owned() });
        }
    }
    Ok(())
}

/// Takes away all that copies have left in QEMU, those of an earlier process too, wherever they stand. The guest keeps its disks. Its
/// connections must be closed by then: QEMU may wait for an answer otherwise.
///
/// # Errors
/// [`QmpError`], also if something is still there after `deadline`.
pub async fn give_up(client: &Client, deadline: Duration) -> Result<(), QmpError> {
    super::end_histograms(client).await;
    let until = Instant::now() + deadline;
    loop {
        let jobs = client.execute_raw("query-jobs", Value::Null, TIMEOUT).await?;
        let nodes = client.execute_raw("query-named-block-nodes", json!({ "flat": true }), TIMEOUT).await?;
        let ours = |entries: &Value, key: &str| -> Vec<(String, String)> {
            let text = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
            let all = entries.as_array().into_iter().flatten();
            let named =
                all.filter_map(|entry| Some((text(entry, key)?, text(entry, "status").unwrap_or_default())));
            named.filter(|(name, _)| number_of(name).is_some()).collect()
        };
        let (jobs, nodes) = (ours(&jobs, "id"), ours(&nodes, "node-name"));
        if jobs.is_empty() && nodes.is_empty() {
            return Ok(());
        }
        let late = Instant::now() >= until;
        for (id, status) in &jobs {
            let asked = if status == "concluded" {
                client.execute_raw("job-dismiss", json!({ "id": id }), TIMEOUT).await
            } else {
                client.execute_raw("block-job-cancel", json!({ "device": id, "force": true }), TIMEOUT).await
            };
            refused_is_fine(asked, late)?;
        }
        if jobs.is_empty() {
            for (name, _) in &nodes {
                refused_is_fine(
                    client.execute_raw("blockdev-del", json!({ "node-name": name }), TIMEOUT).await,
                    late,
                )?;
            }
        }
        if late {
            return Err(QmpError::Timeout {
                command: "(end of copies of disks)".to_owned(),
                waited: deadline,
            });
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// It may have gone by itself meanwhile, or be about to.
pub(super) fn refused_is_fine(asked: Result<Value, QmpError>, late: bool) -> Result<(), QmpError> {
    match asked {
        Err(error) if error.is_refusal() && !late => Ok(()),
        other => other.map(drop),
    }
}

async fn remove_node(client: &Client, number: usize) -> Result<(), QmpError> {
    client.execute_raw("blockdev-del", json!({ "node-name": node_name(number) }), TIMEOUT).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_whose_they_are() {
        assert_eq!(number_of(&job_name(12)), Some(12));
        assert_eq!(number_of(&node_name(3)), Some(3));
        assert_eq!((number_of("disk0"), number_of("vmove-disk")), (None, None));
    }

    #[test]
    fn a_copy_that_has_ended_is_not_in_step() {
        let job = |more: Value| {
            let mut job = json!({ "device": "vmove-disk0-copy", "len": 10, "offset": 10, "ready": true, "status": "ready" });
            for (key, value) in more.as_object().unwrap() {
                job[key] = value.clone();
            }
            state(&job).unwrap()
        };
        assert!(job(json!({})).in_step, "QEMU 7.2 does not tell");
        assert!(!job(json!({ "actively-synced": false })).in_step);
        let ended = job(json!({ "status": "concluded", "error": "No space left on device" }));
        assert_eq!((ended.ready, ended.error.as_deref()), (false, Some("No space left on device")));
        assert!(job(json!({ "status": "concluded" })).error.is_some());
        assert_eq!(state(&json!({ "device": "mine", "len": 1 })), None);
    }
}
