//! Files and folders of the daemon's own.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::disk::{Disk, DiskFile, KernelDisk};
pub use crate::without_links::{no_link, read};

/// Bits of a mode by which the group or others may write.
const WRITABLE: u32 = 0o022;

/// Why a folder cannot be the daemon's own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnDirError {
    /// It cannot be made or looked at.
    #[error("Could not use the {what} folder {path}")]
    Io {
        /// State, run or memory.
        what: &'static str,
        /// The folder.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Somebody else could replace what is in it.
    #[error(
        "Expected that the {what} folder {path} belongs to user {expected}, as whom vmoved runs; found user {found}. \
         If its content can be trusted: chown {expected} {path}"
    )]
    OtherOwner {
        /// State, run or memory.
        what: &'static str,
        /// The folder, or the symbolic link that leads to it.
        path: PathBuf,
        /// The daemon's user id.
        expected: u32,
        /// The owner's.
        found: u32,
    },
    /// Others may create and replace files in it.
    #[error(
        "Expected that only its owner may write in the {what} folder {path}; found mode {mode:04o}. \
         If its content can be trusted: chmod go-w {path}"
    )]
    Writable {
        /// State, run or memory.
        what: &'static str,
        /// The folder.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
}

/// Makes a folder of the daemon's own, or takes one that exists, if nobody but the daemon's user may write in it. Gives
/// its path without symbolic links: a link is followed here and not again. `what` says whose it is: state, run or memory.
///
/// # Errors
/// [`OwnDirError`].
pub fn own_dir(what: &'static str, path: &Path) -> Result<PathBuf, OwnDirError> {
    let io = |source| OwnDirError::Io { what, path: path.to_owned(), source };
    make_private_dir(path).map_err(io)?;
    let expected = rustix::process::geteuid().as_raw();
    let other_owner =
        |path: &Path, found| Err(OwnDirError::OtherOwner { what, path: path.to_owned(), expected, found });
    // Whoever owns a link may lead us elsewhere. Root may do so anyway.
    let link = std::fs::symlink_metadata(path).map_err(io)?;
    if link.is_symlink() && ![0, expected].contains(&link.uid()) {
        return other_owner(path, link.uid());
    }
    let resolved = path.canonicalize().map_err(io)?;
    let meta = std::fs::symlink_metadata(&resolved).map_err(io)?;
    if meta.uid() != expected {
        return other_owner(&resolved, meta.uid());
    }
    if meta.mode() & WRITABLE != 0 {
        return Err(OwnDirError::Writable { what, path: resolved, mode: meta.mode() & 0o7777 });
    }
    Ok(resolved)
}

/// Reads a JSON file of the daemon's own.
///
/// # Errors
/// The kernel's answer; `InvalidData`, with the words of the parser, if it holds something else.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    serde_json::from_slice(&read(path)?).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Reads each `*.json` of a folder: its path, and its content or why that cannot be read. A folder that is not there has none.
#[must_use]
pub fn read_all_json<T: DeserializeOwned>(dir: &Path) -> Vec<(PathBuf, io::Result<T>)> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let files = entries.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.map(|path| (path.clone(), read_json(&path))).collect()
}

/// Writes `value` as JSON beside `path` and renames it into place, so that a reader sees the old or the new, never a part. Nothing is
/// written through a symbolic link.
///
/// # Errors
/// The kernel's answer.
pub fn write_atomically<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    replace(&KernelDisk, path, value, |_| Ok(()))
}

/// As [`write_atomically`], and waits until the disk has it: the file survives a host that loses power.
///
/// # Errors
/// The kernel's answer.
pub fn write_durably<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    write_durably_on(&KernelDisk, path, value)
}

/// As [`write_durably`], on another disk than the kernel's.
///
/// # Errors
/// The kernel's answer.
pub fn write_durably_on<T: Serialize>(disk: &dyn Disk, path: &Path, value: &T) -> io::Result<()> {
    replace(disk, path, value, |file| file.sync())?;
    path.parent().map_or(Ok(()), |folder| disk.sync_dir(folder))
}

