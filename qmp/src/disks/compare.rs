//! Disks that have moved are read on both sides, to be compared: at the source as they were when the guest stopped, at the destination as the
//! guest has them, which writes meanwhile.
//!
//! ```text
//! source       image ------------- second node, read-only ---- NBD server === socket
//! destination  guest - disk - image                   \------- NBD server === socket
//!                       \-- bitmap: what the guest has written since it runs there
//! ```
//!
//! The guest's own nodes at the source are inactive once it has left, and are left alone: the image and those below it are opened again, each by the
//! driver that the guest's has, and without taking a lock, so that the guest can be given them back at any time.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::TIMEOUT;
use crate::{Client, QmpError};

/// Names of what is made in a QEMU for a comparison begin so.
const PREFIX: &str = "vmove-verify";
/// What the guest has written since it runs here.
const WRITES: &str = "vmove-verify-writes";
/// The same at one moment, to be read.
const SEEN: &str = "vmove-verify-seen";

/// In such pieces it is known what the guest has written, in bytes.
pub const PIECE: u64 = 64 << 10;

/// The name of the export of the disk of this number.
#[must_use]
pub fn compared(number: usize) -> String {
    format!("{PREFIX}{number}")
}

/// The name of the export by which it is told what the guest has written to the disk of this number.
#[must_use]
pub fn writes_of(number: usize) -> String {
    format!("{PREFIX}{number}-writes")
}

/// The context of [`writes_of`]: pieces that were written have the flag 1.
#[must_use]
pub fn writes_context() -> String {
    format!("qemu:dirty-bitmap:{SEEN}")
}

/// A disk as `query-block` shows it.
struct Shown {
    node: String,
    direct: bool,
    image: Value,
}

/// The guest's disks on these images, in this order. `vm_dir`: QEMU's working folder.
async fn shown(client: &Client, vm_dir: &Path, images: &[PathBuf]) -> Result<Vec<Shown>, QmpError> {
    let drives = client.execute_raw("query-block", Value::Null, TIMEOUT).await?;
    let drives = drives.as_array().map(Vec::as_slice).unwrap_or_default();
    let file = |drive: &Value| Some(vm_dir.join(drive.pointer("/inserted/file")?.as_str()?));
    let find = |image: &PathBuf| {
        let drive = drives.iter().find(|drive| file(drive).as_ref() == Some(image));
        let drive = drive.and_then(|drive| drive.get("inserted"));
        let drive =
            drive.ok_or_else(|| refused("query-block", &format!("no disk has {}", image.display())))?;
        Ok(Shown {
            node: drive.get("node-name").and_then(Value::as_str).unwrap_or_default().to_owned(),
            direct: drive.pointer("/cache/direct") == Some(&Value::Bool(true)),
            image: drive.get("image").cloned().unwrap_or_default(),
        })
    };
    images.iter().map(find).collect()
}

fn refused(command: &str, description: &str) -> QmpError {
    let (class, description) = ("GenericError".to_owned(), description.to_owned());
    QmpError::Refused { command: command.to_owned(), class, description }
}

/// Has QEMU note what the guest writes to its disks on these images from now on. What an earlier comparison has left goes.
///
/// # Errors
/// [`QmpError`].
pub async fn note_writes(client: &Client, vm_dir: &Path, images: &[PathBuf]) -> Result<(), QmpError> {
    for disk in shown(client, vm_dir, images).await? {
        let bitmap = json!({ "node": disk.node, "name": WRITES, "granularity": PIECE, "persistent": false });
        client.execute_raw("block-dirty-bitmap-add", bitmap, TIMEOUT).await?;
    }
    Ok(())
}

