//! Disks that come along: where they are to be here, and whether there is a place for each.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use vmove_qmp::CommandLine;
use vmove_qmp::cmdline::{CommandLineError, NewImage, Overlay};
use vmove_types::check::{Blocker, BlockerCode};

use crate::node::Node;
use crate::proto::message::{MovedDisk, Prepare};

/// Beside what an image holds: its own tables, and what the file system keeps of it. One part in so many, and some bytes.
const OVERHEAD: (u64, u64) = (128, 4 << 20);

/// The format of a disk that cannot follow its guest.
const UNFIT: &str = "none that can follow";

/// Puts the places that disks have here into the command line, and notes them. From here on `prepare` is that of a guest whose disks are here.
pub(crate) fn settle(node: &Node, prepare: &mut Prepare) -> Result<(), CommandLineError> {
    if prepare.moved.is_empty() {
        return Ok(());
    }
    let layout = node.layout(&prepare.vm, prepare.backing);
    let mut line = CommandLine::parse(prepare.command_line.iter().map(OsString::from).collect())?;
    let (written, opened) = (line.movable_images()?, line.opened_images(&layout)?);
    for disk in &mut prepare.moved {
        let here = written.iter().zip(&opened).find(|(written, _)| written.file == disk.image);
        let Some((_, opened)) = here else { continue };
        let path = disk.to.clone().map_or_else(|| layout.vm_dir.join(&opened.file), PathBuf::from);
        let is_device = std::fs::metadata(&path).is_ok_and(|meta| meta.file_type().is_block_device());
        if prepare.spec.disks_after {
            follow(&mut line, disk)?;
        } else {
            let (image, format) = (disk.image.clone(), disk.format.clone());
            line.move_image(&NewImage { image, file: disk.to.clone(), format, is_device })?;
        }
        disk.image = disk.to.take().unwrap_or_else(|| disk.image.clone());
        disk.to = path.to_str().map(str::to_owned);
    }
    let words = line.to_argv().into_iter().map(|word| word.to_string_lossy().into_owned());
    prepare.command_line = words.collect();
    Ok(())
}

/// A disk that follows its guest has an image here that holds what has come: qcow2, whatever it is at the source. One whose node cannot be that
/// keeps its format, and is refused.
fn follow(line: &mut CommandLine, disk: &mut MovedDisk) -> Result<(), CommandLineError> {
    let file = disk.to.clone().unwrap_or_else(|| disk.image.clone());
    let (image, direct) = (disk.image.clone(), false);
    if line.put_overlay(&Overlay { image, file, direct, alone: true })? {
        "qcow2".clone_into(&mut disk.format);
    } else {
        UNFIT.clone_into(&mut disk.format);
    }
    Ok(())
}

/// What stands in the way of each disk here.
pub(crate) fn blockers(node: &Node, prepare: &Prepare) -> Vec<Blocker> {
    let (vm_dir, node) = (node.layout(&prepare.vm, prepare.backing).vm_dir, node.config.node.as_str());
    let mut found: Vec<Blocker> =
        prepare.moved.iter().filter_map(|disk| no_place(node, &vm_dir, disk, &by_map(disk))).collect();
    let mut paths: Vec<&String> = prepare.moved.iter().filter_map(|disk| disk.to.as_ref()).collect();
    paths.sort();
    for twice in paths.windows(2).filter(|pair| pair[0] == pair[1]) {
        let message = format!("Two disks would be at {}: name another path by --disk-map", twice[0]);
        found.push(Blocker::new(BlockerCode::DiskPlace, message).about(twice[0]));
    }
    if prepare.spec.disks_after {
        found.extend(prepare.moved.iter().filter_map(|disk| cannot_follow(node, disk)));
    }
    if found.is_empty() {
        found.extend(no_space(node, &prepare.moved, "--disk-map"));
    }
    found
}

