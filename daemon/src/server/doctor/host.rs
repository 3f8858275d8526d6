//! Files of the host, below a root that tests choose.

use std::path::{Path, PathBuf};

/// Where `/proc`, `/sys` and `/dev` of the host are.
#[derive(Debug)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The trimmed text of a file, if it can be read.
    pub fn read(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    pub fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    pub fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// How many entries a folder has; 0 if it is not there.
    pub fn count(&self, path: &str) -> usize {
        std::fs::read_dir(self.root.join(path)).map_or(0, Iterator::count)
    }
}
