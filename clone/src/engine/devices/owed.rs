//! Which guests are without a device that they are to have: one file for each fork, until all have them.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use vmove_node::files::{read_all_json, write_atomically};
use vmove_node::guest_devices::Detached;
use vmove_types::fork_devices::Parting;

use crate::CloneError;
use crate::files::remove_file;

/// What is written down.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OwedRecord {
    /// Id of the fork, or of what else the guest was asked for its devices for.
    pub id: String,
    /// How the guest was asked, and what is to be run in it then.
    pub parting: Parting,
    /// Guests: the parent, and children.
    pub guests: Vec<OwedGuest>,
}

/// A guest that is to get devices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OwedGuest {
    /// Name of the VM.
    pub vm: String,
    /// What it was asked for, or has never had.
    pub detached: Detached,
}

/// The file of one fork.
#[derive(Debug)]
pub struct Owed {
    path: PathBuf,
    record: Mutex<OwedRecord>,
}

impl Owed {
    /// Of a fork that owes nothing yet: there is no file.
    pub fn new(dir: &Path, id: &str, parting: Parting) -> Self {
        let record = OwedRecord { id: id.to_owned(), parting, guests: Vec::new() };
        Self { path: dir.join(format!("{id}.json")), record: Mutex::new(record) }
    }

    /// Those that an earlier life of the daemon left, each that can be read.
    pub fn left(dir: &Path) -> Vec<Self> {
        let read = read_all_json::<OwedRecord>(dir).into_iter();
        read.filter_map(|(path, record)| match record {
            Ok(record) => Some(Self { path, record: Mutex::new(record) }),
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "which guests lack devices since a fork cannot be read: `vmove devices` \
                    shows what VMs have, `vmove devices attach` gives what they lack");
                None
            }
        })
        .collect()
    }

    fn lock(&self) -> MutexGuard<'_, OwedRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known now.
    pub fn record(&self) -> OwedRecord {
        self.lock().clone()
    }

    /// What a guest was asked for.
    pub fn of(&self, vm: &str) -> Detached {
        let found = self.lock().guests.iter().find(|guest| guest.vm == vm).map(|g| g.detached.clone());
        found.unwrap_or_default()
    }

    /// Writes down what a guest is to get, before it is asked.
    ///
    /// # Errors
    /// [`CloneError::Io`]: nothing may be done.
    pub fn note(&self, vm: &str, change: impl FnOnce(&mut Detached)) -> Result<(), CloneError> {
        let mut record = self.lock();
        let mut next = record.clone();
        let index = next.guests.iter().position(|guest| guest.vm == vm).unwrap_or_else(|| {
            next.guests.push(OwedGuest { vm: vm.to_owned(), detached: Detached::default() });
            next.guests.len() - 1
        });
        change(&mut next.guests[index].detached);
        if let Some(dir) = self.path.parent() {
            std::fs::create_dir_all(dir).map_err(CloneError::io("create", dir))?;
        }
        write_atomically(&self.path, &next).map_err(CloneError::io("write", &self.path))?;
        *record = next;
        Ok(())
    }

    /// The same where only a figure would be lost.
    pub fn note_if_possible(&self, vm: &str, change: impl FnOnce(&mut Detached)) {
        if let Err(error) = self.note(vm, change) {
            tracing::warn!(vm, %error, "how far a guest let its devices go is not written down");
        }
    }

    /// A guest has what it is to have, or it is told what it lacks.
    pub fn settle(&self, vm: &str) {
        let mut record = self.lock();
        if !record.guests.iter().any(|guest| guest.vm == vm) {
            return;
        }
        record.guests.retain(|guest| guest.vm != vm);
        let written = if record.guests.is_empty() {
            remove_file(&self.path)
        } else {
            write_atomically(&self.path, &*record).map_err(CloneError::io("write", &self.path))
        };
        if let Err(error) = written {
            // The next daemon finds that the guest has what it is to have.
            tracing::warn!(vm, %error, "it is not written down that a guest has its devices");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_owed_is_found_again_until_all_have_it() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("devices");
        let owed = Owed::new(&folder, "f1", Parting::default());
        assert!(Owed::left(&folder).is_empty());
        owed.note("web", |detached| detached.quiesced = true).unwrap();
        owed.note("web.1", |_| ()).unwrap();
        let left = Owed::left(&folder);
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].record(), owed.record());
        assert!(left[0].of("web").quiesced && !left[0].of("web.1").quiesced);
        owed.settle("web");
        assert_eq!(Owed::left(&folder)[0].record().guests.len(), 1);
        owed.settle("web.1");
        assert!(Owed::left(&folder).is_empty());
    }

    #[test]
    fn what_cannot_be_written_down_is_not_known_either() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("devices"), "no folder").unwrap();
        let owed = Owed::new(&dir.path().join("devices"), "f1", Parting::default());
        owed.note("web", |detached| detached.quiesced = true).unwrap_err();
        assert_eq!(owed.of("web"), Detached::default());
    }
}
