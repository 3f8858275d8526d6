//! The QEMU that takes a guest: images of its disks are written by the other QEMU before it has the guest.
//!
//! They are opened once more for that, beside the guest's own nodes, which are inactive until the guest runs: so neither the options of the
//! guest's drives (`discard`, limits) nor what these have cached of an image matter. The guest's nodes read everything anew when they become
//! active, after ours have gone.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::{PREFIX, export_name};
use crate::{Client, QmpError};

const TIMEOUT: Duration = Duration::from_secs(20);
/// A disk may have gigabytes in the page cache.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(600);

/// An image that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOrder {
    /// Path, as the command line gives it.
    pub path: PathBuf,
    /// `raw` or `qcow2`.
    pub format: String,
}

fn file_node(number: usize) -> String {
    format!("{PREFIX}{number}-file")
}

/// Lets images be written by NBD, in this order, on a socket that QEMU makes. Zeros become holes. Flushes are dropped: [`flush`] does that.
///
/// # Errors
/// [`QmpError`].
pub async fn export(client: &Client, socket: &Path, images: &[ExportOrder]) -> Result<(), QmpError> {
    let address =
        json!({ "addr": { "type": "unix", "data": { "path": socket } }, "max-connections": images.len() });
    client.execute_raw("nbd-server-start", address, TIMEOUT).await?;
    for (number, image) in images.iter().enumerate() {
        let is_device = std::fs::metadata(&image.path).is_ok_and(|meta| meta.file_type().is_block_device());
        let driver = if is_device { "host_device" } else { "file" };
        let (name, file, cache) = (export_name(number), file_node(number), json!({ "no-flush": true }));
        let below = json!({
            "driver": driver, "node-name": file, "filename": image.path, "discard": "unmap", "cache": cache,
        });
        client.execute_raw("blockdev-add", below, TIMEOUT).await?;
        let node = json!({
            "driver": image.format, "node-name": name, "file": file, "discard": "unmap", "cache": cache,
        });
        client.execute_raw("blockdev-add", node, TIMEOUT).await?;
        let order = json!({ "type": "nbd", "id": name, "name": name, "node-name": name, "writable": true });
        client.execute_raw("block-export-add", order, TIMEOUT).await?;
    }
    Ok(())
}

/// Ends the exports of so many images and their connections, and closes the images: from here on the guest's own nodes are the only ones.
///
/// # Errors
/// [`QmpError`].
pub async fn end_exports(client: &Client, images: usize) -> Result<(), QmpError> {
    client.execute_raw("nbd-server-stop", Value::Null, TIMEOUT).await?;
    for number in 0..images {
        for node in [export_name(number), file_node(number)] {
            client.execute_raw("blockdev-del", json!({ "node-name": node }), TIMEOUT).await?;
        }
    }
    Ok(())
}

/// Waits until the guest's disks on these images hold what was written to them, metadata of formats included.
///
/// # Errors
/// [`QmpError`], also if QEMU says that a disk could not be written.
pub async fn flush(client: &Client, images: &[PathBuf]) -> Result<(), QmpError> {
    let disks = super::disks(client).await?;
    let is_one = |file: &str| images.iter().any(|image| image == Path::new(file));
    for disk in disks.iter().filter(|disk| is_one(&disk.file)) {
        let command = format!("qemu-io {} flush", disk.node);
        let said = client
            .execute_raw("human-monitor-command", json!({ "command-line": command }), FLUSH_TIMEOUT)
            .await?;
        let said = said.as_str().unwrap_or_default().trim();
        if !said.is_empty() {
            let (command, class) = (format!("flush of {}", disk.file), "GenericError".to_owned());
            return Err(QmpError::Refused { command, class, description: said.to_owned() });
        }
    }
    Ok(())
}