/// What stands in the way of a disk that is to be at another path of its own host.
pub(crate) fn blockers_here(node: &str, vm_dir: &Path, disk: &MovedDisk) -> Vec<Blocker> {
    let no_place = no_place(node, vm_dir, disk, "name another path by --to");
    match no_place {
        Some(blocker) => vec![blocker],
        None => no_space(node, std::slice::from_ref(disk), "--to"),
    }
}

/// Why a disk cannot follow its guest to where it is to be.
fn cannot_follow(node: &str, disk: &MovedDisk) -> Option<Blocker> {
    let path = Path::new(disk.to.as_deref()?);
    let is_device = std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device());
    let message = format!(
        "Disk {} would be on the block device {} at {node}, where no disk can follow its guest: leave out --disks-after, or {}",
        disk.name,
        path.display(),
        by_map(disk)
    );
    is_device.then(|| Blocker::new(BlockerCode::DiskPlace, message).about(&disk.name))
}

fn by_map(disk: &MovedDisk) -> String {
    format!("name another path by --disk-map {}=PATH", disk.name)
}

/// `another`: how to name another path.
fn no_place(node: &str, vm_dir: &Path, disk: &MovedDisk, another: &str) -> Option<Blocker> {
    let name = &disk.name;
    let refuse = |message: String| Some(Blocker::new(BlockerCode::DiskPlace, message).about(name));
    if disk.format == UNFIT {
        return refuse(format!(
            "Disk {name} is given to the guest in a way in which it cannot follow (expected -drive file=, or -blockdev with driver raw or qcow2 over a file): leave out --disks-after"
        ));
    }
    // It comes from another node, and names a driver of QEMU here.
    if !matches!(disk.format.as_str(), "raw" | "qcow2") {
        return refuse(format!("Disk {name} has format {:?}: expected raw or qcow2", disk.format));
    }
    let Some(path) = disk.to.as_deref().map(Path::new) else {
        return refuse(format!("Disk {name} is not found in the command line of the guest at {node}"));
    };
    let shown = path.display();
    match std::fs::metadata(path) {
        Ok(meta) if meta.file_type().is_block_device() => device(node, disk, path, another).and_then(refuse),
        Ok(_) => refuse(format!(
            "{shown}, where disk {name} would be at {node}, is there already: remove it, or {another}"
        )),
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => refuse(format!(
            "{shown}, where disk {name} would be at {node}, cannot be looked at: {error}; {another}"
        )),
        Err(_) => {
            let folder = path.parent().unwrap_or(path);
            // The VM's own folder is made for it.
            if folder.is_dir() || folder == vm_dir {
                return None;
            }
            refuse(format!(
                "The folder {}, where disk {name} would be at {node}, is not there: make it, or {another}",
                folder.display()
            ))
        }
    }
}

/// Why a block device cannot take a disk.
fn device(node: &str, disk: &MovedDisk, path: &Path, another: &str) -> Option<String> {
    let (name, shown) = (&disk.name, path.display());
    // Refused if a file system, a volume manager or a RAID has it.
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(rustix::fs::OFlags::EXCL.bits().cast_signed())
        .open(path);
    let mut device = match opened {
        Ok(device) => device,
        Err(error) => {
            return Some(format!(
                "{shown}, where disk {name} would be at {node}, cannot be had: {error}; unmount it there, or {another}"
            ));
        }
    };
    if is_locked(&device) {
        return Some(format!(
            "{shown}, where disk {name} would be at {node}, is locked: a QEMU has it, perhaps as a disk of a guest; {another}"
        ));
    }
    let size = match device.seek(SeekFrom::End(0)) {
        Ok(size) => size,
        Err(error) => return Some(format!("{shown} at {node} cannot be measured: {error}; {another}")),
    };
    let fits = if disk.format == "raw" { size == disk.size } else { size >= disk.allocated };
    if !fits {
        return Some(format!(
            "Disk {name} has {} bytes and {shown} at {node} has {size}: the guest would see another disk; make it of that size, or {another}",
            disk.size
        ));
    }
    device
        .rewind()
        .and_then(|()| device.read_exact(&mut [0; 512]))
        .err()
        .map(|error| format!("{shown} at {node} cannot be read: {error}; {another}"))
}

