//! Which folders of the daemon QEMUs can pass through: those that lead to what they were given, and no others.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::config::Config;

/// Folders in the state folder that are the daemon's alone. In `forks` are also the sockets by which QEMUs reach images of other nodes.
const PRIVATE: &[&str] = &["vms", "sessions", "templates", "forks/members"];
/// Bits of a mode for others than the owner.
const OTHERS: u32 = 0o077;

/// Lets QEMU's user pass through the state, run and memory folders, after what is secret in them was closed.
pub fn open_for_qemu(config: &Config) -> anyhow::Result<()> {
    if config.qemu.user.is_none() {
        return Ok(());
    }
    for name in PRIVATE {
        let folder = config.state_dir.join(name);
        vmove_node::files::make_private_dir(&folder)
            .and_then(|()| close(&folder))
            .with_context(|| format!("Could not close {} to others", folder.display()))?;
    }
    // What an earlier version has left here could be read by whoever passes.
    for file in files_of(&config.state_dir).into_iter().chain(files_of(&config.state_dir.join("forks"))) {
        close(&file).with_context(|| format!("Could not close {} to others", file.display()))?;
    }
    for folder in [&config.state_dir, &config.run_dir, &config.memory_dir] {
        let passed = config.qemu.let_pass(folder);
        passed.with_context(|| format!("Could not let QEMU's user pass through {}", folder.display()))?;
    }
    Ok(())
}

/// Regular files in a folder.
fn files_of(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let regular = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    regular.map(|entry| entry.path()).collect()
}

fn close(path: &Path) -> io::Result<()> {
    let mode = fs::metadata(path)?.mode() & 0o7777;
    if mode & OTHERS == 0 {
        Ok(())
    } else {
        fs::set_permissions(path, Permissions::from_mode(mode & !OTHERS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_passes_to_its_files_and_what_is_secret_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let mut config = crate::config::tests::configured(&format!("state-dir = '{}'", state.display()));
        vmove_skip::need!(config.qemu.user.clone().ok_or("not root: QEMU runs as whoever runs this"));
        for folder in ["sessions", "forks", "run", "memory"] {
            fs::create_dir_all(state.join(folder)).unwrap();
            fs::set_permissions(state.join(folder), Permissions::from_mode(0o755)).unwrap();
        }
        fs::set_permissions(&state, Permissions::from_mode(0o700)).unwrap();
        fs::write(state.join("forks/1.jsonl"), "token").unwrap();
        let mode = |path: &str| fs::metadata(state.join(path)).unwrap().mode() & 0o777;
        open_for_qemu(&config).unwrap();
        assert_eq!(["", "run", "memory"].map(|path| mode(path) & 0o011), [0o011; 3]);
        assert_eq!(["vms", "sessions", "templates", "forks/members"].map(mode), [0o700; 4]);
        assert_eq!(mode("forks/1.jsonl"), 0o600);
        config.qemu.user = None;
        fs::set_permissions(&state, Permissions::from_mode(0o700)).unwrap();
        open_for_qemu(&config).unwrap();
        assert_eq!(mode(""), 0o700, "root passes anyway");
    }
}
