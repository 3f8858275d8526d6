//! Commands that wait for a daemon which takes its time: what they say meanwhile, and what Ctrl-C does.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const VMOVE: &str = env!("CARGO_BIN_EXE_vmove");
const VFORK: &str = env!("CARGO_BIN_EXE_vfork");

/// A daemon that takes requests and answers none of them. Gives the connections, each once a request has come.
fn silent_daemon(socket: &Path) -> Receiver<UnixStream> {
    let listener = UnixListener::bind(socket).unwrap();
    let (tell, told) = channel();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            if stream.read(&mut [0; 4096]).unwrap_or(0) == 0 || tell.send(stream).is_err() {
                return;
            }
        }
    });
    told
}

fn start(program: &str, socket: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(program);
    command.env("VMOVE_CONTROL", socket).env("VBRIDGE", socket).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// What a command says that is interrupted while it waits.
fn interrupted(program: &str, arguments: &[&str]) -> (String, String) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("ctl.sock");
    let asked = silent_daemon(&socket);
    let child = start(program, &socket, arguments);
    let _kept = asked.recv_timeout(Duration::from_secs(30)).unwrap();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{arguments:?}: {output:?}");
    texts(&output)
}

#[test]
fn ctrl_c_says_what_goes_on_and_how_to_undo_it() {
    let (_, err) = interrupted(VFORK, &["create", "web", "--count", "2"]);
    assert!(err.contains("the fork goes on") && err.contains("`vfork list`"), "{err}");
    assert!(err.contains("`vfork tree web`") && err.contains("`vfork kill CHILD`"), "{err}");
    for (arguments, says) in [
        (&["promote", "web"][..], "web is still being given memory of its own"),
        (&["warm", "web", "--count", "2"], "`vfork warm web --count 0`"),
        (&["template", "save", "web", "golden"], "`vfork template rm golden`"),
        (&["template", "load", "golden"], "`vfork template list`"),
        (&["template", "restore", "golden"], "`vmove list`"),
        (&["join", "web"], "`vfork join web` waits again"),
    ] {
        let (out, err) = interrupted(VFORK, arguments);
        assert!(out.is_empty() && err.contains(says), "{arguments:?}: {out}{err}");
    }
    let (_, err) = interrupted(VMOVE, &["migrate", "web", "--to", "b:1"]);
    assert!(err.contains("may still begin") && err.contains("`vmove status`"), "{err}");
    let (_, err) = interrupted(VMOVE, &["cluster", "restore", "before-lunch"]);
    assert!(err.contains("checkpoint before-lunch is still being restored"), "{err}");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("app.yaml");
    std::fs::write(&file, "name: app\nenvironments: [{name: view, kind: container, adapter: fake}]\n")
        .unwrap();
    let (_, err) = interrupted(VMOVE, &["blueprint", file.to_str().unwrap(), "--run"]);
    assert!(err.contains("nothing was started"), "{err}");
}

#[test]
fn programs_have_that_as_json() {
    let (out, _) = interrupted(VFORK, &["--json", "create", "web", "--count", "2"]);
    let said: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&said["code"], &said["exit_code"]), (&"interrupted".into(), &130.into()), "{out}");
    assert!(said["error"].as_str().unwrap().contains("the fork goes on"), "{out}");
}

/// What a command says whose answer, a refusal, comes after a while.
fn answered_late(arguments: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("ctl.sock");
    let asked = silent_daemon(&socket);
    let child = start(VFORK, &socket, arguments);
    let mut stream = asked.recv_timeout(Duration::from_secs(30)).unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    let body = r#"{"code":"busy","message":"not now","exit_code":1,"status":409}"#;
    let head = "HTTP/1.1 409 Conflict\r\ncontent-type: application/json\r\nconnection: close";
    write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    texts(&child.wait_with_output().unwrap()).1
}

#[test]
fn a_pipe_has_a_line_for_what_takes_long_and_programs_have_none() {
    let err = answered_late(&["promote", "web"]);
    assert!(err.starts_with("vfork: waiting: web is given memory of its own (1 s)\n"), "{err}");
    let err = answered_late(&["join", "web"]);
    assert!(err.starts_with("vfork: waiting: children of web end (1 s)\n"), "{err}");
    let err = answered_late(&["--json", "promote", "web"]);
    assert!(!err.contains("waiting"), "{err}");
}