/// Lets images be read by NBD, in this order, as the guest left them: it has gone, and QEMU has given its disks away.
///
/// # Errors
/// [`QmpError`].
pub async fn export_left(
    client: &Client,
    socket: &Path,
    vm_dir: &Path,
    images: &[PathBuf],
) -> Result<(), QmpError> {
    let disks = shown(client, vm_dir, images).await?;
    serve(client, socket).await?;
    for (number, disk) in disks.iter().enumerate() {
        let mut node = layer(&disk.image, vm_dir, disk.direct);
        node["node-name"] = json!(compared(number));
        client.execute_raw("blockdev-add", node, TIMEOUT).await?;
        export_node(client, number, &compared(number)).await?;
    }
    Ok(())
}

/// Lets the guest's disks on these images be read by NBD, in this order, while it writes to them.
///
/// # Errors
/// [`QmpError`].
pub async fn export_present(
    client: &Client,
    socket: &Path,
    vm_dir: &Path,
    images: &[PathBuf],
) -> Result<(), QmpError> {
    let disks = shown(client, vm_dir, images).await?;
    serve(client, socket).await?;
    for (number, disk) in disks.iter().enumerate() {
        export_node(client, number, &disk.node).await?;
    }
    Ok(())
}

/// Lets it be read what the guest has written since [`note_writes`]. A write that was under way counts: QEMU ends all that are before it looks.
///
/// # Errors
/// [`QmpError`], also if nothing was noted.
pub async fn export_writes(client: &Client, vm_dir: &Path, images: &[PathBuf]) -> Result<(), QmpError> {
    for (number, disk) in shown(client, vm_dir, images).await?.into_iter().enumerate() {
        let add = json!({
            "node": disk.node, "name": SEEN, "granularity": PIECE, "persistent": false, "disabled": true,
        });
        let merge = json!({ "node": disk.node, "target": SEEN, "bitmaps": [WRITES] });
        let actions = json!([
            { "type": "block-dirty-bitmap-add", "data": add },
            { "type": "block-dirty-bitmap-merge", "data": merge },
        ]);
        client.execute_raw("transaction", json!({ "actions": actions }), TIMEOUT).await?;
        let name = writes_of(number);
        let order = json!({
            "type": "nbd", "id": name, "name": name, "node-name": disk.node, "writable": false,
            "bitmaps": [SEEN],
        });
        client.execute_raw("block-export-add", order, TIMEOUT).await?;
    }
    Ok(())
}

async fn serve(client: &Client, socket: &Path) -> Result<(), QmpError> {
    let address = json!({ "addr": { "type": "unix", "data": { "path": socket } }, "max-connections": 0 });
    client.execute_raw("nbd-server-start", address, TIMEOUT).await.map(drop)
}

async fn export_node(client: &Client, number: usize, node: &str) -> Result<(), QmpError> {
    let name = compared(number);
    let order = json!({ "type": "nbd", "id": name, "name": name, "node-name": node, "writable": false });
    client.execute_raw("block-export-add", order, TIMEOUT).await.map(drop)
}

/// How an image is opened once more, those below it included. `direct`: past the page cache, as the guest's is.
fn layer(image: &Value, vm_dir: &Path, direct: bool) -> Value {
    let text = |key: &str| image.get(key).and_then(Value::as_str).unwrap_or_default();
    let (path, format) = (vm_dir.join(text("filename")), text("format"));
    let is_device = std::fs::metadata(&path).is_ok_and(|meta| meta.file_type().is_block_device());
    let driver = if is_device { "host_device" } else { "file" };
    let cache = json!({ "direct": direct });
    let mut file = json!({ "driver": driver, "filename": path });
    if matches!(format, "file" | "host_device") {
        open_to_all(&mut file, &cache);
        return file;
    }
    open_to_all(&mut file, &cache);
    let mut node = json!({ "driver": format, "file": file });
    open_to_all(&mut node, &cache);
    match image.get("backing-image") {
        Some(below) if is_path(below) => node["backing"] = layer(below, vm_dir, direct),
        // One that is no file names its own drivers, so that nothing is guessed.
        Some(_) => {}
        None if format == "qcow2" => node["backing"] = Value::Null,
        None => {}
    }
    node
}

