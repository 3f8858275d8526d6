//! A host of its own as far as its folders and its name go: a mount and a UTS namespace that a script makes and holds.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::process::Guarded;

/// Has a script of `tests/scripts` make such a host: its holder, whose end is the host's. `ready` gives it its arguments and environment; `failed` is
/// what went wrong if the script does not say that it is ready.
///
/// # Errors
/// When it is not made.
pub fn made(script: &str, ready: impl FnOnce(&mut Command), failed: &str) -> Result<Guarded> {
    let mut command = Command::new("unshare");
    command.args(["-m", "-u"]).arg(scripts().join(script));
    ready(&mut command);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = child.context("unshare(1) could not be started")?;
    let said = child.stdout.take().context("no output")?;
    let holder = Guarded::from(child);
    let mut line = String::new();
    BufReader::new(said).read_line(&mut line)?;
    ensure!(line.trim() == "ready", "{failed}");
    Ok(holder)
}

/// The folder of the scripts.
#[must_use]
pub fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts")
}

/// Writes a program that runs another one on the host that this process holds.
///
/// # Errors
/// The file cannot be written.
pub fn entering(holder: &Guarded, program: &Path, at: PathBuf) -> Result<PathBuf> {
    let text =
        format!("#!/bin/sh\nexec nsenter -t {} -m -u -- '{}' \"$@\"\n", holder.pid(), program.display());
    executable(at, &text)
}

/// Writes a program.
///
/// # Errors
/// The file cannot be written.
pub fn executable(path: PathBuf, text: &str) -> Result<PathBuf> {
    std::fs::write(&path, text)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path)
}
