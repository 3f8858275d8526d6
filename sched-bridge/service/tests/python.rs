//! The Python client is made from the OpenAPI description, and used as a scheduler would.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::Vbridged;

#[test]
fn a_scheduler_in_python_places_jobs_through_the_generated_client() {
    let dir = tempfile::tempdir().unwrap();
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    let generate = python.join("../../../client/python/generate.sh");
    let generated = Command::new(generate).arg(dir.path()).stdin(Stdio::null()).output().unwrap();
    let cache: PathBuf =
        std::env::var_os("VMOVE_CACHE").map_or_else(|| python.join("../../../.cache"), Into::into);
    if !generated.status.success() {
        let output = String::from_utf8_lossy(&generated.stderr);
        assert!(
            !cache.join("python/bin/openapi-python-client").exists(),
            "the client cannot be generated: {output}"
        );
        let last = output.lines().last().unwrap_or_default();
        return vmove_skip::skip!(
            "openapi-python-client cannot be installed (python3-venv and PyPI): {last}"
        );
    }
    let bridge = Vbridged::start(&[], &[]);
    let output = Command::new(cache.join("python/bin/python3"))
        .arg(python.join("scheduler.py"))
        .arg(bridge.socket())
        .env("PYTHONPATH", dir.path().join("vbridged-client"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    let text = texts.concat();
    assert!(output.status.success() && text.contains("ok"), "{text}");
}
