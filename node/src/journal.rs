//! The durable memory of a session: one line of JSON for each step, appended before the step is taken.
//!
//! One `write(2)` a line; no `fsync`, since what the lines protect (the guest's memory) does not outlive the kernel either. A line
//! cut short by a kill is ignored: the step it spoke of was not taken. A line cut short by a full or failing disk is cut off again,
//! before the next one would be appended to it.
//!
//! Most steps must not be taken without their line: [`Journal::update`]. A few are safe without, because whoever reads the older line
//! comes to the same end. They do not wait for space: [`Journal::update_owing`], and [`Journal::write_owed`] until it succeeds.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::disk::{Disk, DiskFile, KernelDisk};

/// An open journal.
#[derive(Debug)]
pub struct Journal<R, F = Box<dyn DiskFile>> {
    path: PathBuf,
    file: F,
    record: R,
    /// Bytes of whole lines.
    whole: u64,
    /// There may be a part of a line after them.
    torn: bool,
    /// What is after them may even be a whole line, whose step was not taken.
    unsure: bool,
    /// The record is newer than the last line.
    owed: bool,
}

impl<R: Serialize + DeserializeOwned + Clone> Journal<R> {
    /// Begins a journal with its first record. If that cannot be written, no file is left.
    ///
    /// # Errors
    /// The kernel's answer, for instance that there is one already.
    pub fn create(path: &Path, record: R) -> io::Result<Self> {
        Self::create_on(&KernelDisk, path, record)
    }

    /// As [`Journal::create`], on another disk than the kernel's.
    ///
    /// # Errors
    /// As [`Journal::create`].
    pub fn create_on(disk: &dyn Disk, path: &Path, record: R) -> io::Result<Self> {
        let mut journal = Self::on(path, disk.create(path)?, record, 0);
        if let Err(error) = journal.append() {
            let _ = disk.remove_file(path);
            return Err(error);
        }
        Ok(journal)
    }