/// Writes `value` beside `path`, lets `finish` have that file, and renames it into place.
fn replace<T: Serialize>(
    disk: &dyn Disk,
    path: &Path,
    value: &T,
    finish: impl FnOnce(&dyn DiskFile) -> io::Result<()>,
) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(value).map_err(io::Error::other)?;
    let part = path.with_extension("part");
    let written = create_anew(disk, &part).and_then(|mut file| {
        file.write_all(&text)?;
        finish(&*file)
    });
    let replaced = written.and_then(|()| disk.rename(&part, path));
    if replaced.is_err() {
        // What there is of it takes room that is short.
        let _ = disk.remove_file(&part);
    }
    replaced
}

/// Creates a file for its owner alone; what a killed daemon left of one, or a link, is removed first.
fn create_anew(disk: &dyn Disk, path: &Path) -> io::Result<Box<dyn DiskFile>> {
    match disk.remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    disk.create(path)
}

/// What people are told of a file that cannot be written: what the kernel says, and since when it is tried again.
#[must_use]
pub fn cannot_write(path: &Path, error: &str, since: SystemTime) -> String {
    let since = humantime::format_rfc3339_seconds(since);
    format!("cannot write {}: {error}; trying again since {since}", path.display())
}

/// Makes a folder that only its owner may enter: it holds sockets that give control over guests. One that exists keeps
/// its mode.
///
/// # Errors
/// The kernel's answer.
pub fn make_private_dir(dir: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_folder_in_which_others_may_write_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("own");
        let resolved = own_dir("state", &own).unwrap();
        assert_eq!(std::fs::metadata(&own).unwrap().mode() & 0o777, 0o700);
        assert_eq!(own_dir("state", &own).unwrap(), resolved);
        for mode in [0o720, 0o702, 0o1777] {
            std::fs::set_permissions(&own, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = own_dir("state", &own).unwrap_err().to_string();
            let words = [
                format!("state folder {}", resolved.display()),
                format!("{mode:04o}"),
                "chmod go-w".to_owned(),
            ];
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        // Reading is not asked for.
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o755)).unwrap();
        own_dir("state", &own).unwrap();
    }

    #[test]
    fn a_link_is_followed_once_and_its_target_is_judged() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        std::fs::create_dir(&target).unwrap();
        symlink(&target, &link).unwrap();
        assert_eq!(own_dir("run", &link).unwrap(), target.canonicalize().unwrap());
        std::fs::set_permissions(&target, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(own_dir("run", &link), Err(OwnDirError::Writable { .. })));
    }

    #[test]
    fn a_folder_or_link_of_somebody_else_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (own, theirs, link) =
            (dir.path().join("own"), dir.path().join("theirs"), dir.path().join("link"));
        std::fs::create_dir(&own).unwrap();
        std::fs::create_dir(&theirs).unwrap();
        symlink(&own, &link).unwrap();
        vmove_skip::need!(std::os::unix::fs::chown(&theirs, Some(12345), None));
        std::os::unix::fs::lchown(&link, Some(12345), None).unwrap();
        for path in [&theirs, &link] {
            let error = own_dir("memory", path).unwrap_err().to_string();
            assert!(error.contains("found user 12345") && error.contains("chown 0 "), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_told_beside_what_can() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read_all_json::<u64>(&dir.path().join("none")).is_empty());
        for (name, text) in [("a.json", "1"), ("b.json", "{"), ("c.part", "3")] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let mut found = read_all_json::<u64>(dir.path());
        found.sort_by(|a, b| a.0.cmp(&b.0));
        let kinds: Vec<_> = found.iter().map(|(_, read)| read.as_ref().map_err(io::Error::kind)).collect();
        assert_eq!(kinds, [Ok(&1), Err(io::ErrorKind::InvalidData)]);
    }

    #[test]
    fn nothing_is_read_or_written_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, record) = (dir.path().join("victim"), dir.path().join("record.json"));
        std::fs::write(&victim, "1").unwrap();
        symlink(&victim, record.with_extension("part")).unwrap();
        write_atomically(&record, &2).unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"1");
        assert_eq!(read(&record).unwrap(), b"2");
        std::fs::remove_file(&record).unwrap();
        symlink(&victim, &record).unwrap();
        let error = read(&record).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::LOOP.raw_os_error()), "{error}");
    }
}
