//! Which networks there are, in one file each: when a blueprint is stopped, nobody else knows on which nodes its networks are.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmove_bridge_types::adapter::Member;

/// A network that was made, or is being made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// `private` or `public`.
    pub mode: String,
    /// Its nodes. The number of a node is that of its name server, and stays.
    pub nodes: Vec<String>,
    /// Who is on it.
    pub members: Vec<Member>,
    /// VXLAN network identifier; 0 for public ones.
    pub vni: u32,
}

/// The file of a network.
#[derive(Debug)]
pub struct File(PathBuf);

impl File {
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
