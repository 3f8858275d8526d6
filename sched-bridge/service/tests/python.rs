//! The Python client is made from the OpenAPI description, and used as a scheduler would.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use std::path::Path;
use std::process::Command;

use common::Vbridged;

#[test]
fn a_scheduler_in_python_places_jobs_through_the_generated_client() {
    let dir = tempfile::tempdir().unwrap();
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    let interpreter = match test_servers::python_clients(dir.path()) {
        Ok(interpreter) => interpreter,
        Err(missing) => return vmove_skip::skip!("{missing}"),
    };
    let bridge = Vbridged::start(&[], &[]);
    let output = Command::new(interpreter)
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
