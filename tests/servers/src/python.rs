//! The Python clients of `vmoved` and `vbridged`, as `client/python/generate.sh` makes them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const GENERATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../client/python/generate.sh");

/// Makes them in a folder. Gives the Python that has what they need.
///
/// # Errors
/// Their generator cannot be installed: why a test is skipped.
///
/// # Panics
/// The generator is there, and they cannot be made.
pub fn python_clients(folder: &Path) -> Result<PathBuf, String> {
    let python = crate::packages::cache().join("python/bin");
    let made = Command::new(GENERATE).arg(folder).stdin(Stdio::null()).output().expect("it can be run");
    if made.status.success() {
        return Ok(python.join("python3"));
    }
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(!python.join("openapi-python-client").exists(), "the clients cannot be generated: {said}");
    let last = said.lines().last().unwrap_or_default();
    Err(format!("openapi-python-client cannot be installed (python3-venv and PyPI): {last}"))
}
