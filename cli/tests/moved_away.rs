//! A VM that has moved away: commands say where it went.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

/// A migration of the VM "guest" from the node "a" to the node "b" that has ended.
const MOVED: &str = include_str!("../src/vmove/report/testdata/finished.json");

/// A daemon that has no VM, and remembers that migration.
fn daemon_without_vms(socket: &Path) {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            answer(stream);
        }
    });
}

fn answer(stream: UnixStream) {
    let mut reader = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    reader.read_line(&mut first).unwrap();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let line = line.trim().to_ascii_lowercase();
        if let Some(bytes) = line.strip_prefix("content-length:") {
            length = bytes.trim().parse().unwrap();
        }
        if line.is_empty() {
            break;
        }
    }
    reader.read_exact(&mut vec![0; length]).unwrap();
    let (status, body) = if first.starts_with("GET /v1/migrations ") {
        ("200 OK", format!("{{\"migrations\":[{}]}}", MOVED.trim()))
    } else {
        let error = "No VM named \\\"guest\\\" on this node: `vmove list` shows those there are";
        let problem =
            format!("{{\"code\":\"unknown-vm\",\"message\":\"{error}\",\"exit_code\":1,\"status\":404}}");
        ("404 Not Found", problem)
    };
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close");
    let _ = write!(reader.get_mut(), "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
}

#[test]
fn a_vm_that_is_not_here_any_more_is_said_to_be_where_it_went() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("ctl.sock");
    daemon_without_vms(&socket);
    let (vmove, vfork) = (env!("CARGO_BIN_EXE_vmove"), env!("CARGO_BIN_EXE_vfork"));
    for (program, arguments) in [
        (vmove, &["show", "guest"][..]),
        (vmove, &["migrate", "guest", "--to", "c:1"]),
        (vfork, &["create", "guest", "--count", "1"]),
        (vfork, &["promote", "guest"]),
        (vfork, &["warm", "guest", "--count", "1"]),
        (vfork, &["template", "save", "guest", "golden"]),
    ] {
        let mut command = Command::new(program);
        command.env("VMOVE_CONTROL", &socket).args(arguments).stdin(Stdio::null());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        let expected = "\"guest\" is not on this node any more: it moved to b (migration dc263ef0-9d12-4704-9017-f9fed96c549b)";
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
}
