//! Finds and reads the guest's beacon in its RAM file.
//!
//! Only `pread` is used: reading a hole through a mapping would allocate the page, so the test would change the memory that it
//! measures.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use vmove_guest::beacon::{Beacon, Phase, magic_word};
use vmove_guest::pattern::PAGE_BYTES;

/// Bytes per read while searching.
const CHUNK: usize = 4 << 20;

/// The position of a beacon in one RAM file.
#[derive(Debug)]
pub struct BeaconPage {
    file: File,
    offset: u64,
}

impl BeaconPage {
    /// The page at `offset` of `file`, which may hold a beacon now or later. In the RAM file at the destination, the guest's beacon
    /// has the same offset as at the source.
    #[must_use]
    pub const fn at(file: File, offset: u64) -> Self {
        Self { file, offset }
    }

    /// Bytes from the start of the file.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether the file still has a name. A deleted RAM file keeps its memory as long as somebody has it open.
    #[must_use]
    pub fn has_name(&self) -> bool {
        self.file.metadata().is_ok_and(|meta| std::os::unix::fs::MetadataExt::nlink(&meta) > 0)
    }

    /// The beacon's current content; `None` if the page holds no beacon (not yet, or no longer).
    #[must_use]
    pub fn read(&self) -> Option<Beacon> {
        let mut page = [0; PAGE_BYTES];
        self.file.read_exact_at(&mut page, self.offset).ok()?;
        Beacon::decode(&page)
    }

    /// A word of the page, by its number.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn word(&self, number: usize) -> Result<u64> {
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, self.offset + number as u64 * 8)?;
        Ok(u64::from_le_bytes(word))
    }
}

/// Finds the beacon in `files`. If the guest's kernel moved the page, it may have left a copy behind; so among several beacons,
/// the one that changes is chosen.
///
/// # Errors
/// When a file cannot be read, or none has a beacon.
pub fn find(files: &[PathBuf]) -> Result<(PathBuf, BeaconPage)> {
    let mut found = Vec::new();
    for path in files {
        let file = File::open(path).with_context(|| format!("could not open {}", path.display()))?;
        for offset in candidates(&file).with_context(|| format!("could not search {}", path.display()))? {
            found.push((path.clone(), BeaconPage { file: file.try_clone()?, offset }));
        }
    }
    if found.len() > 1 {
        let before: Vec<_> = found.iter().map(|(_, page)| page.read()).collect();
        std::thread::sleep(Duration::from_millis(50));
        let mut alive = before.into_iter().map(|before| move |page: &BeaconPage| page.read() != before);
        found.retain(|(_, page)| alive.next().is_some_and(|is_alive| is_alive(page)));
    }
    if found.is_empty() {
        bail!("no beacon in {files:?}");
    }
    Ok(found.swap_remove(0))
}

/// Waits until a guest is in its running phase. `files` names its RAM files and is called repeatedly, because they may not exist yet.
///
/// # Errors
/// The guest is not in that phase within `timeout`.
pub fn wait_running(
    mut files: impl FnMut() -> Vec<PathBuf>,
    timeout: Duration,
) -> Result<(PathBuf, BeaconPage)> {
    let deadline = Instant::now() + timeout;
    let mut page = None;
    let mut state = "the guest's program has not started".to_owned();
    loop {
        let began = Instant::now();
        if page.is_none() {
            page = find(&files()).ok();
        }
        if let Some((path, found)) = page.take() {
            match found.read() {
                Some(beacon) if beacon.phase == Phase::Running => return Ok((path, found)),
                Some(beacon) => {
                    state = format!("the guest is still filling its memory: {} pages so far", beacon.filled);
                    page = Some((path, found));
                }
                // The guest's kernel has moved the page: search again.
                None => {}
            }
        }
        if Instant::now() > deadline {
            bail!("{state} after {timeout:?}");
        }
        // Searching must not take more than a third of a core from the guest that is booting.
        std::thread::sleep((began.elapsed() * 2).max(Duration::from_millis(20)));
    }
}

