//! Disks as a running QEMU has them.

use serde_json::{Value, json};
use std::time::Duration;

use super::MOVED_NODE;
use super::copy::is_copy;
use crate::{Client, QmpError};

/// What jobs of QEMU put on top of a disk.
const FILTERS: [&str; 4] = ["copy-before-write", "mirror_top", "commit_top", "copy-on-read"];
/// Of these, what nothing but a job makes.
const JOB_FILTERS: [&str; 3] = ["copy-before-write", "mirror_top", "commit_top"];
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// A medium in a drive of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskFact {
    /// The best of its names.
    pub name: String,
    /// All names that it answers to: of the drive, of the device, of its node.
    pub names: Vec<String>,
    /// By which QEMU's commands know its front end: the id of the device, a path to it, or the id of the drive.
    pub device: String,
    /// Its topmost block node.
    pub node: String,
    /// Its file or device, as QEMU opened it.
    pub file: String,
    /// The driver that opened that, such as `file`, `host_device`, `nbd`; `None` where QEMU does not tell.
    pub protocol: Option<String>,
    /// The driver of the topmost node, such as `raw`, `qcow2`; `file` or `host_device` for a node without a format.
    pub format: String,
    /// Size that the guest sees, in bytes.
    pub size: u64,
    /// Bytes that the image takes, those of the images below it included.
    pub allocated: u64,
    /// Cluster size in bytes, where the format has any.
    pub cluster: u64,
    /// The guest can only read it.
    pub read_only: bool,
    /// What it holds is encrypted.
    pub encrypted: bool,
    /// What of its format a copy would not have, such as internal snapshots; `None` if nothing.
    pub special: Option<&'static str>,
    /// The files of it and of all images below it.
    pub chain: Vec<String>,
    /// A job that is at work on it, and its kind.
    pub job: Option<(String, String)>,
    /// Others may write to it while the guest has it (`share-rw=on`).
    pub shared: bool,
    /// It is opened past the page cache (`cache.direct=on`).
    pub direct: bool,
    /// Flushes are dropped (`cache.no-flush=on`).
    pub no_flush: bool,
    /// What becomes of zeros that the guest writes: `off`, `on` or `unmap`.
    pub detect_zeroes: String,
}

/// All media in the guest's drives.
///
/// # Errors
/// [`QmpError`].
pub async fn disks(client: &Client) -> Result<Vec<DiskFact>, QmpError> {
    let ask = |command, arguments| client.execute_raw(command, arguments, QUERY_TIMEOUT);
    let drives = ask("query-block", Value::Null).await?;
    let nodes = ask("query-named-block-nodes", json!({ "flat": true })).await?;
    let jobs = ask("query-block-jobs", Value::Null).await?;
    let drives = drives.as_array().map(Vec::as_slice).unwrap_or_default();
    let mut found: Vec<DiskFact> = drives.iter().filter_map(|drive| fact(drive, &nodes, &jobs)).collect();
    for (disk, device) in
        found.iter_mut().filter_map(|disk| disk.names.last().cloned().map(|device| (disk, device)))
    {
        // A path of QEMU's object tree, or the id of a device.
        let path =
            if device.starts_with('/') { device.clone() } else { format!("/machine/peripheral/{device}") };
        let asked = ask("qom-get", json!({ "path": path, "property": "share-rw" })).await;
        disk.shared = asked.is_ok_and(|value| value == Value::Bool(true));
    }
    Ok(found)
}

