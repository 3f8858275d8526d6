//! Arguments that cannot be used: what `vmove-fork` says to people and to programs.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmove-fork")).args(arguments).output().unwrap()
}

#[test]
fn programs_get_wrong_usage_as_json() {
    for (arguments, says) in
        [(&["run", "--json"][..], "--count"), (&["run", "--count", "x", "--json"], "number of children")]
    {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["error"], "usage");
        assert!(said["message"].as_str().unwrap().contains(says), "{said}");
    }
    let output = run(&["run", "--", "sh", "--json"]);
    assert!(output.stdout.is_empty(), "it is an option of sh: {output:?}");
}
