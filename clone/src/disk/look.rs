//! Which disks a guest can write, and which of them cannot be frozen.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vmove_node::record::VmRecord;
use vmove_qmp::cmdline::Image;
use vmove_qmp::inspect::VmFacts;
use vmove_qmp::{Client, CommandLine};
use vmove_types::check::{Blocker, BlockerCode};

use super::{DISK_TIMEOUT, Disk, Layers, layers, not_on_the_command_line};
use crate::CloneError;
use crate::error::blocking;

/// Looks at the disks of a guest that can be written: those that can be frozen, and why the others cannot.
///
/// # Errors
/// [`CloneError::Qmp`], [`CloneError::CommandLine`].
pub async fn look(
    client: &Client,
    vm: &VmRecord,
    facts: &VmFacts,
) -> Result<(Vec<Disk>, Vec<Blocker>), CloneError> {
    let reply = client.execute_raw("query-block", Value::Null, DISK_TIMEOUT).await?;
    let drives = reply.as_array().map(Vec::as_slice).unwrap_or_default();
    let (mut disks, mut blockers) = (Vec::new(), Vec::new());
    let images = CommandLine::parse(vm.command_line.iter().map(Into::into).collect())?.images()?;
    for drive in drives {
        let Some(found) = Drive::of(drive) else { continue };
        let file = absolute(&found.file, vm);
        let image = images.iter().find(|image| absolute(&image.file, vm) == file);
        let mut why = reasons(&found, image, facts);
        if shared_by_the_guest(client, &found.device).await? {
            let message = format!(
                "Disk {} ({}) may be written by others while the guest has it (share-rw=on), so that it cannot be frozen: start \
                 the guest without that, or detach the disk",
                found.device,
                file.display()
            );
            why.push(Blocker::new(BlockerCode::DiskShared, message).about(&found.device));
        }
        match image {
            Some(image) if why.is_empty() => disks.push(Disk {
                device: found.device,
                node: found.node,
                image: image.file.clone(),
                file,
                format: if found.format == "file" { "raw".to_owned() } else { found.format },
                size: found.size,
                direct: found.direct,
            }),
            None if why.is_empty() => blockers.push(not_on_the_command_line(&found.device, &file)),
            _ => blockers.extend(why),
        }
    }
    if !disks.is_empty() {
        let jobs = client.execute_raw("query-block-jobs", Value::Null, DISK_TIMEOUT).await?;
        for job in jobs.as_array().map(Vec::as_slice).unwrap_or_default() {
            let id = job.get("device").and_then(Value::as_str).unwrap_or_default();
            let message = format!("Block job {id:?} is at work on a disk: wait for its end, or cancel it");
            blockers.push(Blocker::new(BlockerCode::DiskBusy, message).about(id));
        }
    }
    Ok((disks, blockers))
}

/// A drive that the guest can write, as QEMU tells of it.
struct Drive {
    device: String,
    node: String,
    file: String,
    format: String,
    size: u64,
    direct: bool,
    encrypted: bool,
}

impl Drive {
    fn of(drive: &Value) -> Option<Self> {
        let text = |at: &str| drive.pointer(at).and_then(Value::as_str).map(str::to_owned);
        let flag = |at: &str| drive.pointer(at).and_then(Value::as_bool).unwrap_or(false);
        drive.get("inserted")?;
        if flag("/inserted/ro") {
            return None;
        }
        Some(Self {
            // Without a device nobody writes.
            device: text("/qdev")?,
            // What QEMU does not tell is no image file either, and refused for that.
            node: text("/inserted/node-name").unwrap_or_default(),
            file: text("/inserted/file").unwrap_or_default(),
            format: text("/inserted/drv").unwrap_or_default(),
            size: drive.pointer("/inserted/image/virtual-size").and_then(Value::as_u64).unwrap_or(0),
            direct: flag("/inserted/cache/direct"),
            encrypted: flag("/inserted/encrypted"),
        })
    }
}