    /// Opens a journal at its last whole line.
    ///
    /// # Errors
    /// The kernel's answer; `InvalidData` if no line can be read.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_on(&KernelDisk, path)
    }

    /// As [`Journal::open`], on another disk than the kernel's.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn open_on(disk: &dyn Disk, path: &Path) -> io::Result<Self> {
        Self::after(disk, path, last_record(disk, path)?.ok_or_else(|| no_record(path))?)
    }

    /// Goes on after what was read.
    fn after(disk: &dyn Disk, path: &Path, last: Last<R>) -> io::Result<Self> {
        let Last { record, whole, torn } = last;
        let mut file = disk.append(path)?;
        // A torn line must not run into the next one. Nothing else is cut: a line that came since this was read is somebody's step.
        if torn {
            file.cut(whole)?;
        }
        Ok(Self::on(path, file, record, whole))
    }

    /// As [`Journal::open`]; nothing if there is no file, or no whole line in it: then the first step was not taken.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn open_begun(path: &Path) -> io::Result<Option<Self>> {
        Self::open_begun_on(&KernelDisk, path)
    }

    /// As [`Journal::open_begun`], on another disk than the kernel's.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn open_begun_on(disk: &dyn Disk, path: &Path) -> io::Result<Option<Self>> {
        Ok(match Self::read_begun_on(disk, path)? {
            Some(_) => Some(Self::open_on(disk, path)?),
            None => None,
        })
    }

    /// The newest record of a journal that somebody else may be writing: unlike [`Journal::open`] it changes nothing.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn read(path: &Path) -> io::Result<R> {
        Self::read_on(&KernelDisk, path)
    }

    /// As [`Journal::read`], on another disk than the kernel's.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn read_on(disk: &dyn Disk, path: &Path) -> io::Result<R> {
        last_record(disk, path)?.map(|last| last.record).ok_or_else(|| no_record(path))
    }

    /// As [`Journal::read`]; nothing if there is no file, or no whole line in it: then the first step was not taken.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn read_begun(path: &Path) -> io::Result<Option<R>> {
        Self::read_begun_on(&KernelDisk, path)
    }

    /// As [`Journal::read_begun`], on another disk than the kernel's.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn read_begun_on(disk: &dyn Disk, path: &Path) -> io::Result<Option<R>> {
        match last_record(disk, path) {
            Ok(found) => Ok(found.map(|last| last.record)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens a journal at the newest line that can be read, for an operator who gives up the lines after it. The file as it was stays beside
    /// it, as `FILE.damaged`. Nothing if no line can be read: then that is all that is left.
    ///
    /// # Errors
    /// The kernel's answer; the journal is as it was.
    pub fn open_older(path: &Path) -> io::Result<Option<Self>> {
        Self::open_older_on(&KernelDisk, path)
    }

    /// As [`Journal::open_older`], on another disk than the kernel's.
    ///
    /// # Errors
    /// As [`Journal::open_older`].
    pub fn open_older_on(disk: &dyn Disk, path: &Path) -> io::Result<Option<Self>> {
        let bytes = disk.read(path)?;
        let mut damaged = path.as_os_str().to_owned();
        damaged.push(".damaged");
        let damaged = PathBuf::from(damaged);
        disk.rename(path, &damaged)?;
        let Some(whole) = readable::<R>(&bytes) else { return Ok(None) };
        let opened = disk.create(path);
        let written = opened
            .and_then(|mut file| file.write_all(&bytes[..whole]))
            .and_then(|()| Self::open_on(disk, path));
        // Renaming it back takes no room, and takes the place of what was written.
        written.map(Some).inspect_err(|_| drop(disk.rename(&damaged, path)))
    }

    /// The newest line that can be read, though newer ones cannot: it tells what the journal is about, and not where it stands.
    #[must_use]
    pub fn read_older(path: &Path) -> Option<R> {
        Self::read_older_on(&KernelDisk, path)
    }

    /// As [`Journal::read_older`], on another disk than the kernel's.
    #[must_use]
    pub fn read_older_on(disk: &dyn Disk, path: &Path) -> Option<R> {
        let bytes = disk.read(path).ok()?;
        bytes.split(|b| *b == b'\n').rev().find_map(|line| serde_json::from_slice(line).ok())
    }
}

impl<R: Serialize + DeserializeOwned + Clone, F: DiskFile> Journal<R, F> {
    fn on(path: &Path, file: F, record: R, whole: u64) -> Self {
        Self { path: path.to_owned(), file, record, whole, torn: false, unsure: false, owed: false }
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

    /// Changes the record for a step that is safe without its line. On an error the record is changed nevertheless, and the line is owed.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn update_owing(&mut self, change: impl FnOnce(&mut R)) -> io::Result<()> {
        change(&mut self.record);
        self.owed = true;
        self.append()
    }

    /// Waits until all lines are on the disk: for what outlives the kernel.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    /// Whether the record is newer than the last line.
    pub const fn is_owed(&self) -> bool {
        self.owed
    }

    /// Writes the line that is owed, if one is.
    ///
    /// # Errors
    /// The kernel's answer; it is still owed.
    pub fn write_owed(&mut self) -> io::Result<()> {
        if self.owed { self.append() } else { Ok(()) }
    }

    /// After an error: whether the file may hold the line all the same, so that a later process of the daemon would believe it.
    pub const fn is_unsure(&self) -> bool {
        self.unsure
    }

    /// Cuts off what an error has left after the last whole line.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn cut_back(&mut self) -> io::Result<()> {
        if self.torn {
            self.file.cut(self.whole)?;
            (self.torn, self.unsure) = (false, false);
        }
        Ok(())
    }

    fn append(&mut self) -> io::Result<()> {
        let mut line = serde_json::to_vec(&self.record).map_err(io::Error::other)?;
        line.push(b'\n');
        self.cut_back()?;
        if let Err(error) = self.file.write_all(&line) {
            self.torn = true;
            // Tried again before the next line, if this fails too.
            if self.cut_back().is_err() {
                let end = self.whole + line.len() as u64;
                self.unsure = self.file.bytes().map_or(true, |bytes| bytes >= end);
            }
            return Err(error);
        }
        self.whole += line.len() as u64;
        self.owed = false;
        Ok(())
    }
}

