//! What was frozen, on one host: RAM files, device state, and a manifest that says what they are.
//!
//! A template is a folder on tmpfs with `manifest.json` and `device-state`; its RAM files are on memory of the guest's own
//! kind. Nothing in it is ever written once the manifest is there.

mod disk;
mod receive;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vmove_types::Backing;

use serde::{Deserialize, Serialize};
use vmove_memory::{MemoryDir, RamFile};
use vmove_node::files::write_atomically;
use vmove_node::guest_devices::fit::Owned;
use vmove_node::layout::memory_dir;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::CloneError;
use crate::disk::Disk;
use crate::files::remove_file;

pub use disk::{Saved, load, save};
pub use receive::{Arriving, places, receive, remove};

/// Version of [`Manifest`].
pub const VERSION: u32 = 1;
pub(crate) const MANIFEST: &str = "manifest.json";
const STATE: &str = "device-state";

/// A RAM block of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateRam {
    /// QEMU's id of the memory backend.
    pub id: String,
    /// Bytes.
    pub size: u64,
    /// The file: absolute in memory, a plain name on disk.
    pub file: PathBuf,
    /// XXH3 (64 bits) over the parts that are not zero, with their offsets; only of templates on disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<u64>,
}

/// What a template is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`VERSION`].
    pub version: u32,
    /// Id of the fork that made it.
    pub id: String,
    /// Name under which it is kept; `None` for one that only serves the fork that made it.
    pub name: Option<String>,
    /// The guest that it was.
    pub vm: String,
    /// When, in seconds of the epoch.
    pub created: u64,
    /// Version of the QEMU that wrote the device state, with what the distribution adds to it.
    pub qemu: String,
    /// Machine type with its version.
    pub machine: String,
    /// What its memory is made of.
    pub backing: Backing,
    /// Command line as the operator gave it.
    pub command_line: Vec<String>,
    /// Environment variables of QEMU.
    pub environment: Vec<(String, String)>,
    /// Disks that the guest could write: their images are part of what was frozen, and stay where they are.
    #[serde(default)]
    pub disks: Vec<Disk>,
    /// Devices of its node that the guest had: its children can get such.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Owned>,
    /// RAM blocks.
    pub ram: Vec<TemplateRam>,
    /// Bytes of device state.
    pub state_bytes: u64,
    /// XXH3 (64 bits) of the device state.
    pub state_checksum: u64,
}

impl Manifest {
    /// Bytes of guest memory, as far as a number can say them.
    #[must_use]
    pub fn guest_bytes(&self) -> u64 {
        self.ram.iter().fold(0, |sum, ram| sum.saturating_add(ram.size))
    }
}

/// A template in the memory of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    dir: PathBuf,
    manifest: Manifest,
}

/// Folder of template `id` below the daemon's folder for guest memory, made if it is not there: (manifest and state, RAM files).
///
/// # Errors
/// [`CloneError::Memory`], [`CloneError::Io`].
pub fn folders(memory: &Path, id: &str, backing: Backing) -> Result<(PathBuf, PathBuf), CloneError> {
    let folder = |backing: Backing| -> Result<PathBuf, CloneError> {
        let dir = MemoryDir::prepare(&memory_dir(memory, backing), backing)?;
        let dir = dir.path().join("templates").join(id);
        // QEMUs get descriptors of what is in it, and nobody else anything.
        vmove_node::files::make_private_dir(&dir).map_err(CloneError::io("create", &dir))?;
        Ok(dir)
    };
    Ok((folder(Backing::Thp)?, folder(backing)?))
}

impl Template {
    /// Completes a template whose RAM files are in place: writes its state, then its manifest.
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn complete(dir: &Path, mut manifest: Manifest, state: &[u8]) -> Result<Self, CloneError> {
        manifest.version = VERSION;
        manifest.state_bytes = state.len() as u64;
        manifest.state_checksum = xxh3_64(state);
        let path = dir.join(STATE);
        std::fs::write(&path, state).map_err(CloneError::io("write", &path))?;
        let path = dir.join(MANIFEST);
        write_atomically(&path, &manifest).map_err(CloneError::io("write", &path))?;
        Ok(Self { dir: dir.to_owned(), manifest })
    }

