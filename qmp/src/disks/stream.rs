//! Disks that follow their guest: what an image does not hold comes from the one below it (`block-stream`), while the guest runs. In the end nothing
//! lies below.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{TIMEOUT, mirror};
use crate::{Client, QmpError};

/// Jobs are called so, and with the number of the disk.
const JOB: &str = "vmove-after";

/// How far a disk is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamState {
    /// Bytes to be dealt with.
    pub total: u64,
    /// Bytes of these that are dealt with.
    pub done: u64,
    /// Nothing lies below the image any more.
    pub whole: bool,
    /// Why the last try has ended: it is begun anew.
    pub error: Option<String>,
}

/// Looks how far the disks on these images are, and begins with the first that lacks something, if none is at work: so they come one after the
/// other. To be called again and again, by whomever: QEMU knows where it stands. `speed`: bytes per second, 0 for no limit.
///
/// # Errors
/// [`QmpError`], also if the guest has no disk on one of the images.
pub async fn stream(client: &Client, images: &[PathBuf], speed: u64) -> Result<Vec<StreamState>, QmpError> {
    let drives = client.execute_raw("query-block", Value::Null, TIMEOUT).await?;
    let jobs = client.execute_raw("query-jobs", Value::Null, TIMEOUT).await?;
    let mut disks = Vec::new();
    for (number, image) in images.iter().enumerate() {
        disks.push(Disk::find(&drives, &jobs, number, image).ok_or_else(|| no_disk(image))?);
    }
    for (number, _) in disks.iter().enumerate().filter(|(_, disk)| disk.has_ended) {
        client.execute_raw("job-dismiss", json!({ "id": job_name(number) }), TIMEOUT).await?;
    }
    let at_work = disks.iter().position(|disk| disk.is_at_work);
    if let Some(number) = at_work {
        keep_speed(client, &job_name(number), speed).await?;
    }
    let next = disks.iter().enumerate().find(|(_, disk)| !disk.state.whole && disk.state.error.is_none());
    if let Some((number, disk)) = next.filter(|_| at_work.is_none()) {
        let order = json!({
            "job-id": job_name(number), "device": disk.node, "speed": speed, "auto-dismiss": false,
        });
        client.execute_raw("block-stream", order, TIMEOUT).await?;
    }
    Ok(disks.into_iter().map(|disk| disk.state).collect())
}

/// Has a job that is at work go at this speed, if it does not already.
async fn keep_speed(client: &Client, job: &str, speed: u64) -> Result<(), QmpError> {
    let jobs = client.execute_raw("query-block-jobs", Value::Null, TIMEOUT).await?;
    let is_it = |one: &&Value| one.get("device").and_then(Value::as_str) == Some(job);
    let known = jobs.as_array().and_then(|jobs| jobs.iter().find(is_it)).and_then(|job| job.get("speed"));
    match known.and_then(Value::as_u64) {
        Some(known) if known != speed => mirror::set_speed(client, job, speed).await,
        _ => Ok(()),
    }
}

fn job_name(number: usize) -> String {
    format!("{JOB}{number}")
}

fn no_disk(image: &Path) -> QmpError {
    let (command, class) = ("block-stream".to_owned(), "GenericError".to_owned());
    let description = format!("the guest has no disk on {}", image.display());
    QmpError::Refused { command, class, description }
}

struct Disk {
    /// Its topmost block node.
    node: String,
    state: StreamState,
    is_at_work: bool,
    has_ended: bool,
}

impl Disk {
    fn find(drives: &Value, jobs: &Value, number: usize, image: &Path) -> Option<Self> {
        let text = |value: &Value, at: &str| value.pointer(at).and_then(Value::as_str).map(str::to_owned);
        let is_on =
            |drive: &&Value| text(drive, "/inserted/file").is_some_and(|file| Path::new(&file) == image);
        let drive = drives.as_array()?.iter().find(is_on)?;
        let number_at = |value: &Value, at: &str| value.pointer(at).and_then(Value::as_u64);
        let size = number_at(drive, "/inserted/image/virtual-size").unwrap_or_default();
        let name = job_name(number);
        let job = jobs.as_array()?.iter().find(|job| text(job, "/id").as_ref() == Some(&name));
        let has_ended = job.is_some_and(|job| text(job, "/status").as_deref() == Some("concluded"));
        let is_at_work = job.is_some() && !has_ended;
        let whole = !is_at_work && number_at(drive, "/inserted/backing_file_depth") == Some(0);
        let error = job.filter(|_| has_ended && !whole).map(|job| {
            text(job, "/error").unwrap_or_else(|| "QEMU has ended it, and does not say why".to_owned())
        });
        let (done, total) = match job.filter(|_| is_at_work) {
            Some(job) => (number_at(job, "/current-progress"), number_at(job, "/total-progress")),
            None => (whole.then_some(size), None),
        };
        let total = total.filter(|total| *total > 0).unwrap_or(size);
        let state = StreamState { total, done: done.unwrap_or_default().min(total), whole, error };
        Some(Self { node: text(drive, "/inserted/node-name")?, state, is_at_work, has_ended })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_whole_when_nothing_lies_below_it_and_no_job_is_at_work() {
        let drives = |depth: u64| {
            json!([{ "inserted": { "file": "/a.qcow2", "node-name": "#block1", "backing_file_depth": depth,
                "image": { "virtual-size": 100 } } }])
        };
        let job = |status: &str| {
            json!([{ "id": "vmove-after0", "status": status, "current-progress": 40, "total-progress": 90,
                "error": "No space left on device" }])
        };
        let state = |depth, jobs: &Value| {
            let disk = Disk::find(&drives(depth), jobs, 0, Path::new("/a.qcow2")).unwrap();
            (disk.state.done, disk.state.total, disk.state.whole, disk.state.error)
        };
        assert_eq!(state(1, &json!([])), (0, 100, false, None));
        assert_eq!(state(1, &job("running")), (40, 90, false, None));
        assert_eq!(state(0, &job("running")), (40, 90, false, None), "it may still write");
        assert_eq!(state(0, &job("concluded")), (100, 100, true, None));
        let ended = Some("No space left on device".to_owned());
        assert_eq!(state(1, &job("concluded")), (0, 100, false, ended));
        assert!(Disk::find(&drives(1), &json!([]), 0, Path::new("/b")).is_none());
    }
}
