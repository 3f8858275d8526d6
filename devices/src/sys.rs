//! Small files below a root, and the writes by which the kernel is asked for something.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::Cause;

/// Writes a text to a file that is there: the kernel acts upon it.
pub type Writer = dyn Fn(&Path, &str) -> io::Result<()> + Send + Sync;

/// The files of a node: `/`, or a recorded tree.
#[derive(Clone)]
pub struct Sys {
    root: PathBuf,
    writer: Arc<Writer>,
}

impl std::fmt::Debug for Sys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sys").field("root", &self.root).finish_non_exhaustive()
    }
}

impl Sys {
    /// The files below a root; `/` for this machine.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self::with_writer(root, Arc::new(|path: &Path, text: &str| write_once(path, text)))
    }

    /// The same, with something else that is done in place of a write: what a kernel would do.
    #[must_use]
    pub fn with_writer(root: &Path, writer: Arc<Writer>) -> Self {
        Self { root: root.to_owned(), writer }
    }

    /// Where a path of the node is.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Text of a file without white space around it; `None` if it is not there, cannot be read or is empty.
    pub(crate) fn read(&self, path: &str) -> Option<String> {
        let bytes = std::fs::read(self.path(path)).ok()?;
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// A hexadecimal number with `0x`.
    pub(crate) fn hex(&self, path: &str) -> Result<u32, Cause> {
        let failed = |source| Cause::File { path: self.path(path), source };
        let text = std::fs::read_to_string(self.path(path)).map_err(failed)?;
        let text = text.trim();
        let number = text.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
        number.ok_or_else(|| Cause::Strange {
            path: self.path(path),
            found: text.to_owned(),
            expected: "a number like 0x10de",
        })
    }

    /// A decimal number.
    pub(crate) fn number<T: std::str::FromStr>(&self, path: &str) -> Option<T> {
        self.read(path)?.parse().ok()
    }

    /// Names in a folder, sorted; none if it is not there.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The last part of where a symbolic link leads.
    pub(crate) fn link_name(&self, path: &str) -> Option<String> {
        let target = std::fs::read_link(self.path(path)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    /// User and group of a file; `None` if it is not there.
    pub(crate) fn owner(&self, path: &str) -> Option<(u32, u32)> {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(self.path(path)).ok().map(|meta| (meta.uid(), meta.gid()))
    }

    /// Gives a file to a user and a group.
    pub(crate) fn give(&self, path: &str, (user, group): (u32, u32)) -> Result<(), Cause> {
        let path = self.path(path);
        std::os::unix::fs::chown(&path, Some(user), Some(group))
            .map_err(|source| Cause::File { path, source })
    }

    /// Asks the kernel for something.
    pub(crate) fn write(&self, path: &str, text: &str) -> Result<(), Cause> {
        let path = self.path(path);
        (self.writer)(&path, text).map_err(|source| Cause::File { path, source })
    }
}

/// One `write(2)`: each is a request of its own to the kernel.
fn write_once(path: &Path, text: &str) -> io::Result<()> {
    std::fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}
