//! Disks that get another image on the same host, while the guest runs.
//!
//! ```text
//! guest - disk - mirror - new node - new image        then        guest - new node - new image
//!           \- old image
//! ```
//!
//! Until [`switch`] the guest's disk is the old image, whatever becomes of the copy; the guest waits for both only when the copy is in step.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::copy::refused_is_fine;
use super::mirror::{self, Mirror, Writes, begin_mirrors};
use super::{DiskFact, MOVED_NODE, TIMEOUT};
use crate::{Client, QmpError};

/// Between looks.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// A disk that is to get another image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveOrder {
    /// Of at most 16 bytes, and of no other disk of this QEMU.
    pub id: String,
    /// The disk's topmost block node.
    pub node: String,
    /// The new image: it is there, is as large as the disk, and reads as zeros.
    pub path: PathBuf,
    /// `raw` or `qcow2`.
    pub format: String,
    /// It is a block device.
    pub is_device: bool,
    /// As the disk is opened: past the page cache.
    pub direct: bool,
    /// As the disk is opened: flushes are dropped.
    pub no_flush: bool,
    /// As the disk is opened: what becomes of zeros that the guest writes.
    pub detect_zeroes: String,
}

impl MoveOrder {
    /// For a disk as QEMU has it.
    #[must_use]
    pub fn of(disk: &DiskFact, id: String, path: PathBuf, is_device: bool) -> Self {
        let format = if disk.format == "qcow2" { "qcow2" } else { "raw" }.to_owned();
        let (node, detect_zeroes) = (disk.node.clone(), disk.detect_zeroes.clone());
        Self {
            id,
            node,
            path,
            format,
            is_device,
            direct: disk.direct,
            no_flush: disk.no_flush,
            detect_zeroes,
        }
    }
}

/// What a disk had before it was moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OldImage {
    /// Its topmost block node.
    pub node: String,
    /// Its file, as QEMU names it.
    pub file: PathBuf,
    /// The files of the images below it, as QEMU names them.
    pub below: Vec<PathBuf>,
}

/// Where a move stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveState {
    /// The copy is being made, or follows the guest.
    Copying {
        /// Bytes to be dealt with; it grows by what the guest writes.
        total: u64,
        /// Bytes of these that are dealt with.
        done: u64,
        /// It has reached the end once, and follows the guest.
        ready: bool,
        /// It lacks nothing but what the guest is writing. QEMUs before 9.0 do not tell: then this is `ready`.
        in_step: bool,
    },
    /// It has ended: the guest has the new image, unless it says why not.
    Ended(Option<String>),
}

fn job_name(id: &str) -> String {
    format!("vmove-move-{id}")
}

fn node_name(id: &str) -> String {
    format!("{MOVED_NODE}{id}")
}

/// Limits the copy to so many bytes per second; 0 for no limit.
///
/// # Errors
/// [`QmpError`].
pub async fn set_move_speed(client: &Client, id: &str, speed: u64) -> Result<(), QmpError> {
    mirror::set_speed(client, &job_name(id), speed).await
}

/// Begins to copy. `speed`: bytes per second, 0 for no limit. How long the guest stood still for it: with QEMUs that could lose its writes
/// otherwise.
///
/// # Errors
/// [`QmpError`]; if it is a refusal, nothing is left in QEMU.
pub async fn begin_move(
    client: &Client,
    order: &MoveOrder,
    speed: u64,
    writes: Writes,
) -> Result<Duration, QmpError> {
    let cache = json!({ "direct": order.direct, "no-flush": order.no_flush });
    // A device that cannot zero by itself would be zeroed, while the guest stands still, if it could discard.
    let (driver, discard) = if order.is_device { ("host_device", "ignore") } else { ("file", "unmap") };
    let detect_zeroes = match order.detect_zeroes.as_str() {
        "unmap" if order.is_device => "on",
        other => other,
    };
    let node = json!({
        "driver": order.format, "node-name": node_name(&order.id), "read-only": false,
        "discard": discard, "detect-zeroes": detect_zeroes, "cache": cache,
        "file": { "driver": driver, "filename": order.path, "discard": discard, "cache": cache },
    });
    client.execute_raw("blockdev-add", node, TIMEOUT).await?;
    let target = node_name(&order.id);
    let mirror = Mirror::new(job_name(&order.id), &order.node, &target, speed, writes);
    match begin_mirrors(client, &[mirror]).await {
        Ok(still) => Ok(still),
        Err((_, error)) => {
            // A node that stays is in use: somebody must see to it.
            let deleted = delete(client, &target).await;
            Err(deleted.err().map_or(error, |_| slow("(end of a copy that did not begin)", TIMEOUT)))
        }
    }
}

