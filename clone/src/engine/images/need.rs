//! Whether a guest of this node still reads images of another node, by what its disks are made of: not only children of the fork,
//! but theirs, too, and templates.

use std::io;
use std::path::{Path, PathBuf};

use crate::disk::{self, Layers};
use crate::template::{self, Saved};
use vmove_node::record::VmRecord;
use vmove_qmp::CommandLine;

use crate::engine::ForkEngine;
use vmove_node::registry::{process_of, starting};

/// An image that somebody has.
struct Had {
    file: PathBuf,
    /// As its owner states it. What a raw image holds is its guest's, whatever it looks like.
    format: Option<String>,
    /// It was made for a VM that lives, and is somewhere even where it is not seen.
    lives: bool,
}

impl Had {
    fn of(file: PathBuf, format: Option<String>) -> Self {
        Self { file, format, lives: false }
    }

    fn overlay(file: PathBuf, lives: bool) -> Self {
        Self { file, format: Some("qcow2".to_owned()), lives }
    }
}

impl ForkEngine {
    /// Whether an image leads to the sockets in `folder`. Blocks.
    pub(super) fn needs(&self, folder: &Path) -> bool {
        // First: a VM gets its record before its note is removed. What is no overlay there is guest memory.
        let starting = starting::made(self.registry.run_dir());
        let overlays = starting.into_iter().filter(|file| file.extension().is_some_and(|e| e == "qcow2"));
        let overlays = overlays.map(|file| Had::overlay(file, false));
        let mut images = overlays.chain(self.images_of_vms()).chain(self.other_images());
        images.any(|image| leads_to(&image, folder))
    }

    fn images_of_vms(&self) -> Vec<Had> {
        self.registry.records().iter().flat_map(images_of).collect()
    }

    /// Of templates, and of those that this node serves to others.
    fn other_images(&self) -> Vec<Had> {
        let loaded = template::list(self.registry.memory_dir());
        let saved = Saved::list(&self.saved);
        let manifests = loaded
            .iter()
            .map(|t| t.manifest().disks.clone())
            .chain(saved.into_iter().map(|s| s.manifest.disks));
        let mut found: Vec<Had> =
            manifests.flatten().map(|disk| Had::of(disk.file, Some(disk.format))).collect();
        let state = self.images.lock();
        let served = state.exports.values().flat_map(|export| &export.record.images);
        found.extend(served.map(|image| Had::of(image.file.clone(), Some(image.format.clone()))));
        found
    }
}

fn images_of(vm: &VmRecord) -> Vec<Had> {
    let line = CommandLine::parse(vm.command_line.iter().map(Into::into).collect());
    let images = line.and_then(|line| line.images()).unwrap_or_default();
    let stated = images.into_iter().map(|image| Had::of(disk::absolute(&image.file, vm), image.format));
    let lives = process_of(vm).is_some();
    stated.chain(vm.overlays.iter().map(|file| Had::overlay(file.clone(), lives))).collect()
}

/// In doubt it does: a guest would lose its disk.
fn leads_to(image: &Had, folder: &Path) -> bool {
    match disk::layers(&image.file, image.format.as_deref()) {
        Ok(Layers { other: Some(other), .. }) => other.contains(&*folder.to_string_lossy()),
        Ok(_) => false,
        // What is mounted there may be gone for a moment.
        Err(error) if error.kind() == io::ErrorKind::NotFound => image.lives,
        Err(error) => error.kind() != io::ErrorKind::InvalidData,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vmove_memory::Process;
    use vmove_node::qcow2;

    use super::*;

    fn vm(dir: &Path, words: &[&str], overlays: &[&Path]) -> VmRecord {
        let line: Vec<&str> = std::iter::once("qemu").chain(words.iter().copied()).collect();
        let pid = std::process::id();
        let record = json!({
            "name": "web", "pid": pid, "pid_start": Process::open(pid).unwrap().start_time(),
            "qmp_socket": dir.join("qmp"), "vm_dir": dir, "backing": "thp", "command_line": line, "ram": [],
            "overlays": overlays, "adopted": false,
        });
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn what_a_guest_writes_to_a_raw_disk_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let sockets = dir.path().join("in-1");
        let base = format!(r#"json:{{"driver":"nbd","path":"{}/0.sock"}}"#, sockets.display());
        qcow2::Empty::over(1 << 20, Path::new(&base), "raw").create(&dir.path().join("disk")).unwrap();
        let needed = |words: &[&str]| {
            images_of(&vm(dir.path(), words, &[])).iter().any(|image| leads_to(image, &sockets))
        };
        let node = |options: &str| needed(&["-blockdev", options, "-device", "virtio-blk-pci,drive=d"]);
        assert!(!needed(&["-drive", "file={vmdir}/disk,format=raw"]));
        assert!(!node("raw,node-name=d,file.driver=file,file.filename=disk"));
        assert!(!node("file,node-name=d,filename=disk"));
        assert!(node("qcow2,node-name=d,file.driver=file,file.filename=disk"));
        for stated in [",format=qcow2", ",driver=qcow2", ""] {
            assert!(needed(&["-drive", &format!("file={{vmdir}}/disk{stated}")]), "{stated}");
        }
        let overlaid = vm(dir.path(), &[], &[&dir.path().join("disk")]);
        assert!(images_of(&overlaid).iter().any(|image| leads_to(image, &sockets)));
        assert!(!images_of(&overlaid).iter().any(|image| leads_to(image, &dir.path().join("in-2"))));
    }

    #[test]
    fn an_overlay_that_is_out_of_sight_is_in_doubt_as_long_as_its_vm_lives() {
        let dir = tempfile::tempdir().unwrap();
        let needed =
            |vm: &VmRecord| images_of(vm).iter().any(|image| leads_to(image, &dir.path().join("in-1")));
        let over = dir.path().join("over");
        let lives = vm(dir.path(), &["-drive", "file=over,format=qcow2"], &[&over]);
        let ended = VmRecord { pid_start: lives.pid_start + 1, ..lives.clone() };
        assert!(needed(&lives) && !needed(&ended));
        // An image below it.
        qcow2::Empty::over(1 << 20, &dir.path().join("base"), "qcow2").create(&over).unwrap();
        assert!(needed(&lives) && !needed(&ended));
        std::fs::File::create(dir.path().join("base")).unwrap().set_len(1 << 20).unwrap();
        assert!(!needed(&lives));
        // What it was not made over may be gone for good.
        assert!(!needed(&vm(dir.path(), &["-drive", "file=gone,format=qcow2"], &[])));
    }
}
