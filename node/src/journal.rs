//! The durable memory of a session: one line of JSON for each step, appended before the step is taken.
//!
//! One `write(2)` a line; no `fsync`, since what the lines protect (the guest's memory) does not outlive the kernel either. A line
//! cut short by a kill is ignored: the step it spoke of was not taken. A line cut short by a full disk is cut off again, before the
//! next one would be appended to it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// An open journal.
#[derive(Debug)]
pub struct Journal<R> {
    path: PathBuf,
    file: File,
    record: R,
    /// Bytes of whole lines.
    whole: u64,
    /// There may be a part of a line after them.
    torn: bool,
}

impl<R: Serialize + DeserializeOwned + Clone> Journal<R> {
    /// Begins a journal with its first record.
    ///
    /// # Errors
    /// The kernel's answer, for instance that there is one already.
    pub fn create(path: &Path, record: R) -> io::Result<Self> {
        let file = OpenOptions::new().create_new(true).append(true).open(path)?;
        let mut journal = Self { path: path.to_owned(), file, record, whole: 0, torn: false };
        journal.append()?;
        Ok(journal)
    }

    /// Opens a journal at its last whole line.
    ///
    /// # Errors
    /// The kernel's answer; `InvalidData` if no line can be read.
    pub fn open(path: &Path) -> io::Result<Self> {
        let (record, whole) = last_record(path)?;
        let file = OpenOptions::new().append(true).open(path)?;
        // A torn line must not run into the next one.
        let whole = whole as u64;
        file.set_len(whole)?;
        Ok(Self { path: path.to_owned(), file, record, whole, torn: false })
    }

    /// The newest record of a journal that somebody else may be writing: unlike [`Journal::open`] it changes nothing.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn read(path: &Path) -> io::Result<R> {
        last_record(path).map(|(record, _)| record)
    }

    /// The newest record.
    pub const fn record(&self) -> &R {
        &self.record
    }

    /// Where the journal is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Changes the record and writes it down. On an error the record is as before and the step must not be taken.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn update(&mut self, change: impl FnOnce(&mut R)) -> io::Result<()> {
        let before = self.record.clone();
        change(&mut self.record);
        self.append().inspect_err(|_| self.record = before)
    }

    fn append(&mut self) -> io::Result<()> {
        let mut line = serde_json::to_vec(&self.record).map_err(io::Error::other)?;
        line.push(b'\n');
        if self.torn {
            self.file.set_len(self.whole)?;
            self.torn = false;
        }
        if let Err(error) = self.file.write_all(&line) {
            // Tried again before the next line, if this fails too.
            self.torn = self.file.set_len(self.whole).is_err();
            return Err(error);
        }
        self.whole += line.len() as u64;
        Ok(())
    }
}

/// The last whole line, and the length up to its end in bytes.
fn last_record<R: DeserializeOwned>(path: &Path) -> io::Result<(R, usize)> {
    let bytes = std::fs::read(path)?;
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
    let last = bytes[..whole].split(|b| *b == b'\n').rfind(|line| !line.is_empty());
    let record = last.and_then(|line| serde_json::from_slice(line).ok()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{} holds no readable record", path.display()))
    })?;
    Ok((record, whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_whole_line_wins_wherever_a_kill_cuts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        let mut journal = Journal::create(&path, 1u64).unwrap();
        journal.update(|r| *r = 22).unwrap();
        journal.update(|r| *r = 333).unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(whole, b"1\n22\n333\n");
        for (cut, want) in [(2, 1), (3, 1), (4, 1), (5, 22), (7, 22), (9, 333)] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(Journal::<u64>::read(&path).unwrap(), want, "cut at {cut}");
            assert_eq!(std::fs::read(&path).unwrap(), whole[..cut], "whoever only reads must not cut");
            let mut journal = Journal::<u64>::open(&path).unwrap();
            assert_eq!(*journal.record(), want, "cut at {cut}");
            journal.update(|r| *r = 4444).unwrap();
            assert_eq!(*Journal::<u64>::open(&path).unwrap().record(), 4444, "after a cut at {cut}");
        }
    }

    #[test]
    fn a_full_disk_leaves_no_part_of_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let disk = vmove_skip::need!(SmallDisk::mount(dir.path(), 16 << 10));
        let path = disk.0.join("j");
        let mut journal = Journal::create(&path, "first".to_owned()).unwrap();
        // Most of it fits.
        let error = journal.update(|r| *r = "x".repeat(20 << 10)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(journal.record(), "first");
        journal.update(|r| *r = "second".to_owned()).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "\"first\"\n\"second\"\n");
        assert_eq!(Journal::<String>::read(&path).unwrap(), "second");
    }

    /// A tmpfs of so many bytes.
    struct SmallDisk(PathBuf);

    impl SmallDisk {
        fn mount(dir: &Path, bytes: u64) -> io::Result<Self> {
            let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
            rustix::mount::mount(
                "tmpfs",
                dir,
                "tmpfs",
                rustix::mount::MountFlags::empty(),
                Some(options.as_c_str()),
            )?;
            Ok(Self(dir.to_owned()))
        }
    }

    impl Drop for SmallDisk {
        fn drop(&mut self) {
            rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
        }
    }

    #[test]
    fn a_journal_without_a_line_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        std::fs::write(&path, b"{torn").unwrap();
        let error = Journal::<u64>::open(&path).unwrap_err();
        assert!(error.to_string().contains("no readable record"), "{error}");
    }

    #[test]
    fn a_session_is_not_begun_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        drop(Journal::create(&path, 1u64).unwrap());
        let error = Journal::create(&path, 1u64).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    }
}
