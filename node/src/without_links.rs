//! Files of the daemon's own are opened without following a symbolic link.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Adds to `options` that the last part of a path must not be a symbolic link: opening one fails with `ELOOP`.
pub fn no_link(options: &mut OpenOptions) -> &mut OpenOptions {
    options.custom_flags(OFlags::NOFOLLOW.bits() as i32)
}

/// Reads a file of the daemon's own, which is not a symbolic link.
///
/// # Errors
/// The kernel's answer; `ELOOP` for a link.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    no_link(OpenOptions::new().read(true)).open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}
