//! The VMs of this node, as kept in the state directory.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::files::write_atomically;
use crate::record::VmRecord;
use vmove_types::problem::Code;

/// Longest name of a VM in bytes of UTF-8. It is part of Unix socket paths, which end at 107 bytes.
pub const MAX_NAME: usize = 64;

/// Why a VM record could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmStoreError {
    /// The name cannot be used.
    #[error("VM name {name:?} cannot be used: {why}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// There is one already.
    #[error("A VM named {0:?} is already on this node: choose another name, or see `vmove show`")]
    Exists(String),
    /// There is none.
    #[error("No VM named {0:?} on this node: `vmove list` shows those there are")]
    Unknown(String),
    /// A file of the state directory cannot be read or written.
    #[error("Could not {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A record is damaged.
    #[error("{path} is not a VM record: {why}; move it away and adopt the VM again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        why: String,
    },
}

impl VmStoreError {
    /// The stable word by which programs know it.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::BadName { .. } => Code::BadName,
            Self::Exists(_) => Code::NameTaken,
            Self::Unknown(_) => Code::UnknownVm,
            Self::Io { .. } | Self::Damaged { .. } => Code::Internal,
        }
    }
}

/// Checks a name: 1 to [`MAX_NAME`] bytes, no `/`, no control character, not `.` or `..`. Spaces and any script are fine.
///
/// # Errors
/// [`VmStoreError::BadName`] with the reason.
pub fn check_name(name: &str) -> Result<(), VmStoreError> {
    let why = if name.is_empty() {
        "it is empty"
    } else if name.len() > MAX_NAME {
        "it is longer than 64 bytes"
    } else if name == "." || name == ".." {
        "it is a folder's own name"
    } else if name.contains('/') {
        "it contains a slash"
    } else if name.chars().any(char::is_control) {
        "it contains a control character"
    } else {
        return Ok(());
    };
    Err(VmStoreError::BadName { name: name.to_owned(), why })
}

/// The records of all VMs of a node: one JSON file each, replaced atomically, with a copy in memory.
#[derive(Debug)]
pub struct VmStore {
    dir: PathBuf,
    records: Mutex<BTreeMap<String, VmRecord>>,
}

impl VmStore {
    /// Opens (and makes) the folder and reads every record.
    ///
    /// # Errors
    /// [`VmStoreError::Io`] or [`VmStoreError::Damaged`], with the path.
    pub fn open(dir: &Path) -> Result<Self, VmStoreError> {
        std::fs::create_dir_all(dir).map_err(|source| io_error("create", dir, source))?;
        let mut records = BTreeMap::new();
        let entries = std::fs::read_dir(dir).map_err(|source| io_error("list", dir, source))?;
        for entry in entries {
            let path = entry.map_err(|source| io_error("list", dir, source))?.path();
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            let text = std::fs::read(&path).map_err(|source| io_error("read", &path, source))?;
            let record: VmRecord = serde_json::from_slice(&text)
                .map_err(|e| VmStoreError::Damaged { path: path.clone(), why: e.to_string() })?;
            records.insert(record.name.clone(), record);
        }
        Ok(Self { dir: dir.to_owned(), records: Mutex::new(records) })
    }

    /// All records, by name.
    #[must_use]
    pub fn list(&self) -> Vec<VmRecord> {
        self.lock().values().cloned().collect()
    }

    /// One record.
    ///
    /// # Errors
    /// [`VmStoreError::Unknown`].
    pub fn get(&self, name: &str) -> Result<VmRecord, VmStoreError> {
        self.lock().get(name).cloned().ok_or_else(|| VmStoreError::Unknown(name.to_owned()))
    }

    /// The VM of the name of `vm`, if it is neither that QEMU nor one that the session brings.
    #[must_use]
    pub fn other_than(&self, vm: &VmRecord, session: &str) -> Option<VmRecord> {
        let of_session = |found: &VmRecord| found.session.as_deref() == Some(session);
        let same = |found: &VmRecord| (found.pid, found.pid_start) == (vm.pid, vm.pid_start);
        self.get(&vm.name).ok().filter(|found| !same(found) && !of_session(found))
    }

