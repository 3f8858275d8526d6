//! A VM that is being started: what must go away again if it does not come to be.
//!
//! A note in the VM's folder names what was made, so that also the next daemon can clean up after one that was killed in
//! the middle. It is gone once the record of the VM is there.

use std::path::{Path, PathBuf};

use crate::files::{read_json, write_atomically};
use crate::store::VmStore;
use serde::{Deserialize, Serialize};
use vmove_qmp::RunLayout;
use vmove_qmp::process::end_started_in;

use crate::blocking::run_blocking;

const NOTE: &str = "starting.json";

/// What was made for a VM.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Note {
    /// Name of the VM.
    pub name: String,
    /// Files that did not exist before: RAM, overlays of a child's disks.
    pub ram: Vec<PathBuf>,
}

/// Makes the folder of a VM, empty, with its note. Its QEMU may make files there.
pub fn begin(layout: &RunLayout, note: &Note) -> std::io::Result<()> {
    let vm_dir = &layout.vm_dir;
    // What an earlier VM of this name left there: a log, sockets.
    match std::fs::remove_dir_all(vm_dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    crate::files::make_private_dir(vm_dir)?;
    // Nobody would find the folder again.
    write_atomically(&vm_dir.join(NOTE), note)
        .and_then(|()| layout.confinement.open_folder(vm_dir))
        .inspect_err(|_| drop(std::fs::remove_dir_all(vm_dir)))
}

/// Files of all VMs that are being started.
pub fn made(run_dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(run_dir).into_iter().flatten().flatten();
    let notes = entries.filter_map(|entry| read_json::<Note>(&entry.path().join(NOTE)).ok());
    notes.flat_map(|note| note.ram).collect()
}

/// The VM has its record: there is nothing to undo any more.
pub fn done(vm_dir: &Path) {
    if let Err(error) = std::fs::remove_file(vm_dir.join(NOTE)) {
        tracing::warn!(dir = %vm_dir.display(), %error, "could not remove the note of a start");
    }
}

/// Removes everything that the note names, and the folder.
pub fn undo(vm_dir: &Path, note: &Note) {
    for path in &note.ram {
        remove(path);
    }
    if let Err(error) = std::fs::remove_dir_all(vm_dir) {
        tracing::warn!(dir = %vm_dir.display(), %error, "could not remove the folder of a VM that did not start");
    }
}

/// Removes a file; that it is gone already is fine.
pub fn remove(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "could not remove a file");
        }
        _ => {}
    }
}

/// Starts that an earlier daemon did not live to finish: the folder of each VM, and what was made for it.
pub fn left(run_dir: &Path, vms: &VmStore) -> Vec<(PathBuf, Note)> {
    let entries = std::fs::read_dir(run_dir).into_iter().flatten().flatten();
    let note = |dir: PathBuf| -> Option<(PathBuf, Note)> {
        let note = read_json(&dir.join(NOTE)).ok()?;
        Some((dir, note))
    };
    let (finished, left): (Vec<_>, Vec<_>) =
        entries.filter_map(|entry| note(entry.path())).partition(|(_, note)| vms.has(&note.name));
    finished.iter().for_each(|(dir, _)| done(dir));
    left
}

/// Cleans up after a start that was not finished.
pub async fn clean(dir: PathBuf, note: Note) {
    tracing::warn!(vm = %note.name, "an earlier vmoved was ended while it started this VM: cleaning up");
    match end_started_in(&dir).await {
        Ok(ended) if ended.is_empty() => {}
        Ok(ended) => tracing::warn!(vm = %note.name, ?ended, "ended QEMUs that have no record"),
        Err(error) => tracing::error!(vm = %note.name, %error, "a QEMU does not end"),
    }
    let _ = run_blocking(move || undo(&dir, &note)).await;
}

#[cfg(test)]
mod tests {
    use vmove_qmp::confine::Confinement;

    use super::*;

    fn layout(run: &Path, name: &str) -> RunLayout {
        crate::layout::of_vm(run, run, name, vmove_types::Backing::Thp, &Confinement::default())
    }

    #[tokio::test]
    async fn a_start_that_was_cut_off_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (run, ram) = (dir.path().join("run"), dir.path().join("ram0"));
        let vm_dir = run.join("two words");
        let note = Note { name: "two words".to_owned(), ram: vec![ram.clone()] };
        begin(&layout(&run, "two words"), &note).unwrap();
        std::fs::write(&ram, "x").unwrap();
        let argv = ["sleep", "600"].map(Into::into);
        let orphan = vmove_qmp::QemuProcess::spawn(
            &argv,
            &vm_dir,
            &vmove_qmp::process::log_in(&vm_dir),
            &Confinement::default(),
        )
        .unwrap();
        let vms = VmStore::open(&dir.path().join("vms")).unwrap();
        for (dir, note) in left(&run, &vms) {
            clean(dir, note).await;
        }
        assert!(!orphan.alive());
        assert!(!ram.exists() && !vm_dir.exists());
    }

    #[test]
    fn the_folder_of_a_new_vm_is_empty_but_for_the_note() {
        let dir = tempfile::tempdir().unwrap();
        let vm_dir = dir.path().join("a");
        std::fs::create_dir(&vm_dir).unwrap();
        std::fs::write(vm_dir.join("old.log"), "x").unwrap();
        begin(&layout(dir.path(), "a"), &Note { name: "a".to_owned(), ram: Vec::new() }).unwrap();
        assert_eq!(std::fs::read_dir(&vm_dir).unwrap().count(), 1);
        done(&vm_dir);
        assert_eq!(std::fs::read_dir(&vm_dir).unwrap().count(), 0);
    }
}