fn fact(drive: &Value, nodes: &Value, jobs: &Value) -> Option<DiskFact> {
    let text = |at: &str| drive.pointer(at).and_then(Value::as_str).unwrap_or_default().to_owned();
    let flag = |at: &str| drive.pointer(at).and_then(Value::as_bool).unwrap_or(false);
    let inserted = drive.get("inserted")?;
    let image = inserted.get("image").unwrap_or(&Value::Null);
    let node = text("/inserted/node-name");
    let (drive_id, qdev) = (text("/device"), text("/qdev"));
    // `/machine/peripheral/vda/virtio-backend` is the device `vda`.
    let device = qdev.strip_prefix("/machine/peripheral/").and_then(|rest| rest.split('/').next());
    let device = device.unwrap_or(&qdev).to_owned();
    let front = if qdev.is_empty() { drive_id.clone() } else { qdev.clone() };
    let given = |name: &String| !name.is_empty() && !name.starts_with('#') && !name.starts_with(MOVED_NODE);
    let mut names: Vec<String> = [&drive_id, &node].into_iter().filter(|name| given(name)).cloned().collect();
    names.extend(Some(device).filter(|name| !name.is_empty()));
    let file = text("/inserted/file");
    let mut layers = Vec::new();
    let mut layer = Some(image);
    while let Some(image) = layer.filter(|image| image.is_object()) {
        layers.push(image);
        layer = image.get("backing-image");
    }
    let chain: Vec<String> = layers
        .iter()
        .filter_map(|image| image.get("filename")?.as_str().map(str::to_owned))
        .chain([file.clone()])
        .collect();
    let number = |image: &Value, key: &str| image.get(key).and_then(Value::as_u64).unwrap_or(0);
    let entry = |driver: &str| {
        jobs.as_array()?.iter().find(|job| job.get("device").and_then(Value::as_str) == Some(driver))
    };
    let job = [&drive_id, &node].into_iter().filter(|name| !name.is_empty()).find_map(|name| entry(name));
    let job = job.map(|job| {
        let text = |key: &str| job.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        (text("device"), text("type"))
    });
    let format = text("/inserted/drv");
    let job = job.or_else(|| FILTERS.contains(&format.as_str()).then(|| first_job(jobs, &node)));
    // A job of another name than the disk's: `query-block` may hide its filter.
    let job = job.or_else(|| has_filter(nodes, &file).then(|| others_job(jobs)).flatten());
    Some(DiskFact {
        name: names.first().cloned().unwrap_or_else(|| node.clone()),
        protocol: protocol(&file, &format, nodes),
        size: number(image, "virtual-size"),
        allocated: layers.iter().map(|image| number(image, "actual-size")).sum(),
        cluster: number(image, "cluster-size"),
        read_only: flag("/inserted/ro"),
        encrypted: layers.iter().any(|image| image.get("encrypted") == Some(&Value::Bool(true)))
            || flag("/inserted/encrypted"),
        special: special(image),
        chain,
        job,
        shared: false,
        direct: flag("/inserted/cache/direct"),
        no_flush: flag("/inserted/cache/no-flush"),
        detect_zeroes: Some(text("/inserted/detect_zeroes"))
            .filter(|is| !is.is_empty())
            .unwrap_or_else(|| "off".to_owned()),
        names,
        device: front,
        node,
        file,
        format,
    })
}

/// Whether a job's filter is above an image.
fn has_filter(nodes: &Value, file: &str) -> bool {
    let text = |node: &Value, key: &str| node.get(key).and_then(Value::as_str).map(str::to_owned);
    let is_filter =
        |node: &&Value| text(node, "drv").is_some_and(|driver| JOB_FILTERS.contains(&driver.as_str()));
    let mut filters = nodes.as_array().into_iter().flatten().filter(is_filter);
    filters.any(|node| text(node, "file").as_deref() == Some(file))
}

/// The first job that is none of a migration, which takes away what an earlier one has left.
fn others_job(jobs: &Value) -> Option<(String, String)> {
    let text = |job: &Value, key: &str| Some(job.get(key)?.as_str()?.to_owned());
    let all = jobs.as_array().into_iter().flatten();
    let mut named = all.filter_map(|job| Some((text(job, "device")?, text(job, "type")?)));
    named.find(|(name, _)| !is_copy(name))
}

