//! The VMs of this node, as kept in the state directory.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::disk::{Disk, KernelDisk};
use crate::files::write_durably_on;
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
    /// Somebody is at work on a VM of this name, which is not there yet, or not gone yet.
    #[error(
        "A VM named {0:?} is being started on this node, or what is left of one is being removed: try again in a moment"
    )]
    Held(String),
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
    #[error(
        "{path} is not a VM record: {why}; put it right and start vmoved again, or move it away and adopt the VM again"
    )]
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
            Self::Exists(_) | Self::Held(_) => Code::NameTaken,
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

/// The records of all VMs of a node: one JSON file each, replaced atomically and synced to the disk, with a copy in memory.
#[derive(Debug)]
pub struct VmStore {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    state: Mutex<State>,
    /// Names that are held: the record comes last, and goes first.
    held: Mutex<BTreeSet<String>>,
}

#[derive(Debug, Default)]
struct State {
    records: BTreeMap<String, VmRecord>,
    /// Names of the records that are newer in memory than on the disk, and what the kernel said.
    owed: BTreeMap<String, Owed>,
    /// Files that are no records, by the name that the VM should have.
    damaged: BTreeMap<String, DamagedRecord>,
}

/// A name that nobody else can hold until this is dropped.
#[derive(Debug)]
pub struct HeldName {
    vms: Arc<VmStore>,
    name: String,
}

impl Drop for HeldName {
    fn drop(&mut self) {
        self.vms.held().remove(&self.name);
    }
}

/// A record that could not be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owed {
    /// Its file.
    pub path: PathBuf,
    /// The kernel's answer to the first attempt.
    pub error: String,
    /// When that was.
    pub since: SystemTime,
}

/// A file among the records that is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedRecord {
    /// The name that the VM should have.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
}

impl From<DamagedRecord> for VmStoreError {
    fn from(DamagedRecord { path, why, .. }: DamagedRecord) -> Self {
        Self::Damaged { path, why }
    }
}

impl VmStore {
    /// Opens (and makes) the folder and reads every record. One that cannot be read is [`damaged`](Self::damaged) and is in nobody's way.
    ///
    /// # Errors
    /// [`VmStoreError::Io`], with the path.
    pub fn open(dir: &Path) -> Result<Self, VmStoreError> {
        Self::open_on(Arc::new(KernelDisk), dir)
    }

    /// As [`VmStore::open`], on another disk than the kernel's.
    ///
    /// # Errors
    /// As [`VmStore::open`].
    pub fn open_on(disk: Arc<dyn Disk>, dir: &Path) -> Result<Self, VmStoreError> {
        disk.create_dir_all(dir).map_err(|source| io_error("create", dir, source))?;
        let mut state = State::default();
        for entry in disk.list(dir).map_err(|source| io_error("list", dir, source))? {
            let path = dir.join(entry.name);
            if path.extension().is_some_and(|e| e == "part") {
                // Of a record that a killed process was writing.
                let _ = disk.remove_file(&path);
            }
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            match read(&*disk, &path) {
                Ok(record) => drop(state.records.insert(record.name.clone(), record)),
                Err(damaged) => {
                    tracing::error!(path = %path.display(), why = damaged.why, "a VM record cannot be read: nothing is done with this VM");
                    state.damaged.insert(damaged.name.clone(), damaged);
                }
            }
        }
        Ok(Self { disk, dir: dir.to_owned(), state: Mutex::new(state), held: Mutex::default() })
    }

    /// All records, by name.
    #[must_use]
    pub fn list(&self) -> Vec<VmRecord> {
        self.lock().records.values().cloned().collect()
    }

    /// Files that are no records, and are still there.
    #[must_use]
    pub fn damaged(&self) -> Vec<DamagedRecord> {
        let mut state = self.lock();
        state.damaged.retain(|_, damaged| self.disk.exists(&damaged.path));
        state.damaged.values().cloned().collect()
    }