    /// Opens a template of this host.
    ///
    /// # Errors
    /// [`CloneError::Io`], [`CloneError::Template`].
    pub fn open(dir: &Path) -> Result<Self, CloneError> {
        let manifest = read_manifest(dir)?;
        for ram in &manifest.ram {
            let found = std::fs::metadata(&ram.file).map_err(CloneError::io("find", &ram.file))?.len();
            if found != ram.size {
                let why = format!("{} has {found} of {} bytes", ram.file.display(), ram.size);
                return Err(CloneError::Template { path: dir.to_owned(), why });
            }
        }
        Ok(Self { dir: dir.to_owned(), manifest })
    }

    /// What it is.
    #[must_use]
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where it is.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its device state, checked.
    ///
    /// # Errors
    /// [`CloneError::Io`], [`CloneError::Template`].
    pub fn state(&self) -> Result<Arc<[u8]>, CloneError> {
        read_state(&self.dir, &self.manifest).map(Into::into)
    }

    /// Its RAM files, open for reading only: whoever has such a descriptor cannot change the template.
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn sources(&self) -> Result<Vec<Source>, CloneError> {
        self.manifest.ram.iter().map(|ram| Source::open(&ram.file)).collect()
    }

    /// One number over all guest memory; 0.1 s per GiB. For tests: it never changes.
    ///
    /// # Errors
    /// [`CloneError::Memory`], [`CloneError::Io`].
    pub fn checksum(&self) -> Result<u64, CloneError> {
        let mut all = Xxh3::new();
        for ram in &self.manifest.ram {
            let file = RamFile::open(&ram.file)?;
            all.update(&disk::each_part(&file, |_, _| Ok(()))?.to_le_bytes());
        }
        Ok(all.digest())
    }

    /// Removes it. Memory that children still map stays until they are gone.
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn remove(&self) -> Result<(), CloneError> {
        // Without its manifest it is no template any more.
        remove_file(&self.dir.join(MANIFEST))?;
        for ram in &self.manifest.ram {
            remove_file(&ram.file)?;
            if let Some(folder) = ram.file.parent().filter(|folder| *folder != self.dir) {
                remove_dir(folder)?;
            }
        }
        remove_dir(&self.dir)
    }
}

/// All templates of this host that are kept under a name.
#[must_use]
pub fn list(memory: &Path) -> Vec<Template> {
    let folder = memory_dir(memory, Backing::Thp).join("templates");
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<Template> = entries.filter_map(|e| Template::open(&e.path()).ok()).collect();
    all.retain(|template| template.manifest.name.is_some());
    all.sort_by(|a, b| a.manifest.name.cmp(&b.manifest.name));
    all
}

/// A RAM file to lay a child's memory over.
#[derive(Debug, Clone)]
pub struct Source {
    /// Open for reading only.
    pub file: Arc<File>,
    /// Device and inode.
    pub identity: (u64, u64),
}

impl Source {
    /// Opens it.
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn open(path: &Path) -> Result<Self, CloneError> {
        use std::os::unix::fs::MetadataExt;
        let file = File::open(path).map_err(CloneError::io("open", path))?;
        let meta = file.metadata().map_err(CloneError::io("look at", path))?;
        Ok(Self { file: Arc::new(file), identity: (meta.dev(), meta.ino()) })
    }
}

pub(crate) fn read_manifest(dir: &Path) -> Result<Manifest, CloneError> {
    let path = dir.join(MANIFEST);
    let bad = |why: String| CloneError::Template { path: dir.to_owned(), why };
    let manifest: Manifest = match vmove_node::files::read_json(&path) {
        Ok(manifest) => manifest,
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            return Err(bad(format!("its manifest cannot be read: {error}")));
        }
        Err(error) => return Err(CloneError::io("read", &path)(error)),
    };
    if manifest.version != VERSION {
        return Err(bad(format!("expected version {VERSION}, found {}", manifest.version)));
    }
    Ok(manifest)
}

fn read_state(dir: &Path, manifest: &Manifest) -> Result<Vec<u8>, CloneError> {
    let path = dir.join(STATE);
    let state = vmove_node::files::read(&path).map_err(CloneError::io("read", &path))?;
    let (bytes, wanted) = (state.len() as u64, manifest.state_bytes);
    let why = if bytes != wanted {
        format!("its device state has {bytes} of {wanted} bytes")
    } else if xxh3_64(&state) != manifest.state_checksum {
        "its device state is damaged: the checksum differs".to_owned()
    } else {
        return Ok(state);
    };
    Err(CloneError::Template { path: dir.to_owned(), why })
}

pub(crate) fn remove_dir(path: &Path) -> Result<(), CloneError> {
    match std::fs::remove_dir_all(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(CloneError::io("remove", path)(source))
        }
        _ => Ok(()),
    }
}
