//! The disk below the daemon's own files, as journals and records use it.
//!
//! [`KernelDisk`] is the one there is. Whoever wants to see what becomes of journals and records when a disk is full or fails, or when the
//! daemon dies between two writes, puts another below them (`tests/sim`).

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::SystemTime;

use crate::without_links::{self, no_link};

/// An open file that is being written.
pub trait DiskFile: Write + Send + Sync + fmt::Debug {
    /// Cuts it to so many bytes.
    ///
    /// # Errors
    /// The kernel's answer.
    fn cut(&mut self, bytes: u64) -> io::Result<()>;

    /// Its length in bytes.
    ///
    /// # Errors
    /// The kernel's answer.
    fn bytes(&self) -> io::Result<u64>;

    /// Waits until the disk has what was written.
    ///
    /// # Errors
    /// The kernel's answer.
    fn sync(&self) -> io::Result<()>;
}

/// What a folder holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Name within the folder.
    pub name: String,
    /// When it was last changed, if that can be told.
    pub modified: Option<SystemTime>,
}

/// Files and folders, by path. No call follows a symbolic link in the last part of a path.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Creates a file that is not there yet, for writing, which its owner alone may read.
    ///
    /// # Errors
    /// The kernel's answer, for instance that there is one.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;

    /// Opens a file for writing at its end.
    ///
    /// # Errors
    /// The kernel's answer.
    fn append(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;

    /// All bytes of a file.
    ///
    /// # Errors
    /// The kernel's answer.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// Gives a file another name, in place of what had that name.
    ///
    /// # Errors
    /// The kernel's answer.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// The kernel's answer, for instance that there is none.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Makes a folder, and those above it. One that exists is fine.
    ///
    /// # Errors
    /// The kernel's answer.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;

    /// Removes a folder with all that is in it.
    ///
    /// # Errors
    /// The kernel's answer.
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;

    /// What is in a folder, in no order.
    ///
    /// # Errors
    /// The kernel's answer.
    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>>;

    /// Whether there is something by that name.
    fn exists(&self, path: &Path) -> bool;

    /// Waits until the disk knows which files are in a folder.
    ///
    /// # Errors
    /// The kernel's answer.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// The kernel's.
#[derive(Debug, Clone, Copy, Default)]
pub struct KernelDisk;

/// Removes files. False if one of them is still there; the log says why.
pub fn remove_files(disk: &dyn Disk, paths: impl IntoIterator<Item = impl AsRef<Path>>) -> bool {
    let mut removed = true;
    for path in paths {
        match disk.remove_file(path.as_ref()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.as_ref().display(), %error, "could not remove");
                removed = false;
            }
            _ => {}
        }
    }
    removed
}

impl DiskFile for File {
    fn cut(&mut self, bytes: u64) -> io::Result<()> {
        self.set_len(bytes)
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

impl DiskFile for Box<dyn DiskFile> {
    fn cut(&mut self, bytes: u64) -> io::Result<()> {
        (**self).cut(bytes)
    }

    fn bytes(&self) -> io::Result<u64> {
        (**self).bytes()
    }

    fn sync(&self) -> io::Result<()> {
        (**self).sync()
    }
}

impl Disk for KernelDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(OpenOptions::new().create_new(true).append(true).mode(0o600).open(path)?))
    }

    fn append(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(no_link(OpenOptions::new().append(true)).open(path)?))
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        without_links::read(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir_all(path)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir_all(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let modified = entry.metadata().and_then(|meta| meta.modified()).ok();
            found.push(DirEntry { name, modified });
        }
        Ok(found)
    }

    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}