    /// Whether the name is taken: by a VM, or by a file that cannot be read.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        !matches!(self.get(name), Err(VmStoreError::Unknown(_)))
    }

    /// One record.
    ///
    /// # Errors
    /// [`VmStoreError::Unknown`] or [`VmStoreError::Damaged`].
    pub fn get(&self, name: &str) -> Result<VmRecord, VmStoreError> {
        let state = self.lock();
        match state.records.get(name) {
            Some(record) => Ok(record.clone()),
            None => Err(state
                .not_damaged(&*self.disk, name)
                .err()
                .unwrap_or_else(|| VmStoreError::Unknown(name.to_owned()))),
        }
    }

    /// The VM of the name of `vm`, if it is neither that QEMU nor one that the session brings.
    #[must_use]
    pub fn other_than(&self, vm: &VmRecord, session: &str) -> Option<VmRecord> {
        let of_session = |found: &VmRecord| found.session.as_deref() == Some(session);
        let same = |found: &VmRecord| (found.pid, found.pid_start) == (vm.pid, vm.pid_start);
        self.get(&vm.name).ok().filter(|found| !same(found) && !of_session(found))
    }

    /// Holds a name, for a VM that is about to come or whose remains are being removed. `None` if somebody else holds it. Whether there is a VM of
    /// this name is not looked at.
    #[must_use]
    pub fn hold_name(self: &Arc<Self>, name: &str) -> Option<HeldName> {
        let held = self.held().insert(name.to_owned());
        held.then(|| HeldName { vms: Arc::clone(self), name: name.to_owned() })
    }

    /// Whether somebody holds a name.
    #[must_use]
    pub fn is_name_held(&self, name: &str) -> bool {
        self.held().contains(name)
    }

    /// Apart from the records: nobody waits for a disk with this lock.
    fn held(&self) -> MutexGuard<'_, BTreeSet<String>> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a VM.
    ///
    /// # Errors
    /// [`VmStoreError::BadName`], [`VmStoreError::Exists`], [`VmStoreError::Damaged`] or [`VmStoreError::Io`].
    pub fn insert(&self, record: VmRecord) -> Result<(), VmStoreError> {
        check_name(&record.name)?;
        let mut state = self.lock();
        if state.records.contains_key(&record.name) {
            return Err(VmStoreError::Exists(record.name));
        }
        self.write(record, &mut state)
    }

    /// Replaces or adds a VM.
    ///
    /// # Errors
    /// [`VmStoreError::BadName`], [`VmStoreError::Damaged`] or [`VmStoreError::Io`].
    pub fn put(&self, record: VmRecord) -> Result<(), VmStoreError> {
        check_name(&record.name)?;
        self.write(record, &mut self.lock())
    }

    /// As [`VmStore::put`], for a VM that is here whether its record can be written or not: [`VmStore::write_owed`] tries again.
    ///
    /// # Errors
    /// [`VmStoreError::BadName`], [`VmStoreError::Damaged`].
    pub fn put_owing(&self, record: VmRecord) -> Result<(), VmStoreError> {
        check_name(&record.name)?;
        self.write_owing(record, &mut self.lock())
    }

    /// Changes the record of this very QEMU, as [`VmStore::put_owing`] does. False, and nothing is changed, if the VM has ended.
    ///
    /// # Errors
    /// As [`VmStore::put_owing`].
    pub fn change_owing(
        &self,
        vm: &VmRecord,
        change: impl FnOnce(&mut VmRecord),
    ) -> Result<bool, VmStoreError> {
        let mut state = self.lock();
        let same = |found: &&VmRecord| (found.pid, found.pid_start) == (vm.pid, vm.pid_start);
        let Some(mut record) = state.records.get(&vm.name).filter(same).cloned() else { return Ok(false) };
        change(&mut record);
        self.write_owing(record, &mut state).map(|()| true)
    }

    fn write_owing(&self, record: VmRecord, state: &mut State) -> Result<(), VmStoreError> {
        match self.write(record.clone(), state) {
            Err(VmStoreError::Io { path, source, .. }) => {
                let error = source.to_string();
                if !state.owed.contains_key(&record.name) {
                    tracing::warn!(vm = record.name, path = %path.display(), error, "cannot write a VM record; trying again");
                }
                let first = || Owed { path, error, since: SystemTime::now() };
                state.owed.entry(record.name.clone()).or_insert_with(first);
                state.records.insert(record.name.clone(), record);
                Ok(())
            }
            other => other,
        }
    }

    /// What keeps the record of this VM from the disk, if it is newer in memory.
    #[must_use]
    pub fn owed(&self, name: &str) -> Option<Owed> {
        self.lock().owed.get(name).cloned()
    }

    /// Tries again to write what [`VmStore::put_owing`] could not.
    pub fn write_owed(&self) {
        let names: BTreeSet<String> = self.lock().owed.keys().cloned().collect();
        for name in names {
            let mut state = self.lock();
            let Some(record) = state.records.get(&name).cloned() else {
                state.owed.remove(&name);
                continue;
            };
            if self.write(record, &mut state).is_ok() {
                tracing::info!(vm = name, "a VM record that could not be written is written");
            }
        }
    }

    /// Forgets a VM; forgetting one that is not there is fine.
    ///
    /// # Errors
    /// [`VmStoreError::Io`].
    pub fn remove(&self, name: &str) -> Result<(), VmStoreError> {
        let mut state = self.lock();
        state.not_damaged(&*self.disk, name)?;
        let path = self.path(name);
        match self.disk.remove_file(&path).and_then(|()| self.disk.sync_dir(&self.dir)) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(io_error("remove", &path, source)),
        }
        state.records.remove(name);
        state.owed.remove(name);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held leaves the map as it was on disk or one record behind: both are usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }

    fn write(&self, record: VmRecord, state: &mut State) -> Result<(), VmStoreError> {
        state.not_damaged(&*self.disk, &record.name)?;
        let path = self.path(&record.name);
        write_durably_on(&*self.disk, &path, &record).map_err(|source| io_error("write", &path, source))?;
        state.owed.remove(&record.name);
        state.records.insert(record.name.clone(), record);
        Ok(())
    }
}