/// The length up to the end of the newest line that can be read, in bytes; nothing if there is none.
fn readable<R: DeserializeOwned>(bytes: &[u8]) -> Option<usize> {
    let mut end = bytes.iter().rposition(|b| *b == b'\n')? + 1;
    loop {
        let begin = bytes[..end - 1].iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        if serde_json::from_slice::<R>(&bytes[begin..end - 1]).is_ok() {
            return Some(end);
        }
        end = begin;
        if end == 0 {
            return None;
        }
    }
}

/// What a journal holds.
struct Last<R> {
    /// Of the last whole line.
    record: R,
    /// The length up to the end of that line, in bytes.
    whole: u64,
    /// A part of another line follows.
    torn: bool,
}

/// Nothing if there is no whole line.
fn last_record<R: DeserializeOwned>(disk: &dyn Disk, path: &Path) -> io::Result<Option<Last<R>>> {
    let bytes = disk.read(path)?;
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
    let Some(last) = bytes[..whole].split(|b| *b == b'\n').rfind(|line| !line.is_empty()) else {
        return Ok(None);
    };
    match serde_json::from_slice(last) {
        Ok(record) => Ok(Some(Last { record, whole: whole as u64, torn: whole < bytes.len() })),
        Err(_) => Err(no_record(path)),
    }
}

