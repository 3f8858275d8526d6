//! Files and folders of the daemon's own.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::time::SystemTime;

use serde::Serialize;

/// Writes `value` as JSON beside `path` and renames it into place, so that a reader sees the old or the new, never a part.
///
/// # Errors
/// The kernel's answer.
pub fn write_atomically<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(value).map_err(io::Error::other)?;
    let part = path.with_extension("part");
    if let Err(error) = std::fs::write(&part, text) {
        // What there is of it takes room that is short.
        let _ = std::fs::remove_file(&part);
        return Err(error);
    }
    std::fs::rename(&part, path)
}

/// As [`write_atomically`], and waits until the disk has it: the file survives a host that loses power.
///
/// # Errors
/// The kernel's answer.
pub fn write_durably<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(value).map_err(io::Error::other)?;
    let part = path.with_extension("part");
    let written = File::create(&part).and_then(|mut file| {
        file.write_all(&text)?;
        file.sync_all()
    });
    if let Err(error) = written {
        // What there is of it takes room that is short.
        let _ = std::fs::remove_file(&part);
        return Err(error);
    }
    std::fs::rename(&part, path)?;
    sync_folder_of(path)
}

/// Waits until the disk knows which files are in the folder of `path`.
///
/// # Errors
/// The kernel's answer.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
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
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}
