//! What outlives the daemon: how far a fork has come, and which VM came from which.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmove_memory::QemuMapping;
use vmove_node::files::{read_all_json, read_json, write_atomically};
use vmove_node::record::VmRecord;

use crate::CloneError;
use crate::check::Way;
use crate::disk::Step;
use crate::files::remove_file;

/// How far a fork has come. Written down before the step is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForkPhase {
    /// Files are being made; the guest has not noticed.
    Begun,
    /// The guest is being stopped; its memory is the RAM file's, or becomes private while it stands still.
    Stopping,
    /// Memory is write-protected and on its way to the template; the guest is about to run again, or does.
    Keeping,
    /// The template is whole: memory is private and the RAM file frozen, or it was copied. The guest is about to run again, or does.
    Frozen,
    /// All children run.
    Complete,
}

impl ForkPhase {
    /// For logs.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Begun => "begun",
            Self::Stopping => "stopping",
            Self::Keeping => "keeping",
            Self::Frozen => "frozen",
            Self::Complete => "complete",
        }
    }
}

/// A RAM file on its way to become a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrozenFile {
    /// Where the VM's record says its RAM is, before and after.
    pub path: PathBuf,
    /// The new, empty file that takes its place; no path if memory is copied.
    pub home: PathBuf,
    /// The name under which the frozen file stays, or the file that memory is copied to.
    pub template: PathBuf,
    /// Device and inode of the guest's RAM file at the fork.
    pub identity: (u64, u64),
}

/// Journal of a fork.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForkRecord {
    /// Its id.
    pub id: String,
    /// The guest, as it was registered.
    pub vm: VmRecord,
    /// How far it has come.
    pub phase: ForkPhase,
    /// How memory is frozen.
    #[serde(default)]
    pub way: Way,
    /// Guest code ran before.
    pub was_running: bool,
    /// RAM files.
    pub files: Vec<FrozenFile>,
    /// Where they are mapped.
    pub mappings: Vec<QemuMapping>,
    /// Folder of the template.
    pub template: PathBuf,
    /// Whether the template is to stay.
    pub keep: bool,
    /// Names of the children.
    pub children: Vec<String>,
    /// Disks, and the overlays that the guest gets.
    #[serde(default)]
    pub disks: Vec<Step>,
}

/// What is known of a VM that was forked, or came from a fork.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Name of the VM.
    pub vm: String,
    /// Process id of its QEMU.
    pub pid: i32,
    /// Start time of that process, against reuse of the id; written with the boot.
    #[serde(with = "vmove_node::boot")]
    pub pid_start: u64,
    /// The VM or the template that it came from; `None` for one that was only forked itself.
    pub parent: Option<String>,
    /// Its number among the children of its parent, from 1; 0 without one.
    pub index: u32,
    /// The last fork it took part in.
    pub fork: String,
    /// The node that it is on, if not this one: then it is only remembered, so that its number is not given again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Its memory, where that is private: what the guest has written is in none of its RAM files. Empty once it has memory
    /// of its own.
    pub private: Vec<QemuMapping>,
    /// It is stopped for moments while its memory is moved, and is to be set running if that is cut off.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped_to_move: bool,
    /// Its parent's guest asked for it: it counts among what all guests may take of this host.
    #[serde(default)]
    pub by_guest: bool,
    /// From which guest it comes in the end, if guests asked for all forks in between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<Lineage>,
}

/// Where a child comes from that guests have asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage {
    /// The guest that forked itself first: `NODE/VM`.
    pub root: String,
    /// 1 for its children, 2 for theirs.
    pub depth: u32,
}

/// All members of a node: one JSON file each.
#[derive(Debug)]
pub struct Members {
    dir: PathBuf,
}

