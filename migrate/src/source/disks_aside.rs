//! The source's images of disks that have moved: nobody may take them for the guest's.

use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use vmove_types::disk::{DiskReport, DiskVerified, SourceDisks};

use super::session::Session;
use crate::destination::images::Folder;
use crate::records::LeftImage;

/// Puts the images aside, or deletes them. QEMU here has ended. What does not work is told in the report: the guest runs elsewhere, and does not
/// wait for it. Done again after a restart, this finds what is left to do.
pub(super) fn put_aside(session: &mut Session) {
    let record = session.journal.record();
    let (id, what, verify) = (record.id.to_string(), record.spec.source_disks, record.spec.verify);
    for image in record.disks.clone() {
        let known = session.report.disks.iter().find(|disk| disk.name == image.name);
        let doubted = verify && !known.is_some_and(is_right);
        // One that was made for this VM alone would be left for ever, over images that may not be served any more.
        let own = session.vm().overlays.contains(&image.path);
        let what = match (doubted, own) {
            // It may be the only sound one.
            (true, _) => SourceDisks::Keep,
            (false, true) => SourceDisks::Delete,
            (false, false) => what,
        };
        let done = see_to(&image, what, &id);
        if let Err(error) = &done {
            tracing::warn!(path = %image.path.display(), %error, "the image of a disk that has moved stays as it is");
        }
        let known = session.report.disks.iter_mut().find(|disk| disk.name == image.name);
        if let Some(disk) = known {
            note(disk, &image.path, done);
        }
    }
}

/// Whether `--verify` has found that the destination has the same.
fn is_right(disk: &DiskReport) -> bool {
    disk.verified.as_ref().and_then(DiskVerified::is_right) == Some(true)
}

fn note(disk: &mut DiskReport, path: &Path, done: std::io::Result<Option<PathBuf>>) {
    match done {
        Ok(left_at) => disk.left_at = left_at.map(|path| path.to_string_lossy().into_owned()),
        Err(error) => {
            disk.left_at = Some(path.to_string_lossy().into_owned());
            disk.problem = Some(format!("It could not be put aside: {error}"));
        }
    }
}

/// The name of an image that was put aside.
fn aside(path: &Path, id: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".moved-{id}"));
    path.with_file_name(name)
}

/// Where the image is now, if it is anywhere.
pub(crate) fn see_to(image: &LeftImage, what: SourceDisks, id: &str) -> std::io::Result<Option<PathBuf>> {
    // A device has no other name, and what it holds is not ours to wipe.
    let Some(file) = image.file else { return Ok(Some(image.path.clone())) };
    let aside = aside(&image.path, id);
    // Whoever may write in the folders above must not lead us elsewhere in between.
    let folder = match Folder::of(&image.path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        folder => folder?,
    };
    let (here, moved) = (folder.file(&image.path), folder.file(&aside));
    if !file.is_at(&here) {
        // By an earlier process of this daemon; or somebody else has.
        return Ok(file.is_at(&moved).then_some(aside));
    }
    match what {
        SourceDisks::Keep => {
            renameat_with(CWD, &here, CWD, &moved, RenameFlags::NOREPLACE)?;
            Ok(Some(aside))
        }
        SourceDisks::Delete => std::fs::remove_file(&here).map(|()| None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::FileId;

    #[test]
    fn only_the_file_that_was_noted_is_touched_and_only_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        std::fs::write(&path, "old").unwrap();
        let image = LeftImage { name: "a".to_owned(), path: path.clone(), file: FileId::at(&path).unwrap() };
        let kept = see_to(&image, SourceDisks::Keep, "id").unwrap();
        assert_eq!(kept, Some(dir.path().join("disk.img.moved-id")));
        assert_eq!(see_to(&image, SourceDisks::Keep, "id").unwrap(), kept, "done again");
        std::fs::write(&path, "another").unwrap();
        assert_eq!(see_to(&image, SourceDisks::Delete, "other").unwrap(), None);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "another");
        let image = LeftImage { file: FileId::at(&path).unwrap(), ..image };
        assert_eq!(see_to(&image, SourceDisks::Delete, "other").unwrap(), None);
        assert!(!path.exists());
    }
}
