//! What every session of a daemon shares, and where things are on this node.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmove_qmp::cmdline::{RamBacking, RunLayout};

use crate::engine::EngineConfig;
use crate::vm::VmStore;

/// Settings and registry of this daemon.
#[derive(Debug)]
pub(crate) struct Node {
    pub config: EngineConfig,
    pub vms: Arc<VmStore>,
}

impl Node {
    /// Where a VM's files are here.
    pub(crate) fn layout(&self, name: &str, backing: RamBacking) -> RunLayout {
        layout(&self.config.run_dir, &self.config.memory_dir, name, backing)
    }

    /// Folder of a session's journal.
    pub(crate) fn session_dir(&self, id: impl std::fmt::Display) -> PathBuf {
        self.config.sessions_dir.join(id.to_string())
    }

    /// Page maps live on tmpfs, beside guest memory: writing one must never wait for a disk.
    pub(crate) fn page_map_dir(&self) -> PathBuf {
        memory_dir(&self.config.memory_dir, RamBacking::Thp)
    }
}

/// Where a VM's files are on a node with these folders. The daemon uses the same for VMs that it starts itself.
#[must_use]
pub fn layout(run_dir: &Path, memory: &Path, name: &str, backing: RamBacking) -> RunLayout {
    let vm_dir = run_dir.join(name);
    RunLayout {
        qmp_socket: vm_dir.join("qmp.sock"),
        vm_dir,
        memory_dir: memory_dir(memory, backing),
        backing,
        name: name.to_owned(),
    }
}

/// The folder for RAM files of one backing.
#[must_use]
pub fn memory_dir(memory: &Path, backing: RamBacking) -> PathBuf {
    memory.join(backing_name(backing))
}

/// The word for a backing in records, reports and folders.
#[must_use]
pub const fn backing_name(backing: RamBacking) -> &'static str {
    match backing {
        RamBacking::Thp => "thp",
        RamBacking::Hugetlb2M => "hugetlb-2m",
        RamBacking::Hugetlb1G => "hugetlb-1g",
    }
}

/// The backing for such a word.
#[must_use]
pub fn backing_named(name: &str) -> Option<RamBacking> {
    [RamBacking::Thp, RamBacking::Hugetlb2M, RamBacking::Hugetlb1G]
        .into_iter()
        .find(|b| backing_name(*b) == name)
}

/// The same for the memory crate.
#[must_use]
pub const fn memory_backing(backing: RamBacking) -> vmove_memory::Backing {
    match backing {
        RamBacking::Thp => vmove_memory::Backing::Thp,
        RamBacking::Hugetlb2M => vmove_memory::Backing::Hugetlb2M,
        RamBacking::Hugetlb1G => vmove_memory::Backing::Hugetlb1G,
    }
}

/// The command that starts QEMU with additional environment variables: `env(1)` execs in place, so the process id stays QEMU's.
#[must_use]
pub fn with_environment(
    argv: Vec<std::ffi::OsString>,
    environment: &[(String, String)],
) -> Vec<std::ffi::OsString> {
    if environment.is_empty() {
        return argv;
    }
    let variables = environment.iter().map(|(name, value)| format!("{name}={value}").into());
    std::iter::once("env".into()).chain(variables).chain(argv).collect()
}