impl State {
    /// A file that cannot be read is left as it is, until somebody has moved it away.
    fn not_damaged(&self, disk: &dyn Disk, name: &str) -> Result<(), VmStoreError> {
        match self.damaged.get(name) {
            Some(damaged) if disk.exists(&damaged.path) => Err(damaged.clone().into()),
            _ => Ok(()),
        }
    }
}

fn read(disk: &dyn Disk, path: &Path) -> Result<VmRecord, DamagedRecord> {
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let damaged = |why: String| DamagedRecord { name: name.clone(), path: path.to_owned(), why };
    let text = disk.read(path).map_err(|error| damaged(error.to_string()))?;
    let record: VmRecord = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    if record.name == name {
        return Ok(record);
    }
    Err(damaged(format!("it is the record of {:?}, expected {name:?}", record.name)))
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
            devices: Vec::new(),
            adopted: false,
            libvirt: None,
            session: None,
        }
    }

    #[test]
    fn a_name_is_held_by_one_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(VmStore::open(dir.path()).unwrap());
        let held = store.hold_name("web").unwrap();
        assert!(store.hold_name("web").is_none() && store.is_name_held("web"));
        assert!(!store.is_name_held("db"));
        drop(held);
        assert!(store.hold_name("web").is_some());
    }

    #[test]
    fn the_record_of_a_vm_that_has_ended_does_not_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let store = VmStore::open(dir.path()).unwrap();
        store.insert(record("web")).unwrap();
        let rename = |now: &mut VmRecord| now.command_line.push("-S".to_owned());
        assert!(store.change_owing(&record("web"), rename).unwrap());
        assert_eq!(store.get("web").unwrap().command_line.len(), 2);
        let other = VmRecord { pid_start: 3, ..record("web") };
        assert!(!store.change_owing(&other, rename).unwrap(), "another QEMU has the name now");
        store.remove("web").unwrap();
        assert!(!store.change_owing(&record("web"), rename).unwrap());
        assert!(!store.has("web"));
    }

    /// The files of `tests/formats` were written by that release; only paths and process ids are others.
    #[test]
    fn records_of_0_1_are_read() {
        use vmove_skip::formats::{self, WHAT_TO_DO};
        for path in formats::of_release(env!("CARGO_MANIFEST_DIR"), "0.1") {
            let dir = tempfile::tempdir().unwrap();
            std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            let store = VmStore::open(dir.path()).unwrap_or_else(|error| panic!("{error}. {WHAT_TO_DO}"));
            formats::check(&path, &store.list().pop().unwrap());
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
    fn a_damaged_record_is_in_nobodys_way_and_is_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        VmStore::open(dir.path()).unwrap().insert(record("a")).unwrap();
        let path = dir.path().join("x.json");
        std::fs::write(&path, "{").unwrap();
        let store = VmStore::open(dir.path()).unwrap();
        assert_eq!(store.list().len(), 1, "the others are there");
        let text = store.get("x").unwrap_err().to_string();
        assert!(text.contains("x.json"), "{text}");
        assert!(store.has("x") && store.has("a") && !store.has("b"));
        assert_eq!(
            store.damaged().first().map(|d| (d.name.clone(), d.path.clone())),
            Some(("x".to_owned(), path.clone()))
        );
        for refused in [
            store.insert(record("x")),
            store.put(record("x")),
            store.put_owing(record("x")),
            store.remove("x"),
        ] {
            assert!(matches!(refused, Err(VmStoreError::Damaged { .. })), "{refused:?}");
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{", "it is as it was");
        std::fs::remove_file(&path).unwrap();
        assert!(store.damaged().is_empty());
        store.insert(record("x")).unwrap();
    }

    /// A folder that cannot be written to stands for a full disk: the record goes on in memory, and is written once it can be.
    #[test]
    fn a_record_that_cannot_be_written_is_owed() {
        let dir = tempfile::tempdir().unwrap();
        let (vms, away) = (dir.path().join("vms"), dir.path().join("away"));
        let store = VmStore::open(&vms).unwrap();
        std::fs::rename(&vms, &away).unwrap();
        assert!(matches!(store.put(record("a")), Err(VmStoreError::Io { .. })));
        assert!(!store.has("a"), "what was refused is not there");
        store.put_owing(record("a")).unwrap();
        assert_eq!(store.owed("a").unwrap().path, vms.join("a.json"));
        store.write_owed();
        assert!(store.has("a") && store.owed("a").is_some());
        std::fs::rename(&away, &vms).unwrap();
        store.write_owed();
        assert_eq!(store.owed("a"), None);
        assert!(VmStore::open(&vms).unwrap().has("a"));
    }
}
