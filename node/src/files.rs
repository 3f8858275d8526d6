//! Files and folders of the daemon's own.

use std::io;
use std::path::Path;

use serde::Serialize;

/// Writes `value` as JSON beside `path` and renames it into place, so that a reader sees the old or the new, never a part.
///
/// # Errors
/// The kernel's answer.
pub fn write_atomically<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(value).map_err(io::Error::other)?;
    let part = path.with_extension("part");
    std::fs::write(&part, text)?;
    std::fs::rename(&part, path)
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