fn reasons(drive: &Drive, image: Option<&Image>, facts: &VmFacts) -> Vec<Blocker> {
    let mut found = Vec::new();
    let mut add = |code: BlockerCode, why: String| {
        let message = format!("Disk {} ({}) {why}", drive.device, drive.file);
        found.push(Blocker::new(code, message).about(&drive.device));
    };
    let is_file = facts.block.iter().any(|block| block.file == drive.file && block.driver == "file");
    if !is_file {
        add(
            BlockerCode::DiskNoFile,
            "can be written and is no image file, over which children could have overlays: put it into a raw or qcow2 file, attach \
             it read-only, or detach it"
                .to_owned(),
        );
    }
    if !matches!(drive.format.as_str(), "raw" | "qcow2" | "file") {
        add(
            BlockerCode::DiskFormat,
            format!(
                "can be written and has format {}, expected raw or qcow2: convert it (qemu-img convert)",
                drive.format
            ),
        );
    }
    if drive.encrypted {
        add(
            BlockerCode::DiskEncrypted,
            "is encrypted, and children would not have its key: attach it read-only, or detach it".to_owned(),
        );
    }
    if image.is_some_and(|image| image.unlocked) {
        add(
            BlockerCode::DiskUnlocked,
            "is not locked (locking=off), so that nothing keeps others from writing to it once it is frozen: leave locking=off out"
                .to_owned(),
        );
    }
    found
}

/// `share-rw` of the device. QEMU names it by an id or by a path; other devices than disks have no such property.
async fn shared_by_the_guest(client: &Client, device: &str) -> Result<bool, CloneError> {
    let path =
        if device.starts_with('/') { device.to_owned() } else { format!("/machine/peripheral/{device}") };
    let asked = json!({ "path": path, "property": "share-rw" });
    match client.execute_raw("qom-get", asked, DISK_TIMEOUT).await {
        Ok(value) => Ok(value.as_bool().unwrap_or(false)),
        Err(error) if error.is_refusal() => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A path of the command line on this host.
#[must_use]
pub fn absolute(file: &str, vm: &VmRecord) -> PathBuf {
    let file = file.replace("{vmdir}", &vm.vm_dir.to_string_lossy()).replace("{name}", &vm.name);
    // QEMU's working folder.
    vm.vm_dir.join(Path::new(&file))
}

/// Looks whether the images below a disk are those that its headers name, which is what whoever opens its file elsewhere gets.
///
/// # Errors
/// [`CloneError::Qmp`]; [`CloneError::Io`] for a header that cannot be read; [`CloneError::Refused`] if they are not.
pub async fn as_named(client: &Client, disks: &[Disk]) -> Result<Vec<Layers>, CloneError> {
    let opened = chains(client).await?;
    let mut all = Vec::new();
    for disk in disks {
        let (file, format) = (disk.file.clone(), disk.format.clone());
        let named =
            blocking(move || layers(&file, Some(&format)).map_err(CloneError::io("read", &file))).await?;
        let chain = opened.iter().find(|chain| chain.device == disk.device);
        let files = chain.map_or(&[][..], |chain| chain.files.get(1..).unwrap_or_default());
        let deeper = files.get(named.files.len() - 1..);
        let same = files.iter().zip(&named.files[1..]).all(|(opened, named)| opened == named)
            && deeper.is_some_and(|deeper| deeper.is_empty() == named.other.is_none());
        if !same {
            let message = format!(
                "Disk {} lies over {files:?}, its files name {:?} and {:?}: children on other hosts would open those; keep the \
                 children on this host, or let the image name what it lies over (qemu-img rebase -u)",
                disk.device,
                &named.files[1..],
                named.other
            );
            return Err(CloneError::Refused(vec![
                Blocker::new(BlockerCode::DiskChain, message).about(&disk.device),
            ]));
        }
        all.push(named);
    }
    Ok(all)
}

/// A disk and all files that it is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chain {
    /// QEMU's name of the device.
    pub device: String,
    /// The file that is written, then those below it.
    pub files: Vec<PathBuf>,
}

/// The disks of a guest that have images below them.
///
/// # Errors
/// [`CloneError::Qmp`].
pub async fn chains(client: &Client) -> Result<Vec<Chain>, CloneError> {
    let reply = client.execute_raw("query-block", Value::Null, DISK_TIMEOUT).await?;
    let drives = reply.as_array().map(Vec::as_slice).unwrap_or_default();
    let chain = |drive: &Value| {
        let device = drive.get("qdev")?.as_str()?.to_owned();
        let top = drive.pointer("/inserted/image");
        let images = std::iter::successors(top, |image| image.get("backing-image"));
        let files: Vec<PathBuf> = images.filter_map(|i| Some(i.get("filename")?.as_str()?.into())).collect();
        (files.len() > 1).then_some(Chain { device, files })
    };
    Ok(drives.iter().filter_map(chain).collect())
}
