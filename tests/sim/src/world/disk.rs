//! A disk in memory: full or failing when it is to be, and as a killed daemon left it. Files of guest memory are real ones, on tmpfs.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use vmove_node::disk::{DirEntry, Disk, DiskFile};

use crate::life::Life;
use crate::plan::DiskError;
use crate::world::{Fate, World};

/// What is on the disk of a node, whatever becomes of its daemons.
#[derive(Debug, Default)]
pub struct Files {
    files: BTreeMap<PathBuf, File>,
    dirs: BTreeMap<PathBuf, u64>,
    /// Counts changes, in place of a clock.
    changes: u64,
}

#[derive(Debug, Default, Clone)]
struct File {
    bytes: Vec<u8>,
}

impl Files {
    /// All files.
    #[must_use]
    pub fn paths(&self) -> Vec<PathBuf> {
        self.files.keys().cloned().collect()
    }

    /// The bytes of a file.
    #[must_use]
    pub fn bytes(&self, path: &Path) -> Option<Vec<u8>> {
        self.files.get(path).map(|file| file.bytes.clone())
    }

    fn touch(&mut self, dir: Option<&Path>) {
        self.changes += 1;
        let changes = self.changes;
        if let Some(seen) = dir.and_then(|dir| self.dirs.get_mut(dir)) {
            *seen = changes;
        }
    }
}

/// A disk that fails.
#[derive(Debug, Clone, Copy)]
pub struct DiskFault {
    /// The kernel's answer.
    pub error: DiskError,
    /// Until when.
    pub until: Instant,
    /// Of what is written, so many percent are, before the error.
    pub written_percent: u64,
    /// What an error left cannot be cut off either.
    pub cuts_fail: bool,
    /// Nothing can be read either.
    pub reads_fail: bool,
}

/// A node's disk, as one life of its daemon uses it.
#[derive(Clone)]
pub struct SimDisk {
    world: World,
    life: Arc<Life>,
    files: Arc<Mutex<Files>>,
    /// Below it are real files.
    real: PathBuf,
}

impl std::fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimDisk").field("life", &self.life).finish_non_exhaustive()
    }
}

fn dead() -> io::Error {
    io::Error::other("the daemon was killed")
}

fn lock(files: &Mutex<Files>) -> MutexGuard<'_, Files> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}

fn errno(error: DiskError) -> io::Error {
    match error {
        DiskError::NoSpace => rustix::io::Errno::NOSPC.into(),
        DiskError::Io => rustix::io::Errno::IO.into(),
    }
}

impl SimDisk {
    /// For a life.
    #[must_use]
    pub fn new(world: &World, life: &Arc<Life>) -> Self {
        let files = Arc::clone(&world.state().nodes[life.node()].files);
        let real = world.memory_dir(life.node());
        Self { world: world.clone(), life: Arc::clone(life), files, real }
    }

    fn fault(&self) -> Option<DiskFault> {
        let now = Instant::now();
        self.world.state().nodes[self.life.node()].disk_fault.filter(|fault| now < fault.until)
    }

    /// Whether nothing can be written now.
    #[must_use]
    pub fn fails(&self) -> bool {
        self.fault().is_some()
    }

    /// Whether there is no room left now.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.fault().is_some_and(|fault| fault.error == DiskError::NoSpace)
    }

    /// Changes something, unless the daemon dies first or the disk fails.
    fn change<T>(
        &self,
        what: &str,
        path: &Path,
        act: impl FnOnce(&mut Files) -> io::Result<T>,
    ) -> io::Result<T> {
        match self.world.step(&self.life, format!("{what} {}", shown(path))) {
            Fate::Dies(_) => Err(dead()),
            Fate::Done => match self.fault() {
                Some(fault) => {
                    self.world
                        .note(self.life.name(), format!("cannot {what} {}: {:?}", shown(path), fault.error));
                    Err(errno(fault.error))
                }
                None => act(&mut lock(&self.files)),
            },
        }
    }

    /// As [`SimDisk::change`], for what needs no room.
    fn free<T>(
        &self,
        what: &str,
        path: &Path,
        act: impl FnOnce(&mut Files) -> io::Result<T>,
    ) -> io::Result<T> {
        match self.world.step(&self.life, format!("{what} {}", shown(path))) {
            Fate::Dies(_) => Err(dead()),
            Fate::Done => act(&mut lock(&self.files)),
        }
    }

    fn look<T>(&self, act: impl FnOnce(&Files) -> io::Result<T>) -> io::Result<T> {
        if !self.life.is_alive() {
            return Err(dead());
        }
        act(&lock(&self.files))
    }
}

/// Without what differs from run to run.
fn shown(path: &Path) -> String {
    let parts: Vec<_> = path.iter().rev().take(2).map(|part| part.to_string_lossy().into_owned()).collect();
    parts.into_iter().rev().collect::<Vec<_>>().join("/")
}

/// The state that a line of a journal speaks of.
fn said(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let after = |key: &str| text.split(key).nth(1).and_then(|rest| rest.split(['"', ',', '}']).next());
    // The record's own is the last: others are inside of what it holds.
    let state = text.match_indices("\"state\":\"").last().map(|(at, key)| &text[at + key.len()..]);
    let state = state.and_then(|rest| rest.split('"').next()).unwrap_or("");
    let flags = ["freed", "untold", "to_resume", "released", "abandoned", "final_applied"];
    let set = flags.iter().filter(|flag| after(&format!("\"{flag}\":")) == Some("true"));
    std::iter::once(state).chain(set.copied()).collect::<Vec<_>>().join(" ")
}