/// Whether another process has locked a part of a file. QEMU locks images and devices that it opens (`docs/system/qemu-block-drivers.rst`, image
/// locking). Our own lock goes with the file.
fn is_locked(file: &File) -> bool {
    let locked = rustix::fs::fcntl_lock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    matches!(locked, Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS))
}

/// Images are sparse: they take what they take at the source. `option`: names other paths.
fn no_space(node: &str, disks: &[MovedDisk], option: &str) -> Vec<Blocker> {
    let mut wanted: BTreeMap<u64, (PathBuf, u64)> = BTreeMap::new();
    for disk in disks {
        let Some(folder) = disk.to.as_deref().map(Path::new).and_then(existing_folder) else { continue };
        let Ok(meta) = folder.metadata() else { continue };
        let needs = disk.allocated.saturating_add(disk.allocated / OVERHEAD.0).saturating_add(OVERHEAD.1);
        wanted.entry(meta.dev()).or_insert((folder, 0)).1 += needs;
    }
    let short = wanted.into_values().filter_map(|(folder, needed)| {
        let room = rustix::fs::statvfs(&folder).ok()?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        (free < needed).then(|| {
            let mib = |bytes: u64| bytes >> 20;
            let message = format!(
                "The disks need {} MiB in {} at {node}, which has {} MiB free: make room there, or name other paths by {option}",
                mib(needed).max(1),
                folder.display(),
                mib(free)
            );
            Blocker::new(BlockerCode::DiskPlace, message).about(folder.to_string_lossy())
        })
    });
    short.collect()
}

/// The nearest folder above a file that there is; nothing for a block device.
fn existing_folder(path: &Path) -> Option<PathBuf> {
    if path.exists() {
        return None;
    }
    path.ancestors().skip(1).find(|folder| folder.is_dir()).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(format: &str, to: &Path) -> MovedDisk {
        MovedDisk {
            name: "vda".to_owned(),
            image: "/vda".to_owned(),
            format: format.to_owned(),
            size: 1 << 20,
            allocated: 1 << 20,
            cluster: 0,
            to: to.to_str().map(str::to_owned),
        }
    }

    #[test]
    fn a_place_is_a_new_file_in_a_folder_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let (new, vm_dir) = (dir.path().join("new"), dir.path().join("vm"));
        let why =
            |disk: &MovedDisk| no_place("b", &vm_dir, disk, &by_map(disk)).map(|blocker| blocker.message);
        assert_eq!(why(&disk("raw", &new)), None);
        assert_eq!(why(&disk("raw", &vm_dir.join("new"))), None, "the VM's folder is made for it");
        for (disk, word) in [
            (
                disk("raw", &dir.path().join("none/new")),
                "make it, or name another path by --disk-map vda=PATH",
            ),
            (disk("raw", dir.path()), "is there already"),
            (disk("nbd", &new), "expected raw or qcow2"),
            (MovedDisk { to: None, ..disk("raw", &new) }, "not found in the command line"),
        ] {
            let said = why(&disk).unwrap();
            assert!(said.contains(word), "{said}");
        }
    }

    #[test]
    fn what_all_disks_of_a_file_system_need_must_be_free() {
        let dir = tempfile::tempdir().unwrap();
        let new = disk("raw", &dir.path().join("new"));
        assert!(no_space("b", std::slice::from_ref(&new), "--to").is_empty());
        let large = MovedDisk { allocated: 1 << 60, ..new };
        let [short] = &no_space("b", &[large], "--to")[..] else { panic!("it has room") };
        assert!(short.message.contains("MiB free: make room there"), "{}", short.message);
    }
}
