//! Images that are made here for the disks that move. They are removed again unless the guest comes to be ours.
//!
//! An image is made under a name that has the session's ID, noted by its inode, and then given its own name, which nothing may have: so whatever
//! is found at that name later is known to be ours or not.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, RenameFlags, ResolveFlags, openat2, renameat_with};
use serde_json::json;
use vmove_node::image_server::EXPORT;
use vmove_node::peer::SessionId;
use vmove_node::qcow2::Empty;
use vmove_qmp::confine::Confinement;
use vmove_qmp::disks::ExportOrder;

use super::after_wires::socket;
use super::error::VmFilesError;
use crate::node::Node;
use crate::proto::message::{MovedDisk, Prepare};
use crate::records::{FileId, LeftImage};

/// What an image is called until it is noted.
fn first_name(path: &Path, id: SessionId) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".coming-{id}"));
    path.with_file_name(name)
}

/// A folder, whatever becomes of its path: QEMU's user may write in it, and a guest that has broken out of another QEMU could put a link in its
/// place while the daemon works there.
#[derive(Debug)]
pub(crate) struct Folder(OwnedFd);

impl Folder {
    /// The one that this file is to be in. Links on the way count as they stand now; none may come to be there meanwhile.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let folder = path.parent().unwrap_or(path).canonicalize()?;
        let (flags, resolve) =
            (OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, ResolveFlags::NO_SYMLINKS);
        Ok(Self(openat2(CWD, &folder, flags, Mode::empty(), resolve)?))
    }

    /// A file in it, by a path that leads there.
    pub(crate) fn file(&self, path: &Path) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
            .join(path.file_name().unwrap_or_default())
    }
}

fn places(prepare: &Prepare) -> impl Iterator<Item = (&MovedDisk, &Path)> {
    prepare.moved.iter().filter_map(|disk| Some((disk, Path::new(disk.to.as_deref()?))))
}

/// The names of all disks that move, in their order.
pub(super) fn names(prepare: &Prepare) -> Vec<String> {
    places(prepare).map(|(disk, _)| disk.name.clone()).collect()
}

/// The paths of all disks that move, in their order.
pub(super) fn paths(prepare: &Prepare) -> Vec<PathBuf> {
    places(prepare).map(|(_, path)| path.to_owned()).collect()
}

/// How the source is to write to them. Those of disks that follow the guest are written by our QEMU alone.
pub(super) fn exports(prepare: &Prepare) -> Vec<ExportOrder> {
    if prepare.spec.disks_after {
        return Vec::new();
    }
    let order = |(disk, path): (&MovedDisk, &Path)| ExportOrder {
        path: path.to_owned(),
        format: disk.format.clone(),
    };
    places(prepare).map(order).collect()
}

/// So long a read of what has not come waits for a lost source, in seconds: a year. It must not fail. While a disk is streamed, QEMU takes a failed
/// question of what is allocated for the end of the image, and answers the guest's read as if it had worked, with nothing in its buffer
/// (`cor_co_preadv_part` of block/copy-on-read.c; seen with 10.0).
const WAITS_S: u64 = 365 * 24 * 3600;

/// What images are made with.
#[derive(Debug)]
pub(super) struct Ground<'a> {
    pub confinement: &'a Confinement,
    /// The VM's folder.
    pub vm_dir: &'a Path,
}

impl<'a> Ground<'a> {
    pub(super) fn of(node: &'a Node, vm_dir: &'a Path) -> Self {
        Self { confinement: &node.config.confinement, vm_dir }
    }

    /// How QEMU reaches the source's image of this number: whatever that is, its server shows what the guest sees.
    fn below(&self, number: usize) -> PathBuf {
        let server = json!({ "type": "unix", "path": socket(self.vm_dir, number) });
        let nbd = json!({
            "driver": "nbd", "server": server, "export": EXPORT, "reconnect-delay": WAITS_S,
        });
        format!("json:{}", json!({ "driver": "raw", "file": nbd })).into()
    }
}

/// Makes the images under their first names. Nothing is left if that fails.
pub(super) fn make(
    id: SessionId,
    prepare: &Prepare,
    ground: &Ground<'_>,
) -> Result<Vec<LeftImage>, VmFilesError> {
    let mut made = Vec::new();
    for (number, (disk, path)) in places(prepare).enumerate() {
        let below = prepare.spec.disks_after.then(|| ground.below(number));
        match make_one(disk, path, id, (ground.confinement, below.as_deref())) {
            Ok(file) => made.push(LeftImage { name: disk.name.clone(), path: path.to_owned(), file }),
            Err(source) => {
                remove(id, prepare, &[]);
                return Err(VmFilesError::Image { path: path.to_owned(), source });
            }
        }
    }
    Ok(made)
}

