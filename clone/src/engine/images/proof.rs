//! Whether another host sees the same file under the same path, and not a copy of its own.
//!
//! The parent's node gives each file a second name beside it that nobody can guess, a hard link. A host for which both names are the
//! same file has that very file: the link was made of no other. Sizes, times or numbers of inodes would not prove it, nor would a new
//! file in the same folder, since the image may be a mount or a link of its own. The number of the inode is compared nevertheless: where
//! folders are mirrored, the link might be, too. Where no link can be made, nothing is proved, and the image is served.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::disk::{Disk, Layers};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use vmove_node::files::{read_all_json, write_atomically};
use vmove_qmp::CommandLine;

use super::ServedImages;
use crate::engine::error::ImageError;
use crate::engine::message::{Order, OrderDisk, Reached, Sight, Sights};
use crate::engine::options::ForkPolicy;
use vmove_types::problem::chain;

/// Second names of images, removed when this is dropped; by the next life of the daemon, if this one does not come to that.
#[derive(Debug, Default)]
pub struct Proofs {
    links: Vec<PathBuf>,
    note: PathBuf,
}

impl Drop for Proofs {
    fn drop(&mut self) {
        remove_all(&self.links);
        let _ = fs::remove_file(&self.note);
    }
}

/// Second names on disk.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    links: Vec<PathBuf>,
}

/// Gives each file of these disks a second name. Blocks.
pub fn prove(served: &ServedImages, images: Vec<(Disk, Layers)>) -> (Vec<OrderDisk>, Proofs) {
    let unique = || uuid::Uuid::new_v4().simple().to_string();
    let sights: Vec<(Disk, Result<Vec<Sight>, ImageError>)> = images
        .into_iter()
        .map(|(disk, layers)| {
            let sights = match layers.other {
                Some(below) => Err(ImageError::NotOfFiles { image: disk.file.clone(), below }),
                None => layers.files.iter().map(|file| sight(file, &unique())).collect(),
            };
            (disk, sights)
        })
        .collect();
    let all = sights.iter().filter_map(|(_, sights)| sights.as_ref().ok()).flatten();
    let links: Vec<PathBuf> = all.map(|sight| sight.link.clone()).collect();
    let proofs = Proofs { note: served.dir.join(format!("links-{}.json", unique())), links };
    let noted = fs::create_dir_all(&served.dir)
        .and_then(|()| write_atomically(&proofs.note, &Note { links: proofs.links.clone() }))
        .map_err(|error| error.to_string());
    let linked = |sights: &[Sight]| sights.iter().try_for_each(link).map_err(|error| chain(&error));
    let made = |(disk, sights): (Disk, Result<Vec<Sight>, ImageError>)| {
        let layers = match sights {
            Err(error) => Sights::None(chain(&error)),
            Ok(sights) => match noted.clone().and_then(|()| linked(&sights)) {
                Ok(()) => Sights::Of(sights),
                Err(why) => Sights::None(why),
            },
        };
        OrderDisk { disk, layers }
    };
    (sights.into_iter().map(made).collect(), proofs)
}

fn sight(file: &Path, unique: &str) -> Result<Sight, ImageError> {
    // Beside the file itself, should its name be a symlink.
    let real = file.canonicalize().map_err(ImageError::io("looked at", file))?;
    let inode = fs::metadata(&real).map_err(ImageError::io("looked at", file))?.ino();
    let link = real.with_file_name(format!(".vmove-{unique}"));
    Ok(Sight { path: file.to_owned(), link, inode })
}

fn link(sight: &Sight) -> Result<(), ImageError> {
    let made = sight.path.canonicalize().and_then(|real| fs::hard_link(real, &sight.link));
    made.map_err(ImageError::io("given a second name beside it", &sight.path))
}

fn remove_all(links: &[PathBuf]) {
    for link in links {
        match fs::remove_file(link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %link.display(), %error, "a second name of an image is left");
            }
            _ => {}
        }
    }
}

impl ServedImages {
    /// How the children of an order would get at their images, or why they cannot. Blocks.
    pub fn reach(&self, policy: &ForkPolicy, order: &Order) -> Result<Reached, ImageError> {
        let folder = policy.overlay_dir.as_deref();
        let beside = |ordered: &OrderDisk| {
            takes_overlays(
                folder.or_else(|| ordered.disk.file.parent()).unwrap_or(&self.dir),
                ordered.disk.direct,
            )
        };
        let shared = same_files(&order.disks).and_then(|()| order.disks.iter().try_for_each(beside));
        let Err(not_shared) = shared else {
            return Ok(Reached { shared: true, why: "the images are the same files there".to_owned() });
        };
        let why = chain(&not_shared);
        let served = match &order.no_export {
            Some(no_export) => Err(ImageError::NotServed(no_export.clone())),
            None => connects_again(&order.kind.command_line),
        };
        if let Err(not_served) = served {
            let (not_shared, not_served) = (Box::new(not_shared), Box::new(not_served));
            return Err(ImageError::Neither { not_shared, not_served });
        }
        self.able()?;
        let direct = order.disks.iter().any(|ordered| ordered.disk.direct);
        fs::create_dir_all(&self.dir).map_err(ImageError::io("made", &self.dir))?;
        takes_overlays(folder.unwrap_or(&self.dir), direct)?;
        Ok(Reached { shared: false, why })
    }

    /// Removes second names that an earlier life left. Blocks.
    pub(super) fn remove_links(&self) {
        for (path, note) in read_all_json::<Note>(&self.dir) {
            match note {
                Ok(note) => remove_all(&note.links),
                Err(error) => {
                    tracing::error!(path = %path.display(), %error, "second names of a guest's images may be left: the note of them cannot be read");
                }
            }
            let _ = fs::remove_file(path);
        }
    }
}