/// The job whose filter lies on top of a disk: its own id may be anything.
fn first_job(jobs: &Value, node: &str) -> (String, String) {
    let job = jobs.as_array().and_then(|all| all.first());
    let text = |key: &str| job.and_then(|job| job.get(key)?.as_str()).map(str::to_owned);
    (text("device").unwrap_or_else(|| node.to_owned()), text("type").unwrap_or_else(|| "unknown".to_owned()))
}

/// What a copy of an image would not have.
fn special(image: &Value) -> Option<&'static str> {
    let has =
        |at: &str| image.pointer(at).is_some_and(|value| *value != Value::Bool(false) && !value.is_null());
    if image.get("snapshots").and_then(Value::as_array).is_some_and(|all| !all.is_empty()) {
        return Some("internal snapshots");
    }
    if image
        .pointer("/format-specific/data/bitmaps")
        .and_then(Value::as_array)
        .is_some_and(|all| !all.is_empty())
    {
        return Some("bitmaps that outlive QEMU");
    }
    if has("/format-specific/data/data-file") {
        return Some("a data file of its own");
    }
    has("/format-specific/data/extended-l2").then_some("extended L2 entries")
}

fn protocol(file: &str, format: &str, nodes: &Value) -> Option<String> {
    let text = |node: &Value, key: &str| node.get(key).and_then(Value::as_str).map(str::to_owned);
    let is_format = |driver: &str| matches!(driver, "raw" | "qcow2");
    if !is_format(format) {
        return Some(format.to_owned());
    }
    let mut of_file = nodes.as_array()?.iter().filter(|node| text(node, "file").as_deref() == Some(file));
    of_file.find_map(|node| text(node, "drv").filter(|driver| !is_format(driver)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_known_by_all_of_its_names() {
        let drive = json!({
            "device": "disk0", "qdev": "/machine/peripheral/vda/virtio-backend",
            "inserted": { "node-name": "#block12", "drv": "qcow2", "file": "/a.qcow2", "ro": false,
                "image": { "filename": "/a.qcow2", "virtual-size": 1024, "actual-size": 10, "cluster-size": 65536,
                    "backing-image": { "filename": "/base.raw", "actual-size": 5 } } } });
        let nodes = json!([{ "drv": "qcow2", "file": "/a.qcow2" }, { "drv": "file", "file": "/a.qcow2" }]);
        let disk = fact(&drive, &nodes, &json!([])).unwrap();
        assert_eq!(
            (disk.name.as_str(), &disk.names[..]),
            ("disk0", &["disk0".to_owned(), "vda".to_owned()][..])
        );
        assert_eq!(disk.protocol.as_deref(), Some("file"));
        assert_eq!((disk.allocated, disk.size, disk.cluster), (15, 1024, 65536));
        assert_eq!(disk.chain, ["/a.qcow2", "/base.raw", "/a.qcow2"]);
        let jobs = json!([{ "device": "disk0", "type": "backup" }]);
        assert_eq!(fact(&drive, &nodes, &jobs).unwrap().job, Some(("disk0".to_owned(), "backup".to_owned())));
        let mut filtered = drive.clone();
        filtered["inserted"]["drv"] = json!("copy-before-write");
        let theirs = json!([{ "device": "theirs", "type": "backup" }]);
        assert_eq!(
            fact(&filtered, &nodes, &theirs).unwrap().job,
            Some(("theirs".to_owned(), "backup".to_owned()))
        );
        assert_eq!(fact(&json!({ "device": "cd0" }), &nodes, &jobs), None, "no medium");
    }

    #[test]
    fn what_a_copy_would_not_have_is_named() {
        for (image, found) in [
            (json!({}), None),
            (json!({ "snapshots": [{ "id": "1" }] }), Some("internal snapshots")),
            (json!({ "format-specific": { "data": { "data-file": "/d" } } }), Some("a data file of its own")),
            (json!({ "format-specific": { "data": { "extended-l2": false } } }), None),
        ] {
            assert_eq!(special(&image), found, "{image}");
        }
    }
}
