//! Where things are on this node.

use std::path::{Path, PathBuf};

use vmove_qmp::RunLayout;
use vmove_qmp::confine::Confinement;
use vmove_types::Backing;

/// Where a VM's files are on a node with these folders. The daemon uses the same for VMs that it starts itself.
#[must_use]
pub fn of_vm(
    run_dir: &Path,
    memory: &Path,
    name: &str,
    backing: Backing,
    confinement: &Confinement,
) -> RunLayout {
    let vm_dir = run_dir.join(name);
    RunLayout {
        qmp_socket: vm_dir.join("qmp.sock"),
        vm_dir,
        memory_dir: memory_dir(memory, backing),
        backing,
        name: name.to_owned(),
        confinement: confinement.clone(),
    }
}

/// The folder for RAM files of one backing.
#[must_use]
pub fn memory_dir(memory: &Path, backing: Backing) -> PathBuf {
    memory.join(backing.name())
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