/// Whether a QEMU can connect anew to sockets in the state folder, which only root may enter, or why not. At its start it could: it
/// would lose its disks when the daemon is started again.
fn connects_again(command_line: &[String]) -> Result<(), ImageError> {
    let line = CommandLine::parse(command_line.iter().map(Into::into).collect());
    match line.and_then(|line| line.gives_up_root())? {
        None => Ok(()),
        Some(option) => Err(ImageError::NotRoot(option)),
    }
}

/// Whether the files of these disks are the same here, or why not. Blocks.
fn same_files(disks: &[OrderDisk]) -> Result<(), ImageError> {
    for disk in disks {
        match &disk.layers {
            Sights::Of(sights) => sights.iter().try_for_each(same)?,
            Sights::None(why) => return Err(ImageError::NotProved(why.clone())),
        }
    }
    Ok(())
}

fn same(sight: &Sight) -> Result<(), ImageError> {
    let path = || sight.path.clone();
    let here = fs::metadata(&sight.path).map_err(|source| ImageError::NotSeen { path: path(), source })?;
    let link = fs::symlink_metadata(&sight.link).map_err(|source| ImageError::NotKnown {
        path: path(),
        link: sight.link.clone(),
        source,
    })?;
    let is_it = (here.dev(), here.ino()) == (link.dev(), link.ino()) && here.ino() == sight.inode;
    if here.is_file() && is_it {
        return Ok(());
    }
    Err(ImageError::OtherFile(path()))
}

/// Whether overlays can be made in `folder`, without the page cache if `direct`, or why not. Blocks.
fn takes_overlays(folder: &Path, direct: bool) -> Result<(), ImageError> {
    let path = folder.join(format!(".vmove-{}", uuid::Uuid::new_v4().simple()));
    let flags = if direct { OFlags::DIRECT } else { OFlags::empty() };
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    let made = File::options().write(true).create_new(true).custom_flags(flags).open(&path);
    let _ = fs::remove_file(&path);
    made.map(drop).map_err(|source| ImageError::NoOverlays { folder: folder.to_owned(), direct, source })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vmove_qmp::confine::Confinement;

    use super::*;

    fn disk(file: &Path) -> (Disk, Layers) {
        let disk = Disk {
            device: "d".to_owned(),
            node: "n".to_owned(),
            image: file.display().to_string(),
            file: file.to_owned(),
            format: "raw".to_owned(),
            size: 4,
            direct: false,
        };
        (disk, Layers { files: vec![file.to_owned()], other: None })
    }

    #[test]
    fn only_the_very_file_is_taken_for_the_image() {
        let dir = tempfile::tempdir().unwrap();
        let disks =
            ServedImages::new(&dir.path().join("state"), Duration::from_secs(1), Confinement::default());
        let (image, other) = (dir.path().join("images/disk"), dir.path().join("other"));
        fs::create_dir(dir.path().join("images")).unwrap();
        fs::write(&image, "bits").unwrap();
        let (order, proofs) = prove(&disks, vec![disk(&image)]);
        same_files(&order).unwrap();
        // A copy under the same path, as large, in the same folder.
        fs::rename(&image, &other).unwrap();
        fs::write(&image, "bits").unwrap();
        let why = same_files(&order).unwrap_err().to_string();
        assert!(why.contains("another file"), "{why}");
        fs::remove_file(&image).unwrap();
        assert!(same_files(&order).unwrap_err().to_string().contains("not seen"));
        fs::rename(&other, &image).unwrap();
        same_files(&order).unwrap();
        drop(proofs);
        assert!(same_files(&order).unwrap_err().to_string().contains("not known"));
        assert_eq!(fs::read_dir(dir.path().join("images")).unwrap().count(), 1);
        assert_eq!(fs::read_dir(&disks.dir).unwrap().count(), 0);
    }

    #[test]
    fn a_qemu_that_could_not_connect_again_is_refused() {
        let said = |words: &[&str]| {
            connects_again(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<String>>())
        };
        said(&["qemu-system-x86_64", "-run-with", "async-teardown=on"]).unwrap();
        let why =
            said(&["qemu-system-x86_64", "-m", "1G", "-run-with", "user=nobody"]).unwrap_err().to_string();
        assert!(why.contains("-run-with user=nobody") && why.contains("same path"), "{why}");
    }

    #[test]
    fn second_names_do_not_outlive_the_next_life() {
        let dir = tempfile::tempdir().unwrap();
        let disks =
            ServedImages::new(&dir.path().join("state"), Duration::from_secs(1), Confinement::default());
        let (image, alias) = (dir.path().join("disk"), dir.path().join("alias"));
        fs::write(&image, "bits").unwrap();
        std::os::unix::fs::symlink(&image, &alias).unwrap();
        let (order, proofs) = prove(&disks, vec![disk(&alias)]);
        same_files(&order).unwrap();
        std::mem::forget(proofs);
        assert_eq!(fs::metadata(&image).unwrap().nlink(), 2);
        disks.remove_links();
        assert_eq!(fs::metadata(&image).unwrap().nlink(), 1);
        // What is no file of a path is not seen elsewhere.
        let (disk, layers) = disk(&image);
        let (order, _proofs) =
            prove(&disks, vec![(disk, Layers { other: Some("nbd:h:1".to_owned()), ..layers })]);
        assert!(same_files(&order).unwrap_err().to_string().contains("nbd:h:1"));
    }
}