/// Regular files below `folder` of at least 16 MiB: the RAM files of a daemon's memory directory.
#[must_use]
pub fn ram_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        for entry in entries.flatten() {
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => folders.push(entry.path()),
                Ok(meta) if meta.is_file() && meta.len() >= 16 << 20 => found.push(entry.path()),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

/// Offsets of complete beacons in a file. Holes are skipped.
fn candidates(file: &File) -> std::io::Result<Vec<u64>> {
    let length = file.metadata()?.len();
    let magic = magic_word(0).to_le_bytes();
    let mut chunk = vec![0; CHUNK];
    let mut found = Vec::new();
    for (start, end) in data_ranges(file, length) {
        let mut at = start;
        while at < end {
            let wanted = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            file.read_exact_at(&mut chunk[..wanted], at)?;
            for (number, page) in chunk[..wanted].chunks(PAGE_BYTES).enumerate() {
                if page.starts_with(&magic) && Beacon::decode(page).is_some() {
                    found.push(at + (number * PAGE_BYTES) as u64);
                }
            }
            at += wanted as u64;
        }
    }
    Ok(found)
}

/// Ranges of a file that are not holes, extended to whole pages; the whole file if the file system does not report holes.
pub(crate) fn data_ranges(file: &File, length: u64) -> Vec<(u64, u64)> {
    let page = PAGE_BYTES as u64;
    let seek = |at: u64, whence| -> Result<u64, Errno> {
        let at = lseek(file.as_fd(), i64::try_from(at).unwrap_or(i64::MAX), whence)?;
        Ok(at.unsigned_abs())
    };
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < length {
        let start = match seek(at, Whence::SeekData) {
            Ok(start) => start / page * page,
            Err(Errno::ENXIO) => break,
            Err(_) => return vec![(0, length)],
        };
        let end = seek(start, Whence::SeekHole).unwrap_or(length).next_multiple_of(page).min(length);
        ranges.push((start, end));
        at = end.max(start + page);
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmove_guest::beacon::fixed_words;
    use vmove_guest::config::Config;

    fn write_beacon(file: &File, offset: u64, boot: u64) {
        for (at, word) in fixed_words(&Config::default(), boot) {
            file.write_all_at(&word.to_le_bytes(), offset + at as u64 * 8).expect("writes");
        }
    }

    #[test]
    fn a_beacon_is_found_and_no_hole_is_filled() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
        let path = folder.path().join("ram");
        let file = File::create_new(&path).expect("creates");
        file.set_len(64 << 20).expect("sets the length");
        find(std::slice::from_ref(&path)).expect_err("nothing is there");
        write_beacon(&file, 33 << 20, 7);
        // The magic alone is not enough.
        file.write_all_at(&magic_word(0).to_le_bytes(), 40 << 20).expect("writes");
        let blocks = || std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("stats"));
        let before = blocks();
        let (_, page) = find(&[path]).expect("a beacon");
        assert_eq!(page.offset(), 33 << 20);
        assert_eq!(page.read().expect("a beacon").boot, 7);
        let absent = BeaconPage::at(File::open(folder.path().join("ram")).expect("opens"), 12 << 20);
        assert_eq!(absent.read(), None);
        assert_eq!(blocks(), before, "reading allocated pages");
    }

    #[test]
    fn of_two_beacons_the_living_one_is_taken() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
        let path = folder.path().join("ram");
        let file = File::create_new(&path).expect("creates");
        file.set_len(32 << 20).expect("sets the length");
        write_beacon(&file, 1 << 20, 7);
        write_beacon(&file, 2 << 20, 7);
        let writer = {
            let file = file.try_clone().expect("clones");
            std::thread::spawn(move || {
                for tick in 0..400_u64 {
                    let uptime = vmove_guest::beacon::place::UPTIME_MS as u64 * 8;
                    file.write_all_at(&tick.to_le_bytes(), (2 << 20) + uptime).expect("writes");
                    std::thread::sleep(Duration::from_millis(1));
                }
            })
        };
        let (_, page) = find(&[path]).expect("a beacon");
        assert_eq!(page.offset(), 2 << 20);
        writer.join().expect("joins");
    }
}
