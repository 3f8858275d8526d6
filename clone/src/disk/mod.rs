//! Disks that a guest can write. At the fork each is frozen: the guest goes on with an overlay over it, and each child has an
//! overlay of its own. So nobody writes to the image again, and all see what it held at the fork.
//!
//! ```text
//!  before       after
//!  guest        guest      child 1    child 2
//!    |            |           |          |
//!  image       overlay     overlay    overlay      qcow2, empty at first
//!                 \___________|__________/
//!                           image                  frozen: read by all, written by none
//! ```
//!
//! The guest gets its overlay while it stands still and is drained, before its device state is saved (`blockdev-snapshot` of all
//! disks in one transaction). An overlay of a child ends with it. That of the guest stays: it holds its data.
//!
//! Children on other hosts have the image at the same path if that is the same file, and else behind a socket ([`Exported`]).

mod exported;
mod layers;
mod look;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vmove_node::qcow2;
use vmove_node::record::VmRecord;
use vmove_qmp::confine::Confinement;
use vmove_qmp::{Client, CommandLine, QmpError, cmdline};
use vmove_types::check::{Blocker, BlockerCode};

pub use exported::{Exported, Images};
#[cfg(feature = "fuzzing")]
pub(crate) use layers::any_head;
pub use layers::{Layers, layers};
pub use look::{Chain, absolute, as_named, chains, look};

use crate::CloneError;
use crate::error::blocking;
use crate::files::remove_file;

/// For a command that waits for a disk at most.
const DISK_TIMEOUT: Duration = Duration::from_secs(60);

/// A disk that a guest can write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// QEMU's name of the device: an id, or a path of QEMU's object tree.
    pub device: String,
    /// The block node that the device has.
    pub node: String,
    /// The image, as the command line has it.
    pub image: String,
    /// The image. Absolute.
    pub file: PathBuf,
    /// Its format: `raw` or `qcow2`.
    pub format: String,
    /// Bytes that the guest sees.
    pub size: u64,
    /// Whether it bypasses the page cache.
    pub direct: bool,
}

/// An overlay that is to be made, or was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// The qcow2 file.
    pub path: PathBuf,
    /// The image below it: its path, or how QEMU reaches it (`json:…`).
    pub base: PathBuf,
    /// Format of that.
    pub format: String,
    /// Bytes that the guest sees.
    pub size: u64,
}

impl Overlay {
    /// An overlay over `disk`, the `number`th of VM `vm`: in `folder`, or beside the image. The name is one that nobody has.
    #[must_use]
    pub fn new(disk: &Disk, number: usize, vm: &str, folder: Option<&Path>) -> Self {
        let folder = folder.or_else(|| disk.file.parent()).unwrap_or_else(|| Path::new("/"));
        let unique = uuid::Uuid::new_v4().simple().to_string();
        let path = folder.join(format!("{vm}.disk{number}.{}.qcow2", &unique[..8]));
        Self { path, base: disk.file.clone(), format: disk.format.clone(), size: disk.size }
    }

    /// Makes the file.
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn create(&self) -> Result<(), CloneError> {
        let empty = qcow2::Empty::over(self.size, &self.base, &self.format);
        empty.create(&self.path).map_err(CloneError::io("create", &self.path))
    }
}

/// Puts the overlays of `disks` into a command line; `alone` if the images are not at their paths.
///
/// # Errors
/// [`CloneError::CommandLine`]; [`CloneError::Refused`] for a disk that is not there.
pub fn rewrite(line: &mut CommandLine, disks: &[(&Disk, &Overlay)], alone: bool) -> Result<(), CloneError> {
    for (disk, overlay) in disks {
        let file = overlay.path.to_str().map(str::to_owned);
        let (image, direct) = (disk.image.clone(), disk.direct);
        let overlay = file.map(|file| cmdline::Overlay { image, file, direct, alone });
        let done = overlay.map_or(Ok(false), |overlay| line.put_overlay(&overlay))?;
        if !done {
            return Err(CloneError::Refused(vec![not_on_the_command_line(&disk.device, &disk.file)]));
        }
    }
    Ok(())
}

fn not_on_the_command_line(device: &str, file: &Path) -> Blocker {
    let message = format!(
        "Disk {device} ({}) can be written and is not given by -drive file= or -blockdev with a plain path, so that children \
         cannot get overlays: give it so at the start, attach it read-only, or detach it",
        file.display()
    );
    Blocker::new(BlockerCode::DiskNotKnown, message).about(device)
}

/// A disk of the guest that is forked, and the overlay that it gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The disk.
    pub disk: Disk,
    /// Its overlay.
    pub overlay: Overlay,
    /// The overlay's block node.
    pub node: String,
}

/// What fork `fork` of VM `vm` is to do with its disks.
#[must_use]
pub fn steps(disks: &[Disk], vm: &str, fork: &str, folder: Option<&Path>) -> Vec<Step> {
    let short: String = fork.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
    let step = |(number, disk): (usize, &Disk)| Step {
        disk: disk.clone(),
        overlay: Overlay::new(disk, number, vm, folder),
        // QEMU's limit is 31 characters.
        node: format!("vmove-{short}-{number}"),
    };
    disks.iter().enumerate().map(step).collect()
}

