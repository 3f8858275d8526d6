//! Templates on disk: sparse, checksummed, verified when they are loaded.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use vmove_memory::{ByteLen, FileOffset, MemoryDir, RamFile};
use vmove_node::files::write_atomically;
use vmove_node::layout::memory_dir;
use xxhash_rust::xxh3::Xxh3;

use super::{MANIFEST, Manifest, STATE, Template, folders, read_manifest, read_state, remove_dir};
use crate::CloneError;

/// Bytes read, looked at and written at once.
const PART: usize = 1 << 20;

/// A template on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// Its folder.
    pub dir: PathBuf,
    /// What it is.
    pub manifest: Manifest,
    /// Bytes on disk.
    pub bytes: u64,
}

/// Tells of each part of a RAM file that is not zero, in order, and gives a checksum over them and their offsets. The file's
/// holes are not read: that would give them memory.
pub(super) fn each_part(
    file: &RamFile,
    mut tell: impl FnMut(u64, &[u8]) -> Result<(), CloneError>,
) -> Result<u64, CloneError> {
    let reader = File::open(file.path()).map_err(CloneError::io("open", file.path()))?;
    let mut sum = Xxh3::new();
    let mut buffer = vec![0; PART];
    let mut at = 0;
    for extent in file.data_extents()? {
        // Parts are aligned, and each is read once however many holes are in it, so that the same bytes give the same sum
        // whatever has memory: that depends on the huge pages that the kernel had to give.
        at = at.max(extent.start.0 / PART as u64 * PART as u64);
        while at < extent.end().0 {
            let len = usize::try_from(file.len().0 - at).map_or(PART, |left| left.min(PART));
            let part = &mut buffer[..len];
            reader.read_exact_at(part, at).map_err(CloneError::io("read", file.path()))?;
            if part.iter().any(|byte| *byte != 0) {
                add(&mut sum, at, part);
                tell(at, part)?;
            }
            at += len as u64;
        }
    }
    Ok(sum.digest())
}

fn add(sum: &mut Xxh3, at: u64, part: &[u8]) {
    sum.update(&at.to_le_bytes());
    sum.update(part);
}

/// Writes a template to folder `to`, which must not exist. The guest that it was runs meanwhile, whatever the disk's speed:
/// what is read is frozen.
///
/// # Errors
/// [`CloneError::Io`], also if the folder exists; [`CloneError::Memory`]. What was written is removed then.
pub fn save(template: &Template, to: &Path) -> Result<Saved, CloneError> {
    if let Some(parent) = to.parent() {
        std::fs::create_dir_all(parent).map_err(CloneError::io("create", parent))?;
    }
    std::fs::create_dir(to).map_err(CloneError::io("create", to))?;
    write(template, to).inspect_err(|_| {
        if let Err(error) = remove_dir(to) {
            tracing::warn!(%error, "half a template is left");
        }
    })
}

fn write(template: &Template, to: &Path) -> Result<Saved, CloneError> {
    let mut manifest = template.manifest.clone();
    for (number, ram) in manifest.ram.iter_mut().enumerate() {
        let file = RamFile::open(&ram.file)?;
        ram.file = PathBuf::from(format!("ram-{number}"));
        let path = to.join(&ram.file);
        let failed = |e| CloneError::io("write", &path)(e);
        let out = OpenOptions::new().write(true).create_new(true).open(&path).map_err(failed)?;
        out.set_len(ram.size).map_err(failed)?;
        let sum = each_part(&file, |at, part| {
            out.write_all_at(part, at).map_err(|e| CloneError::io("write", &path)(e))
        })?;
        out.sync_all().map_err(|e| CloneError::io("write", &path)(e))?;
        ram.checksum = Some(sum);
    }
    let path = to.join(STATE);
    std::fs::copy(template.dir.join(STATE), &path).map_err(CloneError::io("write", &path))?;
    sync(&path)?;
    // Last: a folder without a manifest is no template.
    let path = to.join(MANIFEST);
    write_atomically(&path, &manifest).map_err(CloneError::io("write", &path))?;
    sync(&path)?;
    sync(to)?;
    Ok(Saved { dir: to.to_owned(), bytes: allocated(to), manifest })
}

fn sync(path: &Path) -> Result<(), CloneError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(CloneError::io("write", path))
}

/// Bytes that the files of a folder take.
fn allocated(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|e| e.metadata().ok()).map(|meta| meta.blocks() * 512).sum()
}

impl Saved {
    /// Opens a template on disk. Its bytes are looked at when it is loaded.
    ///
    /// # Errors
    /// [`CloneError::Io`], [`CloneError::Template`].
    pub fn open(dir: &Path) -> Result<Self, CloneError> {
        let manifest = read_manifest(dir)?;
        Ok(Self { dir: dir.to_owned(), bytes: allocated(dir), manifest })
    }