fn open_to_all(node: &mut Value, cache: &Value) {
    node["read-only"] = json!(true);
    node["force-share"] = json!(true);
    node["cache"] = cache.clone();
}

/// Whether an image is in a file or on a device, as opposed to `json:…`, `nbd+unix://…`.
fn is_path(image: &Value) -> bool {
    let name = image.get("filename").and_then(Value::as_str).unwrap_or_default();
    name.starts_with('/') || !name.contains(':')
}

/// Takes away all that comparisons have left in QEMU, those of an earlier process too. `socket`: that of their server. With `keep_noting`, what the
/// guest writes is noted on.
///
/// # Errors
/// [`QmpError`].
pub async fn end_comparison(client: &Client, socket: &Path, keep_noting: bool) -> Result<(), QmpError> {
    let exports = client.execute_raw("query-block-exports", Value::Null, TIMEOUT).await?;
    let ours = |entry: &&Value, key: &str| {
        entry.get(key).and_then(Value::as_str).is_some_and(|name| name.starts_with(PREFIX))
    };
    // A server without exports may be somebody else's, unless it listens where only ours does.
    if exports.as_array().into_iter().flatten().any(|export| ours(&export, "id")) || socket.exists() {
        let stopped = client.execute_raw("nbd-server-stop", Value::Null, TIMEOUT).await;
        super::copy::refused_is_fine(stopped, false)?;
        let _ = std::fs::remove_file(socket);
    }
    let nodes = client.execute_raw("query-named-block-nodes", json!({ "flat": true }), TIMEOUT).await?;
    for node in nodes.as_array().into_iter().flatten() {
        let name = node.get("node-name").and_then(Value::as_str).unwrap_or_default();
        if name.starts_with(PREFIX) {
            client.execute_raw("blockdev-del", json!({ "node-name": name }), TIMEOUT).await?;
            continue;
        }
        for bitmap in node.get("dirty-bitmaps").and_then(Value::as_array).into_iter().flatten() {
            let bitmap = bitmap.get("name").and_then(Value::as_str).unwrap_or_default();
            if bitmap == SEEN || (bitmap == WRITES && !keep_noting) {
                let named = json!({ "node": name, "name": bitmap });
                client.execute_raw("block-dirty-bitmap-remove", named, TIMEOUT).await?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_opened_by_the_drivers_that_it_has_and_locks_nothing() {
        let image = json!({ "filename": "disk.qcow2", "format": "qcow2", "backing-image": {
            "filename": "/base.raw", "format": "raw" } });
        let open = |driver: &str, path: &str| {
            json!({ "driver": driver, "filename": path, "read-only": true, "force-share": true,
                "cache": { "direct": true } })
        };
        let over = |driver: &str, file: Value| {
            json!({ "driver": driver, "file": file, "read-only": true, "force-share": true,
                "cache": { "direct": true } })
        };
        let mut expected = over("qcow2", open("file", "/vm/disk.qcow2"));
        expected["backing"] = over("raw", open("file", "/base.raw"));
        assert_eq!(layer(&image, Path::new("/vm"), true), expected);
    }

    #[test]
    fn an_image_without_one_below_it_is_opened_without() {
        let of =
            |format: &str| layer(&json!({ "filename": "/a", "format": format }), Path::new("/vm"), false);
        assert_eq!(of("qcow2").get("backing"), Some(&Value::Null));
        assert_eq!(of("raw").get("backing"), None);
        assert_eq!(
            of("file"),
            json!({ "driver": "file", "filename": "/a", "read-only": true,
            "force-share": true, "cache": { "direct": false } })
        );
    }

    #[test]
    fn an_image_below_that_is_no_file_is_opened_as_it_is_named() {
        let image = json!({ "filename": "/a", "format": "qcow2",
            "backing-image": { "filename": "nbd+unix:///disk?socket=/s", "format": "raw" } });
        assert_eq!(layer(&image, Path::new("/vm"), false).get("backing"), None);
    }
}
