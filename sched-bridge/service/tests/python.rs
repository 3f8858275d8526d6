//! The Python client is made from the OpenAPI description, and used as a scheduler would.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Killed when dropped.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_scheduler_in_python_places_jobs_through_the_generated_client() {
    let dir = tempfile::tempdir().unwrap();
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    let made =
        Command::new(python.join("generate.sh")).arg(dir.path()).stdin(Stdio::null()).output().unwrap();
    let cache: std::path::PathBuf =
        std::env::var_os("VMOVE_CACHE").map_or_else(|| python.join("../../../.cache"), Into::into);
    if !made.status.success() {
        let said = String::from_utf8_lossy(&made.stderr).into_owned();
        assert!(
            !cache.join("python/bin/openapi-python-client").exists(),
            "the client cannot be made: {said}"
        );
        let last = said.lines().last().unwrap_or_default();
        // Not a failure, even where nothing may be skipped: the registry of Python may be out of reach.
        eprintln!(
            "SKIP the generator of Python clients cannot be installed (python3-venv, or PyPI, is missing): {last}"
        );
        return;
    }
    let socket = dir.path().join("c.sock");
    let store = format!("redb:{}", dir.path().join("state.redb").display());
    let bridge = Command::new(env!("CARGO_BIN_EXE_vbridged"))
        .args(["--store", &store, "--control"])
        .arg(&socket)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let _bridge = Guard(bridge);
    for _ in 0..2400 {
        if std::os::unix::net::UnixStream::connect(&socket).is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    let output = Command::new(cache.join("python/bin/python3"))
        .arg(python.join("scheduler.py"))
        .arg(&socket)
        .env("PYTHONPATH", dir.path())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("ok"), "{said}");
}
