//! The libraries for C and Python: built without warnings, and their own tests.
#![cfg(test)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use vmove_skip::need;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Runs a program that must be there.
fn ran(command: &mut Command) -> Result<Output, String> {
    match command.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(format!("{:?} is not installed", command.get_program()))
        }
        output => {
            let output = output.expect("it can be run");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{command:?}: {said}");
            Ok(output)
        }
    }
}

#[test]
fn the_c_library_passes_its_tests() {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vmove-fork-c-test");
    let mut compiler = Command::new("cc");
    compiler.current_dir(folder("c")).args(["-std=c11", "-O1", "-g"]).args(WARNINGS);
    compiler.args(["-fsanitize=address,undefined", "test.c", "vmove_fork.c", "-pthread", "-o"]).arg(&program);
    need!(ran(&mut compiler));
    let output = need!(ran(Command::new("timeout").arg("60").arg(&program)));
    assert_eq!(output.stdout, b"ok\n");
}

const WARNINGS: [&str; 5] = ["-Wall", "-Wextra", "-Wconversion", "-Werror", "-pedantic"];

#[test]
fn the_python_library_passes_its_tests() {
    let mut python = Command::new("timeout");
    python.args(["60", "python3", "-B", "-m", "unittest", "test_vmove_fork"]).current_dir(folder("python"));
    let output = need!(ran(&mut python));
    assert!(String::from_utf8_lossy(&output.stderr).contains("OK"), "{output:?}");
}
