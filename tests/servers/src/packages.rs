//! Where the servers' programs are.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A server cannot be started here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Missing(pub(crate) &'static str);

/// Where `./run setup` unpacks Slurm, munge and etcd.
pub(crate) fn unpacked() -> PathBuf {
    cache().join("peers")
}

/// Where everything is that `./run setup` has got.
pub(crate) fn cache() -> PathBuf {
    std::env::var_os("VMOVE_CACHE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache"), PathBuf::from)
}

/// A program of the unpacked packages, or else one that is installed.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let root = unpacked();
    let folders = [root.join("usr/bin"), root.join("usr/sbin")];
    let path = std::env::var_os("PATH").unwrap_or_default();
    folders
        .into_iter()
        .chain(std::env::split_paths(&path))
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// A command whose process the kernel kills when the thread that starts it ends, so that nothing is left of a test that is killed.
#[must_use]
pub fn killed_with_this_thread(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}
