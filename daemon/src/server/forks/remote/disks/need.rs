//! Whether a guest of this node still reads images of another node, by what its disks are made of: not only children of the fork,
//! but theirs, too, and templates.

use std::io;
use std::path::{Path, PathBuf};

use vmove_clone::disk::{self, Layers};
use vmove_clone::template::{self, Saved};
use vmove_qmp::CommandLine;

use crate::server::forks::Forks;
use crate::server::registry::starting;

impl Forks {
    /// Whether an image leads to the sockets in `folder`. Blocks.
    pub(super) fn needs(&self, folder: &Path) -> bool {
        // First: a VM gets its record before its note is removed.
        let starting = starting::made(&self.registry.run_dir);
        let images = starting.into_iter().chain(self.images_of_vms()).chain(self.other_images());
        images.into_iter().any(|image| leads_to(&image, folder))
    }

    fn images_of_vms(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for record in self.registry.records() {
            found.extend(record.overlays.iter().cloned());
            let line = CommandLine::parse(record.command_line.iter().map(Into::into).collect());
            let images = line.and_then(|line| line.images()).unwrap_or_default();
            found.extend(images.into_iter().map(|image| record.vm_dir.join(image.file)));
        }
        found
    }

    /// Of templates, and of those that this node serves to others.
    fn other_images(&self) -> Vec<PathBuf> {
        let loaded = template::list(&self.registry.memory_dir);
        let saved = Saved::list(&self.saved);
        let manifests = loaded
            .iter()
            .map(|t| t.manifest().disks.clone())
            .chain(saved.into_iter().map(|s| s.manifest.disks));
        let mut found: Vec<PathBuf> = manifests.flatten().map(|disk| disk.file).collect();
        let state = self.remote.disks.lock();
        let served = state.exports.values().flat_map(|export| &export.record.images);
        found.extend(served.map(|image| image.file.clone()));
        found
    }
}

/// In doubt it does: a guest would lose its disk.
fn leads_to(image: &Path, folder: &Path) -> bool {
    match disk::layers(image, "qcow2") {
        Ok(Layers { other: Some(other), .. }) => other.contains(&*folder.to_string_lossy()),
        Ok(_) => false,
        Err(error) => !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData),
    }
}