fn no_record(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} holds no readable record", path.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

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
    fn a_line_that_comes_while_a_journal_is_opened_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        let mut journal = Journal::create(&path, 1u64).unwrap();
        let last = last_record(&KernelDisk, &path).unwrap().unwrap();
        journal.update(|r| *r = 22).unwrap();
        drop(Journal::<u64>::after(&KernelDisk, &path, last).unwrap());
        assert_eq!(Journal::<u64>::read(&path).unwrap(), 22);
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

    /// A disk that takes so many bytes more, and may fail to cut.
    #[derive(Debug, Default)]
    struct FailingDisk {
        bytes: Vec<u8>,
        room: usize,
        error: Option<rustix::io::Errno>,
        cuts_fail: bool,
        /// It fails after it has taken everything.
        late: bool,
    }

    impl Write for FailingDisk {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            let takes = from.len().min(self.room);
            if self.late {
                self.bytes.extend_from_slice(from);
                return Err(rustix::io::Errno::IO.into());
            }
            if takes == 0 {
                return Err(self.error.expect("there is room").into());
            }
            self.bytes.extend_from_slice(&from[..takes]);
            self.room -= takes;
            Ok(takes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl DiskFile for FailingDisk {
        fn cut(&mut self, bytes: u64) -> io::Result<()> {
            if self.cuts_fail {
                return Err(rustix::io::Errno::IO.into());
            }
            self.bytes.truncate(usize::try_from(bytes).unwrap());
            Ok(())
        }

        fn bytes(&self) -> io::Result<u64> {
            Ok(self.bytes.len() as u64)
        }

        fn sync(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn on_failing_disk() -> Journal<u64, FailingDisk> {
        Journal::on(Path::new("j"), FailingDisk { room: 1 << 10, ..FailingDisk::default() }, 0, 0)
    }

    /// Whatever fails, at whichever byte, and whether it can be cut back at once: no part of a line stays before the next one.
    #[test]
    fn no_part_of_a_line_stays_whatever_fails() {
        for error in [rustix::io::Errno::NOSPC, rustix::io::Errno::IO, rustix::io::Errno::DQUOT] {
            for (room, cuts_fail) in (0..8).flat_map(|room| [(room, false), (room, true)]) {
                let mut journal = on_failing_disk();
                journal.update(|r| *r = 1).unwrap();
                journal.file.error = Some(error);
                (journal.file.room, journal.file.cuts_fail) = (room, cuts_fail);
                let found = journal.update(|r| *r = 1_234_567).unwrap_err();
                assert_eq!(found.raw_os_error(), Some(error.raw_os_error()));
                assert_eq!(
                    (*journal.record(), journal.is_unsure()),
                    (1, false),
                    "{error} after {room} bytes"
                );
                if cuts_fail && room > 0 {
                    journal.file.room = 1 << 10;
                    journal.update(|r| *r = 2).expect_err("it would run into the part of a line");
                }
                (journal.file.room, journal.file.cuts_fail) = (1 << 10, false);
                journal.update(|r| *r = 2).unwrap();
                assert_eq!(journal.file.bytes, b"1\n2\n", "{error} after {room} bytes");
            }
        }
    }

    #[test]
    fn a_line_that_may_be_there_all_the_same_is_told_and_cut() {
        let mut journal = on_failing_disk();
        journal.update(|r| *r = 1).unwrap();
        (journal.file.late, journal.file.cuts_fail) = (true, true);
        journal.update(|r| *r = 2).unwrap_err();
        assert!(journal.is_unsure(), "{:?}", journal.file);
        journal.cut_back().unwrap_err();
        assert!(journal.is_unsure());
        journal.file.cuts_fail = false;
        journal.cut_back().unwrap();
        assert!(!journal.is_unsure());
        assert_eq!(journal.file.bytes, b"1\n");
    }

    #[test]
    fn a_line_that_is_owed_is_written_when_there_is_room() {
        let mut journal = on_failing_disk();
        journal.update(|r| *r = 1).unwrap();
        (journal.file.room, journal.file.error) = (1, Some(rustix::io::Errno::NOSPC));
        journal.update_owing(|r| *r = 22).unwrap_err();
        assert_eq!((*journal.record(), journal.is_owed()), (22, true));
        journal.update(|r| *r = 333).unwrap_err();
        assert_eq!((*journal.record(), journal.is_owed()), (22, true), "what is owed is not forgotten");
        journal.write_owed().unwrap_err();
        journal.file.room = 1 << 10;
        journal.write_owed().unwrap();
        assert!(!journal.is_owed());
        journal.write_owed().unwrap();
        assert_eq!(journal.file.bytes, b"1\n22\n");
    }

    #[test]
    fn a_journal_that_cannot_be_begun_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let disk = vmove_skip::need!(SmallDisk::mount(dir.path(), 16 << 10));
        let path = disk.0.join("j");
        let error = Journal::create(&path, "x".repeat(20 << 10)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(!path.exists());
        Journal::create(&path, "x".to_owned()).unwrap();
    }

    #[test]
    fn a_journal_that_never_began_is_told_from_one_that_is_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        assert_eq!(Journal::<u64>::read_begun(&path).unwrap(), None, "there is none");
        for never in ["", "12"] {
            std::fs::write(&path, never).unwrap();
            assert_eq!(Journal::<u64>::read_begun(&path).unwrap(), None, "{never:?}");
            assert!(Journal::<u64>::open_begun(&path).unwrap().is_none());
        }
        std::fs::write(&path, "1\n22\n{damaged\n").unwrap();
        let error = Journal::<u64>::open_begun(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        assert_eq!(Journal::<u64>::read_older(&path), Some(22));
        std::fs::write(&path, "1\n22\n").unwrap();
        assert_eq!(*Journal::<u64>::open_begun(&path).unwrap().unwrap().record(), 22);
    }

    #[test]
    fn the_damaged_end_of_a_journal_can_be_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let (path, damaged) = (dir.path().join("j"), dir.path().join("j.damaged"));
        for (before, older) in [
            ("1\n22\n{damaged\n", Some("1\n22\n")),
            ("1\n{\n\n{\n4", Some("1\n")),
            ("{\n", None),
            ("4", None),
        ] {
            std::fs::write(&path, before).unwrap();
            let opened = Journal::<u64>::open_older(&path).unwrap();
            assert_eq!(opened.is_some(), older.is_some(), "{before:?}");
            assert_eq!(std::fs::read_to_string(&path).ok().as_deref(), older, "{before:?}");
            assert_eq!(std::fs::read_to_string(&damaged).unwrap(), before);
        }
    }

    #[test]
    fn a_journal_is_not_opened_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("j"), dir.path().join("victim"));
        std::fs::write(&victim, "1\n22").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        for opened in [Journal::<u64>::open(&path).map(drop), Journal::<u64>::read(&path).map(drop)] {
            assert_eq!(opened.unwrap_err().raw_os_error(), Some(rustix::io::Errno::LOOP.raw_os_error()));
        }
        assert_eq!(Journal::create(&path, 1u64).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&victim).unwrap(), b"1\n22");
    }
}
