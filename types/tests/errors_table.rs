//! `docs/errors.md` lists every code that anybody can be told. The codes of the daemons are read from their OpenAPI descriptions, which
//! tests of the daemons keep true.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![cfg(test)]

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use vmove_types::check::BlockerCode;

fn docs(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// First cells of the rows below a heading.
fn listed(heading: &str) -> BTreeSet<String> {
    let text = docs("errors.md");
    let (_, section) = text.split_once(&format!("## {heading}\n")).expect("such a heading");
    let section = section.split("\n## ").next().unwrap_or_default();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let rows = cells.filter(|cell| *cell != "Code" && *cell != "Exit code");
    rows.map(|cell| cell.trim_matches('`').to_owned()).collect()
}

fn codes_of(description: &str) -> BTreeSet<String> {
    let api: Value = serde_json::from_str(&docs(description)).expect("JSON");
    let words = api.pointer("/components/schemas/Code/enum").and_then(Value::as_array).expect("codes");
    words.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

#[test]
fn every_code_is_listed_and_no_other() {
    let blockers = BlockerCode::ALL.iter().map(|code| code.as_str().to_owned()).collect();
    assert_eq!(listed("What stands in the way"), blockers);
    assert_eq!(listed("`vmoved`, `vmove`, `vfork`"), codes_of("openapi.json"));
    assert_eq!(listed("`vbridged`"), codes_of("vbridged-openapi.json"));
}

#[test]
fn every_exit_code_is_listed() {
    use vmove_types::problem::Exit;
    let all = [Exit::Done, Exit::Failed, Exit::Usage, Exit::Refused, Exit::NeedsRecovery, Exit::Unreachable];
    let codes = all.iter().map(|exit| exit.code().to_string()).collect();
    assert_eq!(listed("Exit codes"), codes);
}