/// Where a move stands; `None` if QEMU knows nothing of it.
///
/// # Errors
/// [`QmpError`].
pub async fn move_state(client: &Client, id: &str) -> Result<Option<MoveState>, QmpError> {
    let jobs = client.execute_raw("query-block-jobs", Value::Null, TIMEOUT).await?;
    let name = job_name(id);
    let mut jobs = jobs.as_array().into_iter().flatten();
    Ok(jobs.find(|job| job.get("device").and_then(Value::as_str) == Some(&name)).map(state))
}

fn state(job: &Value) -> MoveState {
    let count = |key: &str| job.get(key).and_then(Value::as_u64).unwrap_or(0);
    let flag = |key: &str| job.get(key).and_then(Value::as_bool);
    let error = job.get("error").and_then(Value::as_str).map(str::to_owned);
    if error.is_some() || job.get("status").and_then(Value::as_str) == Some("concluded") {
        return MoveState::Ended(error);
    }
    let ready = flag("ready").unwrap_or(false);
    let in_step = ready && flag("actively-synced").unwrap_or(true);
    MoveState::Copying { total: count("len"), done: count("offset"), ready, in_step }
}

/// From here on the guest's writes go to both images at once ([`Writes::AtOnce`]). QEMUs before 8.2 cannot change over: there a copy is begun
/// so.
///
/// # Errors
/// [`QmpError`].
pub async fn hold_move_in_step(client: &Client, id: &str) -> Result<(), QmpError> {
    mirror::hold_in_step(client, &job_name(id)).await
}

/// Gives the guest the new image, and waits until it has it: its requests wait meanwhile. [`MoveState`] says what came of it.
///
/// # Errors
/// [`QmpError`]; it may have been done all the same.
pub async fn switch(client: &Client, id: &str, deadline: Duration) -> Result<(), QmpError> {
    let name = job_name(id);
    let awaited = name.clone();
    let end = client.expect("BLOCK_JOB_COMPLETED", move |event| event.text("device") == Some(&awaited));
    client.execute_raw("block-job-complete", json!({ "device": name }), TIMEOUT).await?;
    end.wait(deadline).await.map(drop)
}

/// Whether the guest has the new image: it is the disk's.
#[must_use]
pub fn has_moved(disks: &[DiskFact], id: &str) -> bool {
    disks.iter().any(|disk| disk.node == node_name(id))
}

