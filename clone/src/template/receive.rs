//! A template that comes from another host: files are made first, filled by others, and complete with their manifest.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use vmove_types::Backing;

use vmove_memory::{ByteLen, Mapping, MemoryDir, PageIndex, PageRun, RamFile};
use vmove_node::layout::memory_dir;

use super::{Manifest, Source, Template, folders, remove_dir};
use crate::CloneError;

/// A template whose memory is on its way. Dropping it leaves its files: see [`Arriving::discard`].
#[derive(Debug)]
pub struct Arriving {
    dir: PathBuf,
    ram_dir: PathBuf,
    manifest: Manifest,
    /// Its RAM files, mapped, all zero.
    pub memory: Vec<Arc<Mapping>>,
}

/// Makes the files of a template that another host describes, below `memory`. Paths in `manifest` are that host's, and are not used.
///
/// # Errors
/// [`CloneError::Memory`] without memory for it. Nothing is left then.
pub fn receive(memory: &Path, manifest: Manifest) -> Result<Arriving, CloneError> {
    let backing = manifest.backing;
    let (dir, ram_dir) = folders(memory, &manifest.id, backing)?;
    let mut arriving = Arriving { dir, ram_dir, manifest, memory: Vec::new() };
    match arriving.make(memory, backing) {
        Ok(()) => Ok(arriving),
        Err(error) => {
            arriving.discard();
            Err(error)
        }
    }
}

impl Arriving {
    fn make(&mut self, memory: &Path, backing: Backing) -> Result<(), CloneError> {
        let home = MemoryDir::prepare(&memory_dir(memory, backing), backing)?;
        for (number, ram) in self.manifest.ram.iter_mut().enumerate() {
            let made =
                home.create_ram_file(&format!("arriving-{}-{number}", self.manifest.id), ByteLen(ram.size))?;
            let path = self.ram_dir.join(format!("ram-{number}"));
            let renamed = std::fs::rename(made.path(), &path).map_err(CloneError::io("rename", &path));
            if let Err(error) = renamed {
                let _ = std::fs::remove_file(made.path());
                return Err(error);
            }
            let mapping = RamFile::open(&path)?.map()?;
            if backing != Backing::Thp {
                // A huge page that is not there when bytes arrive would end this process.
                let pages = ram.size / mapping.page_size().bytes();
                mapping.populate(PageRun { start: PageIndex(0), len: pages })?;
            }
            self.memory.push(mapping);
            ram.file = path;
            ram.checksum = None;
        }
        Ok(())
    }

    /// Its RAM files, to lay children over that wait for what has not arrived: see [`crate::service`].
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn sources(&self) -> Result<Vec<Source>, CloneError> {
        self.manifest.ram.iter().map(|ram| Source::open(&ram.file)).collect()
    }

    /// All of its memory is there: makes it a template.
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn complete(&self, state: &[u8]) -> Result<Template, CloneError> {
        Template::complete(&self.dir, self.manifest.clone(), state)
    }

    /// Removes what was made.
    pub fn discard(&self) {
        remove(&[&self.dir, &self.ram_dir]);
    }

    /// Its folders, for whoever must remove them in a later life.
    #[must_use]
    pub fn folders(&self) -> Vec<PathBuf> {
        vec![self.dir.clone(), self.ram_dir.clone()]
    }
}

/// Removes folders of a template that never became one.
pub fn remove<P: AsRef<Path>>(folders: &[P]) {
    for folder in folders {
        if let Err(error) = remove_dir(folder.as_ref()) {
            tracing::warn!(%error, "half a template is left");
        }
    }
}

/// Where the folders of template `id` would be, whether they are there or not.
#[must_use]
pub fn places(memory: &Path, id: &str, backing: Backing) -> Vec<PathBuf> {
    let place = |backing: Backing| memory_dir(memory, backing).join("templates").join(id);
    vec![place(Backing::Thp), place(backing)]
}
