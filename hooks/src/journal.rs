//! Runs that were begun and have not ended: one file for each. A daemon that is started anew runs them again.
//!
//! A file is whole or not there: it is written beside its place and renamed. No `fsync`: what hooks are about does not outlive the kernel.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What is written down of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Note {
    pub id: String,
    pub hook: String,
    pub vm: Option<String>,
    pub labels: BTreeMap<String, String>,
    pub data: Map<String, Value>,
    pub cause: Vec<String>,
    /// Seconds since 1970.
    pub at: u64,
}

/// The folder of the notes.
#[derive(Debug, Clone)]
pub(crate) struct Journal(PathBuf);

impl Journal {
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        Ok(Self(dir.to_owned()))
    }

    fn path(&self, id: &str) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    /// Writes a note down. Before the run begins.
    pub(crate) fn begin(&self, note: &Note) -> io::Result<()> {
        let (path, half) = (self.path(&note.id), self.0.join(format!("{}.half", note.id)));
        std::fs::write(&half, serde_json::to_vec(note).map_err(io::Error::other)?)?;
        std::fs::rename(half, path)
    }

    /// The run has ended.
    pub(crate) fn end(&self, id: &str) -> io::Result<()> {
        std::fs::remove_file(self.path(id))
    }

    /// What an earlier daemon has begun, the oldest first. What cannot be read is told and removed.
    pub(crate) fn left(&self) -> Vec<Note> {
        let mut notes = Vec::new();
        for path in std::fs::read_dir(&self.0).into_iter().flatten().flatten().map(|entry| entry.path()) {
            if path.extension().is_some_and(|end| end == "half") {
                let _ = std::fs::remove_file(&path);
                continue;
            }
            let read = std::fs::read(&path)
                .and_then(|bytes| serde_json::from_slice(&bytes).map_err(io::Error::other));
            match read {
                Ok(note) => notes.push(note),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a run of a hook was noted and cannot be read: it is not run again");
                    let _ = std::fs::remove_file(&path);
                }
            }
        }
        notes.sort_by_key(|note: &Note| note.at);
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(id: &str, at: u64) -> Note {
        Note {
            id: id.to_owned(),
            hook: "h".to_owned(),
            vm: Some("web".to_owned()),
            labels: BTreeMap::new(),
            data: Map::new(),
            cause: Vec::new(),
            at,
        }
    }

    #[test]
    fn what_was_begun_and_not_ended_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::open(folder.path()).unwrap();
        journal.begin(&note("b", 2)).unwrap();
        journal.begin(&note("a", 3)).unwrap();
        journal.begin(&note("c", 1)).unwrap();
        journal.end("c").unwrap();
        // A daemon killed while it wrote, and a damaged disk.
        std::fs::write(folder.path().join("d.half"), "{").unwrap();
        std::fs::write(folder.path().join("e.json"), "{").unwrap();
        let left = Journal::open(folder.path()).unwrap().left();
        assert_eq!(left, [note("b", 2), note("a", 3)]);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