/// Closes the old image after the switch, and the images `below` it that nothing else in QEMU has. Nodes that `-blockdev` made stay open
/// otherwise.
///
/// # Errors
/// [`QmpError`], also if the old image is still open after `deadline`.
pub async fn close_old(
    client: &Client,
    id: &str,
    old: &OldImage,
    deadline: Duration,
) -> Result<(), QmpError> {
    let until = Instant::now() + deadline;
    dismiss(client, id, until).await?;
    loop {
        let nodes = client.execute_raw("query-named-block-nodes", json!({ "flat": true }), TIMEOUT).await?;
        let late = Instant::now() >= until;
        let (mut open, mut closed) = (false, false);
        for (name, is_top) in old_nodes(&nodes, id, old) {
            // One that another still has is refused, and goes in the next round if it may.
            let deleted = delete(client, &name).await;
            closed |= deleted.is_ok();
            open |= is_top;
            refused_is_fine(deleted, late && is_top)?;
        }
        if !open && !closed {
            return Ok(());
        }
        if late {
            return Err(slow("(end of the old image)", deadline));
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// The nodes of the old image and of those below it, and whether they are of the old image itself. What QEMU named goes with what has it.
fn old_nodes(nodes: &Value, id: &str, old: &OldImage) -> Vec<(String, bool)> {
    let text = |node: &Value, key: &str| node.get(key).and_then(Value::as_str).map(str::to_owned);
    let all = nodes.as_array().into_iter().flatten();
    let of_old = |node: &Value| {
        let (name, file) = (text(node, "node-name")?, text(node, "file").map(PathBuf::from));
        let is_top = name == old.node || file.as_ref() == Some(&old.file);
        let is_below = file.is_some_and(|file| old.below.contains(&file));
        let named = !name.starts_with('#') && name != node_name(id);
        ((is_top || is_below) && named).then_some((name, is_top))
    };
    all.filter_map(of_old).collect()
}

/// Takes away all that a move has left in QEMU, wherever it stands before the switch. The guest keeps its disk.
///
/// # Errors
/// [`QmpError`], also if something is still there after `deadline`.
pub async fn undo_move(client: &Client, id: &str, deadline: Duration) -> Result<(), QmpError> {
    let until = Instant::now() + deadline;
    dismiss(client, id, until).await?;
    loop {
        let nodes = client.execute_raw("query-named-block-nodes", json!({ "flat": true }), TIMEOUT).await?;
        let mut all = nodes.as_array().into_iter().flatten();
        let ours = node_name(id);
        if !all.any(|node| node.get("node-name").and_then(Value::as_str) == Some(&ours)) {
            return Ok(());
        }
        let late = Instant::now() >= until;
        refused_is_fine(delete(client, &ours).await, late)?;
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Ends the job, if there is one, and has QEMU forget it.
async fn dismiss(client: &Client, id: &str, until: Instant) -> Result<(), QmpError> {
    let name = job_name(id);
    loop {
        let late = Instant::now() >= until;
        let asked = match move_state(client, id).await? {
            None => return Ok(()),
            Some(MoveState::Ended(_)) => {
                client.execute_raw("job-dismiss", json!({ "id": name }), TIMEOUT).await
            }
            Some(MoveState::Copying { .. }) => {
                let arguments = json!({ "device": name, "force": true });
                client.execute_raw("block-job-cancel", arguments, TIMEOUT).await
            }
        };
        refused_is_fine(asked, late)?;
        if late {
            return Err(slow("(end of the move of a disk)", TIMEOUT));
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

async fn delete(client: &Client, node: &str) -> Result<Value, QmpError> {
    client.execute_raw("blockdev-del", json!({ "node-name": node }), TIMEOUT).await
}

fn slow(what: &str, waited: Duration) -> QmpError {
    QmpError::Timeout { command: what.to_owned(), waited }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_that_has_ended_says_whether_the_guest_has_the_new_image() {
        let copying =
            json!({ "device": "vmove-move-1", "len": 10, "offset": 4, "ready": false, "status": "running" });
        assert_eq!(state(&copying), MoveState::Copying { total: 10, done: 4, ready: false, in_step: false });
        let ready =
            json!({ "len": 10, "offset": 10, "ready": true, "status": "ready", "actively-synced": false });
        assert!(matches!(state(&ready), MoveState::Copying { ready: true, in_step: false, .. }));
        let old = json!({ "len": 10, "offset": 10, "ready": true, "status": "ready" });
        assert!(matches!(state(&old), MoveState::Copying { in_step: true, .. }), "QEMU 7.2 does not tell");
        assert_eq!(state(&json!({ "status": "concluded" })), MoveState::Ended(None));
        let failed = json!({ "status": "concluded", "error": "No space left on device" });
        assert_eq!(state(&failed), MoveState::Ended(Some("No space left on device".to_owned())));
    }

    #[test]
    fn what_is_closed_are_nodes_of_the_old_images_that_somebody_named() {
        let nodes = json!([
            { "node-name": "vmove-to-12", "file": "/new" }, { "node-name": "#block3", "file": "/old" },
            { "node-name": "disk0", "file": "/old" }, { "node-name": "file0", "file": "/old" },
            { "node-name": "base", "file": "/base" }, { "node-name": "other", "file": "/other" },
        ]);
        let old = OldImage { node: "disk0".to_owned(), file: "/old".into(), below: vec!["/base".into()] };
        let found = old_nodes(&nodes, "12", &old);
        let found: Vec<(&str, bool)> = found.iter().map(|(name, top)| (name.as_str(), *top)).collect();
        assert_eq!(found, [("disk0", true), ("file0", true), ("base", false)]);
    }

    #[test]
    fn the_disk_has_moved_when_its_node_is_the_new_one() {
        let disk = DiskFact { node: "vmove-to-12".to_owned(), ..DiskFact::default() };
        assert!(has_moved(&[DiskFact::default(), disk.clone()], "12"));
        assert!(!has_moved(&[disk], "1"));
    }
}
