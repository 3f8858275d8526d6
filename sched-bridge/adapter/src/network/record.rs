//! Which networks there are, in one file each: when a blueprint is stopped, nobody else knows on which nodes its networks are.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmove_bridge_types::adapter::Member;

/// A network that was made, or is being made, or of which something is left.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// `private` or `public`.
    pub mode: String,
    /// Its nodes; none if it was stopped. The number of a node is that of its name server, and stays.
    pub nodes: Vec<String>,
    /// Who is on it.
    pub members: Vec<Member>,
    /// VXLAN network identifier; 0 for public ones.
    pub vni: u32,
    /// What it has left on nodes after it was stopped, by their names.
    #[serde(default)]
    pub left: BTreeMap<String, Left>,
}

/// What a network has left on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// Why it was not removed.
    pub why: String,
    /// Its VXLAN network identifier; 0 for public ones.
    pub vni: u32,
}

/// The file of a network.
#[derive(Debug)]
pub struct File(PathBuf);

impl File {
    /// Those of all networks in this folder.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn all(folder: &Path) -> Result<Vec<Self>, String> {
        let wrong = |error: std::io::Error| format!("could not read {}: {error}", folder.display());
        let entries = match std::fs::read_dir(folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(wrong)?,
        };
        let paths: Result<Vec<PathBuf>, _> = entries.map(|entry| entry.map(|own| own.path())).collect();
        let paths = paths.map_err(wrong)?;
        Ok(paths
            .into_iter()
            .filter(|path| path.extension().is_some_and(|end| end == "json"))
            .map(Self)
            .collect())
    }

    /// The name of cluster and network.
    #[must_use]
    pub fn network(&self) -> String {
        self.0.file_stem().unwrap_or_default().to_string_lossy().replace('+', "/")
    }

    /// Of a network, in this folder.
    #[must_use]
    pub fn of(folder: &Path, cluster: &str, network: &str) -> Self {
        // No name has a slash; a name may have a dot, but not the plus sign.
        Self(folder.join(format!("{cluster}+{network}.json")))
    }

    /// Reads it; none if there is no such network.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self) -> Result<Option<Record>, String> {
        let text = match std::fs::read(&self.0) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("could not read {}: {error}", self.0.display())),
        };
        serde_json::from_slice(&text).map(Some).map_err(|error| format!("{}: {error}", self.0.display()))
    }

    /// Writes it: all of it, or the old one stays.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, record: &Record) -> Result<(), String> {
        let wrong = |error: std::io::Error| format!("could not write {}: {error}", self.0.display());
        if let Some(folder) = self.0.parent() {
            std::fs::create_dir_all(folder).map_err(wrong)?;
        }
        let new = self.0.with_extension("new");
        let mut file = std::fs::File::create(&new).map_err(wrong)?;
        file.write_all(&serde_json::to_vec(record).unwrap_or_default()).map_err(wrong)?;
        file.sync_all().map_err(wrong)?;
        std::fs::rename(&new, &self.0).map_err(wrong)
    }

    /// Writes what is left of a network, or removes the file if that is nothing.
    ///
    /// # Errors
    /// It cannot be written or removed.
    pub fn keep(&self, record: &Record) -> Result<(), String> {
        if record.nodes.is_empty() && record.left.is_empty() { self.remove() } else { self.write(record) }
    }

    /// Removes it.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove(&self) -> Result<(), String> {
        match std::fs::remove_file(&self.0) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(format!("could not remove {}: {error}", self.0.display()))
            }
            _ => Ok(()),
        }
    }
}
