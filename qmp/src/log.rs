//! The log of a QEMU's output, kept small: the guest may decide how much QEMU writes to it (`-serial stdio`, a device that complains
//! for each request), and would otherwise fill the host's disk.
//!
//! QEMU holds the log open for appending and outlives the daemon, so the log cannot be replaced, only cut: its last part is copied
//! beside it, and the log begins anew. Lines that QEMU writes between the two are lost.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// A log that is longer than this many bytes is cut by [`cut`].
pub const LIMIT: u64 = 16 << 20;
/// Bytes of the end of a log that is cut which stay, in [`previous`].
pub const KEPT: u64 = 1 << 20;
/// Bytes at the end of a log that an error message quotes at most.
const QUOTED: u64 = 4 << 10;

/// Where the last part of a log stays when the log is cut: `qemu.log.1` beside `qemu.log`.
#[must_use]
pub fn previous(log: &Path) -> PathBuf {
    let mut name = OsString::from(log);
    name.push(".1");
    name.into()
}

/// Opens a log that is not a symbolic link; one fails with `ELOOP`.
///
/// # Errors
/// The kernel's answer.
pub(crate) fn open(options: &mut OpenOptions, log: &Path) -> io::Result<File> {
    options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(log)
}

/// Cuts a log that is longer than [`LIMIT`]: the last [`KEPT`] bytes go to [`previous`], replacing those of an earlier cut, and the log
/// is emptied. Gives the bytes that were dropped, 0 for a short log. If there is no space for the copy, the log is emptied all the same,
/// since it is likely what took the space.
///
/// # Errors
/// The log cannot be opened or emptied.
pub fn cut(log: &Path) -> io::Result<u64> {
    let mut file = open(OpenOptions::new().read(true).write(true), log)?;
    let length = file.metadata()?.len();
    if length <= LIMIT {
        return Ok(0);
    }
    let kept = match keep_end(&mut file, length, &previous(log)) {
        Ok(kept) => kept,
        Err(error) => {
            tracing::warn!(log = %log.display(), %error, "could not keep the end of a log that grew too long");
            0
        }
    };
    file.set_len(0)?;
    Ok(length - kept)
}

fn keep_end(file: &mut File, length: u64, previous: &Path) -> io::Result<u64> {
    let part = previous.with_extension("part");
    file.seek(SeekFrom::Start(length.saturating_sub(KEPT)))?;
    let mut options = OpenOptions::new();
    // QEMU may have made something of that name in its folder, such as a pipe.
    match std::fs::remove_file(&part) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    options.write(true).create_new(true);
    let copied = open(&mut options, &part).and_then(|mut copy| io::copy(&mut file.take(KEPT), &mut copy));
    let copied = copied.and_then(|bytes| std::fs::rename(&part, previous).map(|()| bytes));
    copied.inspect_err(|_| {
        // Whatever part of it was written takes space.
        let _ = std::fs::remove_file(&part);
    })
}

/// The last lines of a log, a few KiB at most, also if it was cut a moment ago.
///
/// # Errors
/// The log cannot be read.
pub fn tail(log: &Path) -> io::Result<String> {
    let (end, whole) = end_of(log, QUOTED)?;
    let left = QUOTED - end.len() as u64;
    let (mut bytes, whole) = match whole.then(|| end_of(&previous(log), left)) {
        Some(Ok(before)) => before,
        _ => (Vec::new(), whole),
    };
    bytes.extend(end);
    let text = String::from_utf8_lossy(&bytes);
    // Do not begin in mid-line.
    let text = if whole { &text } else { text.split_once('\n').map_or(&*text, |(_, rest)| rest) };
    Ok(text.trim_end().to_owned())
}

/// The last `length` bytes of a file at most, and whether that is all of it.
fn end_of(path: &Path, length: u64) -> io::Result<(Vec<u8>, bool)> {
    let mut file = open(OpenOptions::new().read(true), path)?;
    let start = file.metadata()?.len().saturating_sub(length);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes)?;
    Ok((bytes, start == 0))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn log(folder: &Path) -> (PathBuf, File) {
        let path = folder.join("qemu.log");
        // As QEMU has it.
        let file = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        (path, file)
    }

    #[test]
    fn a_long_log_is_cut_and_its_end_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut file) = log(folder.path());
        file.write_all(&vec![b'x'; usize::try_from(LIMIT).unwrap()]).unwrap();
        assert_eq!(cut(&path).unwrap(), 0, "as long as it may be");
        file.write_all(b"\nlast words\n").unwrap();
        assert_eq!(cut(&path).unwrap(), LIMIT + 12 - KEPT);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        assert_eq!(std::fs::metadata(previous(&path)).unwrap().len(), KEPT);
        assert!(tail(&path).unwrap().ends_with("last words"));
        // Whoever holds it open goes on at its new beginning.
        file.write_all(b"after the cut\n").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"after the cut\n");
        assert!(tail(&path).unwrap().ends_with("last words\nafter the cut"));
    }

    #[test]
    fn the_tail_begins_with_a_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut file) = log(folder.path());
        for line in 0..1000 {
            writeln!(file, "line {line}").unwrap();
        }
        let tail = tail(&path).unwrap();
        assert!(tail.starts_with("line ") && tail.ends_with("line 999"), "{tail}");
        assert!(tail.len() as u64 <= QUOTED);
    }

    #[test]
    fn a_log_that_is_a_link_is_neither_cut_nor_read() {
        let dir = tempfile::tempdir().unwrap();
        let (log, victim) = (dir.path().join("qemu.log"), dir.path().join("victim"));
        File::create(&victim).unwrap().set_len(LIMIT + 1).unwrap();
        std::os::unix::fs::symlink(&victim, &log).unwrap();
        let too_many_links = rustix::io::Errno::LOOP.raw_os_error();
        assert_eq!(cut(&log).unwrap_err().raw_os_error(), Some(too_many_links));
        assert_eq!(tail(&log).unwrap_err().raw_os_error(), Some(too_many_links));
        assert_eq!(std::fs::metadata(&victim).unwrap().len(), LIMIT + 1);
        // Where the end of a log is kept: the link is replaced, not followed.
        std::fs::remove_file(&log).unwrap();
        File::create(&log).unwrap().set_len(LIMIT + 1).unwrap();
        std::os::unix::fs::symlink(&victim, previous(&log)).unwrap();
        cut(&log).unwrap();
        assert_eq!(std::fs::metadata(&victim).unwrap().len(), LIMIT + 1);
        assert!(!std::fs::symlink_metadata(previous(&log)).unwrap().is_symlink());
    }
}