impl Members {
    /// Opens (and makes) the folder.
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn open(dir: &Path) -> Result<Self, CloneError> {
        std::fs::create_dir_all(dir).map_err(CloneError::io("create", dir))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// What is known of the VM of this record, as opposed to an earlier one of its name.
    #[must_use]
    pub fn get(&self, vm: &VmRecord) -> Option<Member> {
        let member: Member = read_json(&self.path(&vm.name)).ok()?;
        (member.pid == vm.pid && member.pid_start == vm.pid_start).then_some(member)
    }

    /// All of them that can be read, by name, also of VMs that have ended.
    #[must_use]
    pub fn list(&self) -> Vec<Member> {
        let mut all: Vec<Member> =
            read_all_json(&self.dir).into_iter().filter_map(|(_, read)| read.ok()).collect();
        all.sort_by(|a, b| (&a.parent, a.index, &a.vm).cmp(&(&b.parent, b.index, &b.vm)));
        all
    }

    /// Writes one down.
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn put(&self, member: &Member) -> Result<(), CloneError> {
        let path = self.path(&member.vm);
        write_atomically(&path, member).map_err(CloneError::io("write", &path))
    }

    /// Writes down that the memory of a guest is private since a fork, and where it is mapped; `before`: what was known of the guest.
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn note_private(
        &self,
        record: &VmRecord,
        before: Option<Member>,
        fork: &str,
        private: &[QemuMapping],
    ) -> Result<(), CloneError> {
        let (parent, index, by_guest, lineage) =
            before.map_or((None, 0, false, None), |m| (m.parent, m.index, m.by_guest, m.lineage));
        self.put(&Member {
            vm: record.name.clone(),
            pid: record.pid,
            pid_start: record.pid_start,
            parent,
            index,
            fork: fork.to_owned(),
            node: None,
            private: private.to_vec(),
            stopped_to_move: false,
            by_guest,
            lineage,
        })
    }

    /// Forgets one; that it is not there is fine.
    ///
    /// # Errors
    /// [`CloneError::Io`].
    pub fn remove(&self, vm: &str) -> Result<(), CloneError> {
        remove_file(&self.path(vm))
    }

    /// The file about the VM of this name, if there is one and it cannot be read: nobody knows then whether the VM's memory is private.
    #[must_use]
    pub fn unreadable(&self, vm: &str) -> Option<PathBuf> {
        let path = self.path(vm);
        let error = read_json::<Member>(&path).err()?;
        (error.kind() != std::io::ErrorKind::NotFound).then_some(path)
    }

    fn path(&self, vm: &str) -> PathBuf {
        self.dir.join(format!("{vm}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_told_from_earlier_vms_of_the_same_name() {
        let dir = tempfile::tempdir().unwrap();
        let members = Members::open(dir.path()).unwrap();
        let member = Member {
            vm: "two words".to_owned(),
            pid: 7,
            pid_start: 8,
            parent: Some("web".to_owned()),
            index: 1,
            fork: "f".to_owned(),
            node: None,
            private: Vec::new(),
            stopped_to_move: false,
            by_guest: false,
            lineage: None,
        };
        members.put(&member).unwrap();
        let record = |pid_start| -> VmRecord {
            serde_json::from_value(serde_json::json!({
                "name": "two words", "pid": 7, "pid_start": pid_start, "qmp_socket": "/q", "vm_dir": "/v",
                "backing": "thp", "command_line": [], "ram": [], "adopted": false,
            }))
            .unwrap()
        };
        assert_eq!(members.get(&record(8)), Some(member));
        assert_eq!(members.get(&record(9)), None);
        members.remove("two words").unwrap();
        members.remove("two words").unwrap();
        assert!(members.list().is_empty());
    }

    #[test]
    fn one_that_cannot_be_read_is_told_from_one_that_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let members = Members::open(dir.path()).unwrap();
        assert_eq!(members.unreadable("web"), None);
        std::fs::write(dir.path().join("web.json"), "{").unwrap();
        assert_eq!(members.unreadable("web"), Some(dir.path().join("web.json")));
        assert!(members.list().is_empty());
    }
}
