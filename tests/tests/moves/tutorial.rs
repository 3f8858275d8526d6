//! The tutorials: their commands are run as they stand there, and print what stands there.
#![cfg(test)]

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};

use vmove_skip::need;
use vmove_tests::hosts::Host;
use vmove_tests::networks::{self, Networks};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::ready;

const ONE_MACHINE: &str = include_str!("../../../docs/tutorial/one-machine.md");
const TWO_MACHINES: &str = include_str!("../../../docs/tutorial/two-machines.md");
/// Stands for what differs from run to run; alone on a line for any lines.
const ANYTHING: &str = "…";
/// Printed after each block of a script.
const MARK: &str = "@@ end of block";

/// Commands of a page, and what they print if the page says so.
#[derive(Debug, Default)]
struct Block {
    commands: String,
    printed: Option<String>,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(kind) = line.strip_prefix("```") else { continue };
        let text: String =
            lines.by_ref().take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect();
        match (kind, found.last_mut()) {
            ("sh", _) => found.push(Block { commands: text, printed: None }),
            ("text", Some(block)) if block.printed.is_none() => block.printed = Some(text),
            other => panic!("a block of {other:?}: expected sh, or text after it"),
        }
    }
    found
}

/// Whether a line is as expected. Columns may be wider than on the page.
fn is_line(expected: &str, found: &str) -> bool {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (expected, found) = (words(expected), words(found));
    let mut parts = expected.split(ANYTHING);
    let Some(mut rest) = parts.next().and_then(|first| found.strip_prefix(first)) else { return false };
    let mut last = None;
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
        last = Some(part);
    }
    rest.is_empty() || last == Some("") || last.is_some_and(|part| found.ends_with(part))
}

/// Whether lines are as expected.
fn are_lines(expected: &[&str], found: &[&str]) -> bool {
    match (expected, found) {
        ([], []) => true,
        ([ANYTHING, rest @ ..], _) => (0..=found.len()).any(|skipped| are_lines(rest, &found[skipped..])),
        ([first, rest @ ..], [line, more @ ..]) => is_line(first, line) && are_lines(rest, more),
        _ => false,
    }
}

fn compare(block: &Block, printed: &str) {
    let Some(expected) = &block.printed else { return };
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let (expected, found) = (lines(expected), lines(printed));
    let as_text = |lines: &[String]| lines.join("\n");
    let [wanted, got] = [&expected, &found].map(|lines| lines.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(
        are_lines(&wanted, &got),
        "{}\nprinted\n{}\nThe page says\n{}",
        block.commands,
        as_text(&found),
        as_text(&expected)
    );
}

/// `PATH` with the programs that were built, and QEMU.
fn search_path() -> OsString {
    let program = places::product("vmove").expect("the program");
    let path = places::path_with(None);
    let all = program.parent().map(Path::to_owned).into_iter().chain(std::env::split_paths(&path));
    std::env::join_paths(all).expect("a path")
}

#[test]
fn what_the_page_says_is_compared() {
    assert!(is_line("web   …  running", "web   4711  running"));
    assert!(is_line("downtime … ms", "downtime    1.5 ms"));
    assert!(!is_line("downtime … ms", "downtime    1.5 s"));
    assert!(!is_line("moved", "moved back"));
    assert!(are_lines(&["a", ANYTHING, "d"], &["a", "b", "c", "d"]));
    assert!(!are_lines(&["a"], &["a", "b"]));
    assert_eq!(blocks("x\n```sh\nls\n```\n\n```text\na\n```\n")[0].printed.as_deref(), Some("a\n"));
}

#[test]
fn first_steps_on_one_machine_are_as_the_page_says() {
    need!(ready());
    need!(networks::possible());
    let sandbox = Sandbox::new().expect("a sandbox");
    let blocks = blocks(ONE_MACHINE);
    assert!(blocks.len() > 8, "{blocks:?}");
    let script: String =
        blocks.iter().map(|block| format!("{}\necho '{MARK}'\n", block.commands.trim_end())).collect();
    // A network of its own: the page's ports may be taken here.
    let script = format!("set -e\nip link set lo up\n{script}");
    let mut command = Command::new("unshare");
    command.args(["--net", "bash", "-c", &script]).current_dir(sandbox.path()).env("PATH", search_path());
    let output = command.stdin(Stdio::null()).output().expect("bash runs");
    let [printed, said] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "{}\n{printed}\n{said}", output.status);
    let parts: Vec<&str> = printed.split(&format!("{MARK}\n")).collect();
    assert_eq!(parts.len(), blocks.len() + 1, "{printed}\n{said}");
    for (block, printed) in blocks.iter().zip(parts) {
        compare(block, printed);
    }
    let left: Vec<_> = std::fs::read_dir(sandbox.path()).expect("a list").flatten().collect();
    assert!(left.is_empty(), "something is left: {left:?}");
}

#[test]
fn two_machines_with_tls_are_as_the_page_says() {
    need!(ready());
    need!(networks::possible());
    let (networks, sandbox) = (Networks::new(2).expect("namespaces"), Sandbox::new().expect("a sandbox"));
    let hosts = [(1, "node1"), (2, "node2")]
        .map(|(number, name)| Host::start(&sandbox, &networks, number, name).expect("a host"));
    let names: String = [(1, "node1"), (2, "node2")]
        .map(|(number, name)| format!("{} {name}\\n", networks.address(number).ip()))
        .concat();
    for host in &hosts {
        host.run(&format!("printf '127.0.0.1 localhost\\n{names}' >/etc/hosts")).expect("names");
    }
    for block in blocks(TWO_MACHINES) {
        let name = block.commands.lines().next().and_then(|line| line.strip_prefix("# "));
        let host = hosts.iter().find(|host| Some(host.name()) == name);
        let host = host.unwrap_or_else(|| panic!("no host is named in {block:?}"));
        let logs = || hosts.each_ref().map(|host| host.run("cat /var/lib/vmoved.log").unwrap_or_default());
        let printed = host.run(&format!("set -e\ncd '{}'\n{}", host.folder().display(), block.commands));
        let printed = printed.unwrap_or_else(|error| panic!("{error:#}\n{:#?}", logs()));
        compare(&block, &printed);
    }
}
