//! The QEMU of tests that attach to one.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Variables that name the QEMUs of `./run setup`, the oldest first.
pub const QEMUS_OF_SETUP: [&str; 3] = ["VMOVE_QEMU_7_2", "VMOVE_QEMU_10_0", "VMOVE_QEMU_TESTING"];
/// Variables that may name a QEMU, in the order in which they are tried.
const VARIABLES: [&str; 4] = ["VMOVE_QEMU", "VMOVE_QEMU_10_0", "VMOVE_QEMU_7_2", "VMOVE_QEMU_TESTING"];

/// `PATH` with the folders of the QEMUs that the variables name before it: a daemon takes them from other nodes, as those that are installed.
#[must_use]
pub fn path_with_qemus() -> OsString {
    let named = VARIABLES.iter().filter_map(std::env::var_os).map(PathBuf::from);
    let folders = named.filter_map(|program| Some(program.parent()?.to_owned()));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let all = folders.filter(|folder| folder.is_absolute()).chain(std::env::split_paths(&path));
    // A folder with a colon in its name cannot be in it.
    std::env::join_paths(all).unwrap_or(path)
}

/// Whether QEMU's user, who has no rights of his own, reaches what tests have QEMU open.
///
/// # Errors
/// A folder on the way that he cannot enter, as where the sources are below `/root`; and what to do.
pub fn open_to_qemu() -> Result<(), String> {
    let named = VARIABLES.iter().filter_map(std::env::var_os).map(PathBuf::from);
    for path in named.chain([PathBuf::from(env!("CARGO_MANIFEST_DIR"))]) {
        let path = path.canonicalize().unwrap_or(path);
        let is_closed = |folder: &&Path| std::fs::metadata(folder).is_ok_and(|meta| meta.mode() & 0o001 == 0);
        if let Some(folder) = path.ancestors().filter(|path| path.is_dir()).find(is_closed) {
            let folder = folder.display();
            return Err(format!(
                "QEMU's user cannot enter {folder}: chmod o+x {folder}, or use a copy of the sources elsewhere"
            ));
        }
    }
    Ok(())
}

/// Arguments of a daemon of tests: QEMUs run as root where their user could not open anything. Says so once.
#[must_use]
pub fn user_of_qemus() -> &'static [&'static str] {
    static FOUND: std::sync::LazyLock<&[&str]> = std::sync::LazyLock::new(|| match open_to_qemu() {
        Ok(()) => &[],
        Err(why) => {
            eprintln!("NOTE: QEMUs of these tests run as root. {why}");
            &["--qemu-user", "root"]
        }
    });
    *FOUND
}

/// Fails unless this process is root, which mounting guest memory and attaching to QEMU need.
///
/// # Errors
/// When it is not.
pub fn root() -> Result<(), String> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err("needs root, to mount guest memory and attach to QEMU".to_owned())
}

/// The path of a QEMU that can be run, for a test that mounts guest memory and attaches to QEMU.
///
/// # Errors
/// What is missing: the rights of root, or a QEMU.
pub fn qemu() -> Result<String, String> {
    root()?;
    let named = VARIABLES.iter().find_map(|variable| std::env::var(variable).ok());
    let program =
        named.filter(|program| !program.is_empty()).unwrap_or_else(|| "qemu-system-x86_64".to_owned());
    let works = Command::new(&program).arg("-version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        return Err(format!("{program} cannot be run; set VMOVE_QEMU"));
    }
    Ok(program)
}
