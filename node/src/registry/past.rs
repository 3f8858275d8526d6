//! Folders of VMs that are no more: their logs are kept for a while, for whoever wonders.

use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use vmove_qmp::process::{log_in, works_in};

use super::Registry;
use crate::blocking::run_blocking;

/// How often they are looked for.
pub(super) const LOOK: Duration = Duration::from_secs(60);

impl Registry {
    /// Removes the folders of VMs that ended so long ago. Those of VMs that are there, and of others in which is more than logs, stay.
    pub(super) async fn remove_past(self: &Arc<Self>) {
        let (run_dir, keep) = (self.run_dir.clone(), self.keep_stopped);
        let past = run_blocking(move || past(&run_dir, keep)).await.unwrap_or_default();
        for folder in past {
            let Some(vm) = folder.file_name().and_then(OsStr::to_str).map(str::to_owned) else { continue };
            // Taken by a VM that is there, by a migration or by a start. Held meanwhile, so that none takes it in between.
            let Ok(_reserved) = self.reserve(&vm) else { continue };
            let removed = run_blocking(move || remove(&folder, keep)).await;
            match removed.map_err(std::io::Error::other).and_then(|removed| removed) {
                Ok(true) => tracing::info!(vm, "removed the folder of a VM that ended long ago"),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(vm, %error, "could not remove the folder of a VM that is no more");
                }
            }
        }
    }
}

/// Folders in which nothing but logs has been for so long.
fn past(run_dir: &Path, keep: Duration) -> Vec<PathBuf> {
    let entries = fs::read_dir(run_dir).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).filter(|folder| logs_of_past(folder, keep).is_some()).collect()
}

/// What is in the folder of a VM, if that is QEMU's log and other [traces](is_trace) only, and none was written to for so long.
fn logs_of_past(folder: &Path, keep: Duration) -> Option<Vec<PathBuf>> {
    let entries: Vec<DirEntry> = fs::read_dir(folder).ok()?.collect::<Result<_, _>>().ok()?;
    let is_vms = entries.iter().any(|entry| entry.path() == log_in(folder));
    if !is_vms || !entries.iter().all(is_trace) {
        return None;
    }
    // The folder itself changes when the socket of the monitor goes: at the end of a VM.
    let of_folder = fs::metadata(folder).and_then(|found| found.modified());
    let times = entries.iter().map(|entry| entry.metadata().and_then(|found| found.modified()));
    let last = times.chain([of_folder]).collect::<Result<Vec<_>, _>>().ok()?.into_iter().max()?;
    let age = SystemTime::now().duration_since(last).ok()?;
    (age >= keep).then(|| entries.iter().map(DirEntry::path).collect())
}

/// Whether nobody misses it: logs, sockets, pipes and process ids. An image of a disk, or what else a guest has written, is its owner's.
fn is_trace(entry: &DirEntry) -> bool {
    let Ok(kind) = entry.file_type() else { return false };
    let name = entry.file_name();
    let name = name.to_string_lossy();
    let is_log = || [".log", ".log.1", ".log.part", ".pid"].iter().any(|end| name.ends_with(end));
    kind.is_socket() || kind.is_fifo() || (kind.is_file() && is_log())
}

/// Removes a folder, unless something is new in it, or a process works there. False if so.
fn remove(folder: &Path, keep: Duration) -> std::io::Result<bool> {
    // Its name was not held yet when it was found.
    let Some(traces) = logs_of_past(folder, keep) else { return Ok(false) };
    if works_in(folder) {
        return Ok(false);
    }
    let log = log_in(folder);
    // By its log it is known as a VM's: that goes last.
    for path in traces.iter().filter(|path| **path != log).chain([&log]) {
        fs::remove_file(path)?;
    }
    // Not with whatever is new in it.
    fs::remove_dir(folder)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A folder that ended two hours ago.
    fn ended(run: &Path, name: &str, files: &[&str]) -> PathBuf {
        let folder = run.join(name);
        fs::create_dir(&folder).unwrap();
        for file in files {
            fs::write(folder.join(file), "x").unwrap();
        }
        for path in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).chain([folder.clone()])
        {
            let then = SystemTime::now() - Duration::from_secs(7200);
            fs::File::open(path).unwrap().set_modified(then).unwrap();
        }
        folder
    }

    #[test]
    fn only_folders_of_old_logs_are_past() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        let old = ended(run, "old", &["qemu.log", "qemu.log.1", "console.log", "vm.pid"]);
        ended(run, "with an image", &["qemu.log", "disk.qcow2"]);
        ended(run, "being started", &["qemu.log", "starting.json"]);
        ended(run, "no VM", &["other.log"]);
        ended(run, "empty", &[]);
        let below = ended(run, "with a folder", &["qemu.log"]);
        fs::create_dir(below.join("more")).unwrap();
        fs::write(run.join("file"), "x").unwrap();
        std::os::unix::fs::symlink(&old, run.join("link")).unwrap();
        // Its console still said something an hour ago.
        let late = ended(run, "late", &["qemu.log", "console.log"]);
        fs::write(late.join("console.log"), "panic").unwrap();
        let hour = Duration::from_secs(3600);
        assert_eq!(past(run, hour), std::slice::from_ref(&old));
        assert!(past(run, 3 * hour).is_empty());
        assert!(remove(&old, hour).unwrap());
        assert!(!old.exists() && late.exists());
        assert!(!remove(&late, hour).unwrap(), "something is new in it");
    }

    #[test]
    fn a_folder_in_which_a_process_works_stays() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("vm");
        fs::create_dir(&folder).unwrap();
        let log = fs::File::create(log_in(&folder)).unwrap();
        let _socket = UnixListener::bind(folder.join("qmp.sock")).unwrap();
        let mut process =
            std::process::Command::new("sleep").arg("600").current_dir(&folder).stdout(log).spawn().unwrap();
        assert!(!remove(&folder, Duration::ZERO).unwrap());
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(remove(&folder, Duration::ZERO).unwrap());
        assert!(!folder.exists());
    }
}