/// Makes an image under its first name, over another if one is named; which file that is. Nothing for a block device.
pub(crate) fn make_one(
    disk: &MovedDisk,
    path: &Path,
    id: SessionId,
    (confinement, below): (&Confinement, Option<&Path>),
) -> io::Result<Option<FileId>> {
    let is_device = path.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
    if is_device && disk.format == "raw" {
        return Ok(None);
    }
    let folder = Folder::of(path)?;
    let first = folder.file(&first_name(path, id));
    if disk.format == "qcow2" {
        let empty = Empty {
            size: disk.size,
            cluster_bytes: disk.cluster,
            backing: below.map(|below| (below, "raw")),
        };
        if is_device {
            // Its head alone: clusters are taken behind it.
            return empty.write_over(path).map(|()| None);
        }
        empty.create(&first)?;
    } else {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&first)?;
        file.set_len(disk.size)?;
    }
    confinement.give(&first)?;
    FileId::at(&first)
}

/// Gives the images, which are noted by now, their own names.
pub(super) fn settle(id: SessionId, images: &[LeftImage]) -> Result<(), VmFilesError> {
    for image in images {
        let failed = |source| VmFilesError::Image { path: image.path.clone(), source };
        settle_one(id, image).map_err(failed)?;
    }
    Ok(())
}

/// The same of one image.
pub(crate) fn settle_one(id: SessionId, image: &LeftImage) -> io::Result<()> {
    if image.file.is_some() {
        let folder = Folder::of(&image.path)?;
        let (first, own) = (folder.file(&first_name(&image.path, id)), folder.file(&image.path));
        renameat_with(CWD, first, CWD, own, RenameFlags::NOREPLACE)?;
    }
    Ok(())
}

/// Removes the images of a guest that never was ours. QEMU must have ended. False if one is still there.
pub(super) fn remove(id: SessionId, prepare: &Prepare, noted: &[LeftImage]) -> bool {
    let mut removed = true;
    for (_, path) in places(prepare) {
        let noted = noted.iter().find(|image| image.path == path).and_then(|image| image.file);
        removed &= remove_one(id, path, noted);
    }
    removed
}

/// Removes an image under its first name, and the one at its path if it is the one that was noted. False if one is still there.
pub(crate) fn remove_one(id: SessionId, path: &Path, noted: Option<FileId>) -> bool {
    let folder = match Folder::of(path) {
        Ok(folder) => folder,
        // A folder that is not there has no image.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return true,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "could not look for an image that no guest came to have");
            return false;
        }
    };
    let own = folder.file(path);
    let ours = noted.is_some_and(|file| file.is_at(&own));
    let mut removed = true;
    for file in [Some(folder.file(&first_name(path, id))), ours.then_some(own)].into_iter().flatten() {
        match std::fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "could not remove an image that no guest came to have");
                removed = false;
            }
            _ => {}
        }
    }
    removed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepare(path: &Path, format: &str) -> Prepare {
        let mut prepare = crate::retention::tests::prepare();
        prepare.moved = vec![MovedDisk {
            name: "a".to_owned(),
            image: "/a".to_owned(),
            format: format.to_owned(),
            size: 1 << 20,
            allocated: 0,
            cluster: 1 << 16,
            to: path.to_str().map(str::to_owned),
        }];
        prepare
    }

    #[test]
    fn images_of_a_guest_that_does_not_come_go_and_those_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (id, path) = (SessionId::random(), dir.path().join("disk"));
        let confinement = Confinement::default();
        let ground = Ground { confinement: &confinement, vm_dir: dir.path() };
        for format in ["raw", "qcow2"] {
            let prepare = prepare(&path, format);
            make(id, &prepare, &ground).unwrap();
            make(id, &prepare, &ground).unwrap_err();
            assert!(!path.exists(), "not before it is noted");
            let made_again = make(id, &prepare, &ground).unwrap();
            settle(id, &made_again).unwrap();
            assert!(path.exists());
            assert!(remove(id, &prepare, &made_again));
            assert!(!path.exists());
            std::fs::write(&path, "somebody's").unwrap();
            assert!(remove(id, &prepare, &made_again));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "somebody's");
            let made = make(id, &prepare, &ground);
            if let Ok(made) = made {
                settle(id, &made).unwrap_err();
                assert!(remove(id, &prepare, &made));
            }
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "half an image is left");
            std::fs::remove_file(&path).unwrap();
        }
    }
}