fn missing() -> io::Error {
    rustix::io::Errno::NOENT.into()
}

impl Disk for SimDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.change("create", path, |files| {
            if files.files.contains_key(path) {
                return Err(rustix::io::Errno::EXIST.into());
            }
            if !path.parent().is_some_and(|dir| files.dirs.contains_key(dir)) {
                return Err(missing());
            }
            files.files.insert(path.to_owned(), File::default());
            files.touch(path.parent());
            Ok(())
        })?;
        Ok(Box::new(OpenFile { disk: self.clone(), path: path.to_owned() }))
    }

    fn append(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.look(|files| files.files.contains_key(path).then_some(()).ok_or_else(missing))?;
        Ok(Box::new(OpenFile { disk: self.clone(), path: path.to_owned() }))
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        if let Some(fault) = self.fault().filter(|fault| fault.reads_fail) {
            return Err(errno(fault.error));
        }
        self.look(|files| files.bytes(path).ok_or_else(missing))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        if to.starts_with(&self.real) {
            return self.free("rename", to, |_| std::fs::rename(from, to));
        }
        self.change("rename", to, |files| {
            let file = files.files.remove(from).ok_or_else(missing)?;
            files.files.insert(to.to_owned(), file);
            files.touch(to.parent());
            Ok(())
        })
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        if path.starts_with(&self.real) {
            return self.free("remove", path, |_| std::fs::remove_file(path));
        }
        // What is not there is not worth a step.
        self.look(|files| files.files.contains_key(path).then_some(()).ok_or_else(missing))?;
        self.free("remove", path, |files| {
            files.files.remove(path).ok_or_else(missing)?;
            files.touch(path.parent());
            Ok(())
        })
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        if self.look(|files| Ok(files.dirs.contains_key(path)))? {
            return Ok(());
        }
        self.change("make folder", path, |files| {
            for dir in path.ancestors() {
                files.changes += 1;
                let changes = files.changes;
                files.dirs.entry(dir.to_owned()).or_insert(changes);
            }
            Ok(())
        })
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        self.free("remove folder", path, |files| {
            files.dirs.retain(|dir, _| !dir.starts_with(path));
            files.files.retain(|file, _| !file.starts_with(path));
            Ok(())
        })
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        if path.starts_with(&self.real) {
            return list_real(path);
        }
        self.look(|files| {
            if !files.dirs.contains_key(path) {
                return Err(missing());
            }
            let names = files.files.keys().chain(files.dirs.keys());
            let inside: BTreeSet<_> = names.filter(|name| name.parent() == Some(path)).collect();
            let entry = |name: &PathBuf| {
                let at = files.dirs.get(name).copied().unwrap_or(0);
                let modified = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(at));
                Some(DirEntry { name: name.file_name()?.to_str()?.to_owned(), modified })
            };
            Ok(inside.into_iter().filter_map(entry).collect())
        })
    }

    fn exists(&self, path: &Path) -> bool {
        self.look(|files| Ok(files.files.contains_key(path) || files.dirs.contains_key(path)))
            .unwrap_or(false)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.change("sync", path, |_| Ok(()))
    }
}

/// A file that is being written.
#[derive(Debug)]
struct OpenFile {
    disk: SimDisk,
    path: PathBuf,
}

impl OpenFile {
    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        let mut files = lock(&self.disk.files);
        files.files.get_mut(&self.path).ok_or_else(missing)?.bytes.extend_from_slice(bytes);
        Ok(())
    }
}

/// So many percent of these.
#[must_use]
pub fn part(bytes: &[u8], percent: u64) -> &[u8] {
    let len = bytes.len() as u64 * percent / 100;
    &bytes[..usize::try_from(len).unwrap_or(0)]
}

impl Write for OpenFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let what = format!("write {}: {}", shown(&self.path), said(bytes));
        let was_alive = self.disk.life.is_alive();
        match self.disk.world.step(&self.disk.life, what) {
            Fate::Dies(percent) => {
                if was_alive {
                    self.append(part(bytes, percent))?;
                }
                Err(dead())
            }
            Fate::Done => match self.disk.fault() {
                Some(fault) => {
                    let name = self.disk.life.name();
                    self.disk
                        .world
                        .note(name, format!("cannot write {}: {:?}", shown(&self.path), fault.error));
                    self.append(part(bytes, fault.written_percent))?;
                    Err(errno(fault.error))
                }
                None => {
                    self.append(bytes)?;
                    Ok(bytes.len())
                }
            },
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl DiskFile for OpenFile {
    fn cut(&mut self, bytes: u64) -> io::Result<()> {
        let now = self.bytes()?;
        if now == bytes {
            return Ok(());
        }
        let fails = self.disk.fault().filter(|fault| fault.cuts_fail);
        self.disk.free("cut", &self.path, |files| {
            if let Some(fault) = fails {
                return Err(errno(fault.error));
            }
            let file = files.files.get_mut(&self.path).ok_or_else(missing)?;
            file.bytes.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
            Ok(())
        })
    }

    fn bytes(&self) -> io::Result<u64> {
        self.disk.look(|files| Ok(files.files.get(&self.path).ok_or_else(missing)?.bytes.len() as u64))
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.change("sync", &self.path, |_| Ok(()))
    }
}

/// In the order of their names.
fn list_real(dir: &Path) -> io::Result<Vec<DirEntry>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        names.extend(entry?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names.into_iter().map(|name| DirEntry { name, modified: None }).collect())
}