/// Makes the overlays of a guest and opens them in its QEMU, which has these rights, while it runs. Nothing is changed for the guest.
///
/// # Errors
/// [`CloneError::Refused`] where the folder does not take them, or QEMU does not open them there.
pub(crate) async fn prepare(
    client: &Client,
    steps: &[Step],
    confinement: &Confinement,
) -> Result<(), CloneError> {
    for step in steps {
        let (overlay, confinement) = (step.overlay.clone(), confinement.clone());
        let make = move || {
            overlay.create()?;
            confinement.give(&overlay.path).map_err(CloneError::io("give QEMU", &overlay.path))
        };
        blocking(make).await.map_err(|error| no_overlay(step, &error))?;
        // What the page cache holds of the image is on disk already when the guest is stopped: that flushes it again.
        let file = step.disk.file.clone();
        blocking(move || {
            let image = std::fs::File::open(&file).map_err(CloneError::io("open", &file))?;
            image.sync_data().map_err(CloneError::io("flush", &file))
        })
        .await?;
        let cache = json!({ "direct": step.disk.direct });
        let file = json!({ "driver": "file", "filename": step.overlay.path, "cache": cache });
        let node = json!({
            "driver": "qcow2", "node-name": step.node, "backing": null, "file": file, "cache": cache,
        });
        client
            .execute_raw("blockdev-add", node, DISK_TIMEOUT)
            .await
            .map_err(|error| no_overlay(step, &error))?;
    }
    Ok(())
}

fn no_overlay(step: &Step, error: &(dyn std::error::Error + 'static)) -> CloneError {
    let why = std::iter::successors(Some(error), |e| e.source()).map(ToString::to_string).collect::<Vec<_>>();
    let message = format!(
        "An overlay for disk {} cannot be made at {}: {}; `overlay-dir` in [fork] names another folder for overlays{}",
        step.disk.device,
        step.overlay.path.display(),
        why.join(": "),
        if step.disk.direct {
            " (the disk bypasses the page cache, its overlay must be able to)"
        } else {
            ""
        }
    );
    CloneError::Refused(vec![Blocker::new(BlockerCode::NoOverlay, message).about(&step.disk.device)])
}

/// Puts the overlays in place, all at once. The guest must stand still, drained, with its disks active.
pub(crate) async fn snapshot(client: &Client, steps: &[Step]) -> Result<(), QmpError> {
    let action = |step: &Step| json!({ "type": "blockdev-snapshot", "data": { "node": step.disk.node, "overlay": step.node } });
    let actions: Vec<Value> = steps.iter().map(action).collect();
    client.execute_raw("transaction", json!({ "actions": actions }), DISK_TIMEOUT).await.map(drop)
}

/// Those of `steps` whose overlay a device has.
///
/// # Errors
/// [`CloneError::Qmp`].
pub async fn switched(client: &Client, steps: &[Step]) -> Result<Vec<Step>, CloneError> {
    if steps.is_empty() {
        return Ok(Vec::new());
    }
    let reply = client.execute_raw("query-block", Value::Null, DISK_TIMEOUT).await?;
    let drives = reply.as_array().map(Vec::as_slice).unwrap_or_default();
    let has = |step: &&Step| {
        drives.iter().any(|drive| {
            drive.pointer("/inserted/node-name").and_then(Value::as_str) == Some(step.node.as_str())
        })
    };
    Ok(steps.iter().filter(has).cloned().collect())
}

/// Removes the overlays that did not get into place.
pub(crate) async fn undo(client: &Client, steps: &[Step]) -> Result<(), CloneError> {
    let done = switched(client, steps).await?;
    for step in steps.iter().filter(|step| !done.contains(step)) {
        match client.execute_raw("blockdev-del", json!({ "node-name": step.node }), DISK_TIMEOUT).await {
            // There is no such node.
            Err(error) if !error.is_refusal() => return Err(error.into()),
            _ => {}
        }
        let path = step.overlay.path.clone();
        blocking(move || remove_file(&path)).await?;
    }
    Ok(())
}

/// The record of a guest whose disks have got these overlays: its command line names them, and so does that of whoever is derived
/// from it. Overlays that ended with the guest are others' bases now, and stay.
///
/// # Errors
/// [`CloneError::CommandLine`].
pub fn follow(record: &VmRecord, done: &[Step]) -> Result<VmRecord, CloneError> {
    let mut record = record.clone();
    let mut line = CommandLine::parse(record.command_line.iter().map(Into::into).collect())?;
    let known: Vec<String> = line.images()?.into_iter().map(|image| image.file).collect();
    // After a crash of the daemon it may have been done already.
    let open = |step: &&Step| known.contains(&step.disk.image);
    let open: Vec<(&Disk, &Overlay)> = done.iter().filter(open).map(|s| (&s.disk, &s.overlay)).collect();
    rewrite(&mut line, &open, false)?;
    record.command_line =
        line.to_argv().into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
    for (disk, overlay) in open {
        if let Some(own) = record.overlays.iter_mut().find(|own| **own == disk.file) {
            own.clone_from(&overlay.path);
        }
    }
    Ok(record)
}