    /// Adds a VM.
    ///
    /// # Errors
    /// [`VmStoreError::BadName`], [`VmStoreError::Exists`] or [`VmStoreError::Io`].
    pub fn insert(&self, record: VmRecord) -> Result<(), VmStoreError> {
        check_name(&record.name)?;
        let mut records = self.lock();
        if records.contains_key(&record.name) {
            return Err(VmStoreError::Exists(record.name));
        }
        self.write(&record)?;
        records.insert(record.name.clone(), record);
        Ok(())
    }

    /// Replaces or adds a VM.
    ///
    /// # Errors
    /// [`VmStoreError::BadName`] or [`VmStoreError::Io`].
    pub fn put(&self, record: VmRecord) -> Result<(), VmStoreError> {
        check_name(&record.name)?;
        let mut records = self.lock();
        self.write(&record)?;
        records.insert(record.name.clone(), record);
        Ok(())
    }

    /// Forgets a VM; forgetting one that is not there is fine.
    ///
    /// # Errors
    /// [`VmStoreError::Io`].
    pub fn remove(&self, name: &str) -> Result<(), VmStoreError> {
        let mut records = self.lock();
        let path = self.path(name);
        match std::fs::remove_file(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(io_error("remove", &path, source)),
        }
        records.remove(name);
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, VmRecord>> {
        // A panic while the lock is held leaves the map as it was on disk or one record behind: both are usable.
        self.records.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }

    fn write(&self, record: &VmRecord) -> Result<(), VmStoreError> {
        let path = self.path(&record.name);
        write_atomically(&path, record).map_err(|source| io_error("write", &path, source))
    }
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> VmStoreError {
    VmStoreError::Io { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> VmRecord {
        VmRecord {
            name: name.to_owned(),
            pid: 1,
            pid_start: 2,
            qmp_socket: PathBuf::from("/run/q"),
            vm_dir: PathBuf::from("/run"),
            backing: vmove_types::Backing::Thp,
            command_line: vec!["qemu-system-x86_64".to_owned()],
            environment: Vec::new(),
            ram: Vec::new(),
            overlays: Vec::new(),
            adopted: false,
            session: None,
        }
    }

    #[test]
    fn who_came_later_under_a_name_is_told_from_who_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let store = VmStore::open(dir.path()).unwrap();
        let ours = record("a");
        assert_eq!(store.other_than(&ours, "s1"), None);
        store.put(ours.clone()).unwrap();
        assert_eq!(store.other_than(&ours, "s1"), None);
        // Written down before its process was known.
        store.put(VmRecord { pid: 7, session: Some("s1".to_owned()), ..ours.clone() }).unwrap();
        assert_eq!(store.other_than(&ours, "s1"), None);
        let later = VmRecord { pid: 7, session: Some("s2".to_owned()), ..ours.clone() };
        store.put(later.clone()).unwrap();
        assert_eq!(store.other_than(&ours, "s1"), Some(later));
        let reused = VmRecord { pid_start: 99, ..ours.clone() };
        store.put(reused.clone()).unwrap();
        assert_eq!(store.other_than(&ours, "s1"), Some(reused));
    }

    #[test]
    fn records_survive_a_reopen_whatever_their_script() {
        let dir = tempfile::tempdir().unwrap();
        let store = VmStore::open(dir.path()).unwrap();
        for name in ["a", "two words", "Ελλάδα-機械"] {
            store.insert(record(name)).unwrap();
        }
        store.remove("a").unwrap();
        let names: Vec<_> = VmStore::open(dir.path()).unwrap().list().into_iter().map(|r| r.name).collect();
        assert_eq!(names, ["two words", "Ελλάδα-機械"]);
    }

    #[test]
    fn a_second_vm_of_the_same_name_and_bad_names_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let store = VmStore::open(dir.path()).unwrap();
        store.insert(record("a")).unwrap();
        assert!(matches!(store.insert(record("a")), Err(VmStoreError::Exists(_))));
        for bad in ["", "..", "a/b", "a\nb", &"x".repeat(65)] {
            assert!(matches!(store.put(record(bad)), Err(VmStoreError::BadName { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_damaged_record_names_its_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("x.json"), "{").unwrap();
        let text = VmStore::open(dir.path()).unwrap_err().to_string();
        assert!(text.contains("x.json"), "{text}");
    }
}