    /// All templates in `folder`, by name.
    #[must_use]
    pub fn list(folder: &Path) -> Vec<Self> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut all: Vec<Self> = entries.filter_map(|e| Self::open(&e.path()).ok()).collect();
        all.sort_by(|a, b| a.manifest.name.cmp(&b.manifest.name));
        all
    }
}

/// Brings a template from disk into memory below `memory`, and verifies every byte of it on the way.
///
/// # Errors
/// [`CloneError::Template`] if it is damaged or cut short; [`CloneError::Memory`] without memory for it. Nothing is left then.
pub fn load(saved: &Saved, memory: &Path) -> Result<Template, CloneError> {
    let backing = saved.manifest.backing;
    let (dir, ram_dir) = folders(memory, &saved.manifest.id, backing)?;
    let loaded = fill(saved, memory, &dir, &ram_dir);
    if loaded.is_err() {
        for folder in [&dir, &ram_dir] {
            if let Err(error) = remove_dir(folder) {
                tracing::warn!(%error, "half a template is left");
            }
        }
    }
    loaded
}

fn fill(saved: &Saved, memory: &Path, dir: &Path, ram_dir: &Path) -> Result<Template, CloneError> {
    let backing = saved.manifest.backing;
    let state = read_state(&saved.dir, &saved.manifest)?;
    // Checks that there is memory; the folder is below one of the right kind.
    let home = MemoryDir::prepare(&memory_dir(memory, backing), backing)?;
    let mut manifest = saved.manifest.clone();
    for ram in &mut manifest.ram {
        let from = saved.dir.join(&ram.file);
        let name = format!("loading-{}-{}", manifest.id, ram.file.display());
        let target = home.create_ram_file(&name, ByteLen(ram.size))?;
        let path = ram_dir.join(&ram.file);
        let filled = fill_file(&from, ram.size, &target);
        let renamed = std::fs::rename(target.path(), &path).map_err(CloneError::io("rename", &path));
        let sum = filled?;
        renamed?;
        if ram.checksum != Some(sum) {
            let why = format!("{} is damaged: the checksum differs", from.display());
            return Err(CloneError::Template { path: saved.dir.clone(), why });
        }
        ram.file = path;
        ram.checksum = None;
    }
    Template::complete(dir, manifest, &state)
}

/// Copies what is not zero, and gives the checksum as [`each_part`] does.
fn fill_file(from: &Path, size: u64, to: &RamFile) -> Result<u64, CloneError> {
    let reader = File::open(from).map_err(CloneError::io("open", from))?;
    let found = reader.metadata().map_err(CloneError::io("look at", from))?.len();
    if found != size {
        let why = format!("{} has {found} of {size} bytes", from.display());
        return Err(CloneError::Template { path: from.to_owned(), why });
    }
    let mapping = to.map()?;
    let mut sum = Xxh3::new();
    let mut buffer = vec![0; PART];
    for at in (0..size).step_by(PART) {
        let len = usize::try_from(size - at).map_or(PART, |left| left.min(PART));
        let part = &mut buffer[..len];
        reader.read_exact_at(part, at).map_err(CloneError::io("read", from))?;
        if part.iter().any(|byte| *byte != 0) {
            add(&mut sum, at, part);
            mapping.copy_in(FileOffset(at), part)?;
        }
    }
    Ok(sum.digest())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which pages have memory depends on what the kernel had to give: a huge page, or single ones.
    #[test]
    fn the_checksum_does_not_depend_on_which_pages_have_memory() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
        let file = |name: &str, written: &[u64]| {
            let path = dir.path().join(name);
            let file = File::create(&path).expect("a file");
            file.set_len(2 * PART as u64).expect("its length");
            for page in written {
                let byte = if [0, 2].contains(page) { 7 } else { 0 };
                file.write_all_at(&[byte; 4096], page << 12).expect("a page");
            }
            RamFile::open(&path).expect("a RAM file")
        };
        let all: Vec<u64> = (0..512).collect();
        let (whole, apart) = (file("whole", &all), file("apart", &[0, 2]));
        assert_eq!(apart.data_extents().expect("extents").len(), 2, "a hole between two pages");
        let sum = |file: &RamFile| {
            let mut parts = Vec::new();
            let sum = each_part(file, |at, _| {
                parts.push(at);
                Ok(())
            });
            (sum.expect("a checksum"), parts)
        };
        assert_eq!(sum(&whole).1, [0]);
        assert_eq!(sum(&apart), sum(&whole));
        let again = file("again", &[]);
        assert_eq!(fill_file(apart.path(), 2 * PART as u64, &again).expect("it is read"), sum(&apart).0);
    }
}
