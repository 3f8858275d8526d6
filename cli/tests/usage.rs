//! `vmove` without a daemon: exit codes, completions, man pages.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::process::{Command, Stdio};

use serde_json::Value;

const VMOVE: &str = env!("CARGO_BIN_EXE_vmove");

/// What a program ended with.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ended {
    fn of(command: &mut Command) -> Self {
        let output = command.stdin(Stdio::null()).output().unwrap();
        Self {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// The one JSON object on standard output.
    fn json(&self) -> Value {
        let lines: Vec<&str> = self.out.lines().collect();
        assert_eq!(lines.len(), 1, "expected one line of JSON: {self:?}");
        serde_json::from_str(lines[0]).unwrap()
    }

    #[track_caller]
    fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }
}

#[test]
fn without_a_daemon_every_command_ends_with_5() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("none.sock");
    for args in [
        &["list"][..],
        &["show", "a"],
        &["stop", "a"],
        &["node"],
        &["check", "a", "--to", "b:1"],
        &["migrate", "a", "--to", "b:1"],
        &["status"],
        &["cancel", "1"],
        &["recover", "1"],
        &["history"],
        &["report", "1"],
        &["run", "--name", "a", "--", "qemu"],
        &["adopt", "--name", "a", "--qmp", "q"],
        &["forget", "a"],
    ] {
        let ended =
            Ended::of(Command::new(VMOVE).env("VMOVE_CONTROL", &socket).arg("--json").args(args)).expect(5);
        let json = ended.json();
        assert_eq!(json["code"], "daemon-unreachable", "{args:?}");
        assert_eq!(json["exit_code"], 5);
        assert!(ended.err.contains("systemctl start vmoved"), "{}", ended.err);
    }
}

#[test]
fn json_of_wrong_usage_is_for_those_who_asked_for_it_and_one_sentence() {
    let ended = Ended::of(Command::new(VMOVE).args(["run", "--bogus", "--", "qemu", "--json"])).expect(2);
    assert!(ended.out.is_empty(), "it is QEMU's option: {ended:?}");
    for (command, name) in [("lease", "list"), ("plan", "evacuate"), ("adapter", "check")] {
        let ended = Ended::of(Command::new(VMOVE).args(["--json", command])).expect(2);
        let error = ended.json()["error"].as_str().unwrap().to_owned();
        assert!(error.starts_with(&format!("expected one of these behind `vmove {command}`")), "{error}");
        assert!(error.contains(name) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn watch_needs_a_terminal_and_says_what_else_there_is() {
    for arguments in [&["watch"][..], &["--json", "watch"], &["watch", "/nowhere/ctl.sock"]] {
        let ended = Ended::of(Command::new(VMOVE).args(arguments)).expect(2);
        assert!(
            ended.err.contains("vmove status ID --follow") && ended.err.contains("--json"),
            "{}",
            ended.err
        );
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = Command::new(VMOVE).args(["completions", "bash"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn completions_and_man_pages_are_made() {
    for shell in ["bash", "zsh", "fish"] {
        let script = Ended::of(Command::new(VMOVE).args(["completions", shell])).expect(0).out;
        assert!(script.contains("migrate") && script.contains("max-downtime"), "{shell}");
        assert!(script.contains("watch") && script.contains("report"), "{shell}");
    }
    let dir = tempfile::tempdir().unwrap();
    Ended::of(Command::new(VMOVE).arg("man").arg(dir.path())).expect(0);
    let page = std::fs::read_to_string(dir.path().join("vmove-migrate.1")).unwrap();
    assert!(page.contains("max\\-downtime") && page.contains("Ctrl"), "{page}");
    let page = std::fs::read_to_string(dir.path().join("vmove-watch.1")).unwrap();
    assert!(page.contains("No key changes anything"), "{page}");
    let page = std::fs::read_to_string(dir.path().join("vmove.1")).unwrap();
    assert!(page.contains("needs `vmove recover`"), "{page}");
}
