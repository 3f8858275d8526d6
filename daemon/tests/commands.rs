//! `vmove` and `vmoved` without a guest: exit codes, answers, refusals.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;

use common::{Ended, Node, Pki, VMOVED, tls_node, vmove};
use vmove_node::peer::PROTOCOL_VERSION;
use vmove_node::peer::hello::MAGIC;

#[test]
fn wrong_usage_ends_with_2() {
    for args in [
        &["migrate"][..],
        &["migrate", "a", "--to", "b", "--bandwidth", "10"],
        &["frobnicate"],
        &["run", "--name", "a"],
    ] {
        Ended::of(Command::new(vmove()).args(args)).expect(2);
    }
    let node = Node::start();
    for (args, code) in [
        (&["migrate", "a", "--to", "nowhere"][..], "unknown-node"),
        (&["run", "--name", "a/b", "--", "qemu"], "bad-name"),
        (&["run", "--name", "", "--", "qemu"], "bad-name"),
        (&["run", "--name", "a", "--", "qemu", "-drive"], "bad-command-line"),
        (&["migrate", "a", "--to", "b:1", "--max-downtime", "2m"], "bad-option"),
    ] {
        assert_eq!(node.problem(args, 2)["code"], code, "{args:?}");
    }
}

#[test]
fn an_unknown_vm_or_migration_is_named() {
    let node = Node::start();
    for args in [
        &["show", "no such üm"][..],
        &["stop", "no such üm"],
        &["forget", "no such üm"],
        &["check", "no such üm", "--to", "127.0.0.1:1"],
        &["migrate", "no such üm", "--to", "127.0.0.1:1"],
    ] {
        let problem = node.problem(args, 1);
        assert_eq!(problem["code"], "unknown-vm", "{args:?}");
        assert!(problem["error"].as_str().unwrap().contains("no such üm"), "{problem}");
    }
    for args in [&["status", "77"][..], &["status", "77", "--follow"], &["cancel", "77"], &["recover", "77"]]
    {
        assert_eq!(node.problem(args, 1)["code"], "unknown-migration", "{args:?}");
    }
}

#[test]
fn a_command_line_that_is_wrong_is_told_as_json_to_programs() {
    let node = Node::start();
    for args in [&["bogus"][..], &["migrate"], &["list", "--no-such-option"]] {
        let problem = node.problem(args, 2);
        assert_eq!((problem["code"].as_str(), problem["exit_code"].as_i64()), (Some("bad-request"), Some(2)));
        assert!(!problem["error"].as_str().unwrap().starts_with("error:"), "{problem}");
    }
    assert!(node.vmove(&["bogus"]).expect(2).out.is_empty(), "people read it on standard error");
    // Help is no mistake.
    assert!(Ended::of(&mut node.command(&["--json", "--help"])).expect(0).out.contains("Usage"));
}

#[test]
fn an_empty_node_answers_in_both_forms() {
    let node = Node::start();
    assert_eq!(node.ask(&["list"]), serde_json::json!({ "node": "tester", "vms": [] }));
    assert_eq!(node.ask(&["history"]), serde_json::json!({ "migrations": [] }));
    let info = node.ask(&["node"]);
    assert_eq!(info["node"], "tester");
    assert_eq!(info["security"], "insecure");
    let fabrics = info["fabrics"].as_array().unwrap();
    let rdma = usize::from(info["rdma_network"].is_string());
    assert_eq!((&fabrics[0], &fabrics[1 + rdma], fabrics.len()), (&"local".into(), &"tcp".into(), 2 + rdma));
    assert_eq!(info["no_rdma"].is_string(), rdma == 0, "{info}");
    assert!(info["memory"]["total_bytes"].as_u64().unwrap() > 0);
    for args in [&["list"][..], &["history"], &["status"], &["node"]] {
        assert!(!node.vmove(args).expect(0).out.is_empty());
    }
}

#[test]
fn the_control_socket_is_private_and_goes_away_with_the_daemon() {
    let mut node = Node::start();
    assert_eq!(std::fs::metadata(node.control()).unwrap().permissions().mode() & 0o777, 0o600);
    // QEMUs pass through the state folder to their own files; nobody else reads or writes in it.
    assert_eq!(std::fs::metadata(node.state()).unwrap().permissions().mode() & 0o766, 0o700);
    assert_eq!(node.stop(), Some(0));
    assert!(!node.control().exists());
    // A killed one leaves it behind; the next one takes it over.
    node.run();
    node.kill();
    assert!(node.control().exists());
    node.run();
    node.ask(&["list"]);
}

#[test]
fn a_second_daemon_is_refused() {
    let node = Node::start();
    let same_state = Ended::of(
        Command::new(VMOVED)
            .args(["--insecure", "--listen", "127.0.0.1:0", "--control"])
            .arg(node.path("other.sock"))
            .arg("--state-dir")
            .arg(node.state()),
    )
    .expect(1);
    assert!(same_state.err.contains(&format!("pid {}", node.pid())), "{}", same_state.err);
    let same_control = Ended::of(
        Command::new(VMOVED)
            .args(["--insecure", "--listen", "127.0.0.1:0", "--control"])
            .arg(node.control())
            .arg("--state-dir")
            .arg(node.path("other")),
    )
    .expect(1);
    assert!(same_control.err.contains("Another daemon listens"), "{}", same_control.err);
    let same_port = Ended::of(
        Command::new(VMOVED)
            .args(["--insecure", "--listen", &node.listen.to_string(), "--control"])
            .arg(node.path("third.sock"))
            .arg("--state-dir")
            .arg(node.path("third")),
    )
    .expect(1);
    assert!(same_port.err.contains("give another --listen"), "{}", same_port.err);
    node.ask(&["list"]);
}

#[test]
fn settings_that_cannot_be_used_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("c.toml");
    std::fs::write(&config, "stat-dir = '/x'").unwrap();
    let config = config.display().to_string();
    for (args, code, word) in [
        (&[][..], 2, "--insecure"),
        (&["--insecure", "--tls-ca", "x"], 2, "leave one of them out"),
        (&["--tls-ca", "x"], 2, "--tls-cert is missing"),
        (&["--config", &config], 2, "stat-dir"),
        (&["--config", "/no/such.toml"], 2, "/no/such.toml"),
        (&["--insecure", "--fabric", "verbs", "--rdma-device", "none0"], 1, "use --fabric auto"),
        (&["--tls-cert", "/no/c", "--tls-key", "/no/k", "--tls-ca", "/no/a"], 1, "/no/c"),
    ] {
        let state = dir.path().join("state");
        let mut command = Command::new(VMOVED);
        command
            .args(["--listen", "127.0.0.1:0", "--control"])
            .arg(dir.path().join("c.sock"))
            .arg("--state-dir")
            .arg(&state)
            .args(args);
        let ended = Ended::of(&mut command).expect(code);
        assert!(ended.err.contains(word), "{args:?}: {}", ended.err);
    }
}

#[test]
fn refusals_of_the_rest_interface_have_one_form() {
    let node = Node::start();
    for (method, path, body, status, code) in [
        ("GET", "/v2/vms", "", 404, "unknown-path"),
        ("PUT", "/v1/vms", "", 405, "method-not-allowed"),
        ("POST", "/v1/vms", "{", 400, "bad-request"),
        ("POST", "/v1/vms", r#"{"name":"a","command_line":["q"],"colour":"red"}"#, 400, "bad-request"),
        ("GET", "/v1/vms/a/check", "", 400, "bad-request"),
        ("GET", "/v1/vms/%FF", "", 400, "bad-request"),
        ("GET", "/v1/vms/two%20words", "", 404, "unknown-vm"),
        ("POST", "/v1/migrations", r#"{"vm":"a","to":"b:1","options":{"bandwidth":5}}"#, 400, "bad-option"),
        ("DELETE", "/v1/migrations/9", "", 404, "unknown-migration"),
    ] {
        let (got, text) = node.http(method, path, body);
        assert_eq!(got, status, "{method} {path}: {text}");
        let problem: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(problem["code"], code, "{method} {path}");
        assert!(
            problem["message"].is_string() && problem["exit_code"].is_u64() && problem["status"] == status
        );
    }
    assert_eq!(node.http("GET", "/healthz", ""), (200, "ok\n".to_owned()));
    let (status, described) = node.http("GET", "/openapi.json", "");
    assert_eq!(status, 200);
    assert_eq!(described, include_str!("../../docs/openapi.json"));
}

#[test]
fn the_peer_port_answers_questions_and_nothing_else() {
    let node = Node::start();
    assert_eq!(node.peer_http("GET", "/v1/vms"), (200, r#"{"node":"tester","vms":[]}"#.to_owned()));
    assert_eq!(node.peer_http("GET", "/v1/node").0, 200);
    for (method, path) in [
        ("POST", "/v1/vms"),
        ("POST", "/v1/migrations"),
        ("DELETE", "/v1/vms/a"),
        ("GET", "/v1/vms/a"),
        ("POST", "/v1/vms:adopt"),
    ] {
        let (status, text) = node.peer_http(method, path);
        assert_eq!(status, 403, "{method} {path}: {text}");
        assert!(text.contains("control socket"), "{text}");
    }
}

/// A greeting of a daemon, with this version.
fn greeting(version: u16) -> Vec<u8> {
    let mut bytes = b"VMOVE\r\n\0".to_vec();
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&[1, 0]);
    bytes.extend_from_slice(&[7; 32]);
    bytes.extend_from_slice(&[1, b'x']);
    bytes
}

fn say(node: &Node, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(node.listen).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(15))).unwrap();
    // A connection that is cut off in the middle of noise is fine; what was answered before counts.
    let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn a_peer_of_another_version_is_told_ours() {
    let node = Node::start();
    let other = PROTOCOL_VERSION + 1;
    let answer = say(&node, &greeting(other));
    assert_eq!(&answer[..8], MAGIC);
    assert_eq!(answer[8..10], PROTOCOL_VERSION.to_le_bytes());
    assert_eq!(answer[10], 1);
    assert!(String::from_utf8_lossy(&answer[12..]).contains(&format!("found {other}")));
}

#[test]
fn noise_on_the_peer_port_does_no_harm() {
    let node = Node::start();
    for noise in [&b"VMOVE\r\n\0"[..], b"V", b"VM", b"\0\0\0\0", b"GET\r\n\r\n", &[0xff; 300]] {
        let _ = say(&node, noise);
    }
    drop(TcpStream::connect(node.listen).unwrap());
    assert_eq!(node.peer_http("GET", "/healthz").0, 200);
}

#[test]
fn a_peer_without_tls_is_told_to_use_it() {
    let node = tls_node(&Pki::new());
    assert_eq!(node.ask(&["node"])["security"], "mutual-tls");
    let answer = say(&node, &greeting(1));
    assert_eq!(answer[10], 3);
    assert!(String::from_utf8_lossy(&answer[12..]).contains("expects TLS"), "{answer:?}");
    assert_eq!(node.peer_http("GET", "/v1/vms").0, 400);
}

#[test]
fn a_peer_with_tls_is_refused_by_a_node_without() {
    let node = Node::start();
    // The beginning of a TLS handshake.
    let answer = say(&node, &[0x16, 3, 1, 0, 5, 1, 0, 0, 1, 3]);
    assert_eq!(answer[..2], [0x15, 3], "expected a TLS alert, found {answer:?}");
    assert!(node.log().contains("that one has TLS"), "{}", node.log());
}

#[test]
fn metrics_are_served_where_asked() {
    let metrics = vmove_skip::free_port();
    let node = Node::start_with(&["--insecure", "--metrics", &metrics.to_string()]);
    common::wait("gauges are set", || {
        let (status, text) = common::exchange(TcpStream::connect(metrics).unwrap(), "GET", "/metrics", "");
        assert_eq!(status, 200);
        text.contains("vmove_vms{origin=\"vmove\"} 0")
            && text.contains("# TYPE vmove_qemu_ended_total counter")
    });
    assert!(node.http("GET", "/metrics", "").1.contains("vmove_build_info"));
}

#[test]
fn names_of_nodes_come_from_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("v.toml");
    std::fs::write(&config, "insecure = true\n[nodes]\nother = '127.0.0.1:9'\n").unwrap();
    let node = Node::start_with(&["--config", config.to_str().unwrap()]);
    assert_eq!(node.ask(&["node"])["nodes"]["other"], "127.0.0.1:9");
    assert_eq!(node.problem(&["migrate", "a", "--to", "other"], 1)["code"], "unknown-vm");
    let problem = node.problem(&["migrate", "a", "--to", "another"], 2);
    assert!(problem["error"].as_str().unwrap().contains("(other)"), "{problem}");
}

#[test]
fn every_command_explains_itself() {
    let help = Ended::of(Command::new(vmove()).arg("--help")).expect(0).out;
    assert!(help.contains("Exit codes:"), "{help}");
    for command in
        ["run", "adopt", "list", "show", "stop", "check", "migrate", "status", "cancel", "recover", "history"]
    {
        assert!(help.contains(command));
        Ended::of(Command::new(vmove()).args([command, "--help"])).expect(0);
    }
    Ended::of(Command::new(VMOVED).arg("--help")).expect(0);
}

/// Runs the daemon in a network of its own, where its usual port is free, and gives the addresses on which it listens.
fn listens_on(flags: &[&str]) -> Option<(Vec<String>, String)> {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let log = std::fs::File::create(path("log")).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh", VMOVED]).args(flags);
    command.arg("--control").arg(path("c.sock")).arg("--state-dir").arg(path("state")).stderr(log);
    let mut child = command.spawn().ok()?;
    let said = || std::fs::read_to_string(path("log")).unwrap();
    common::wait("vmoved answers, or ends", || {
        UnixStream::connect(path("c.sock")).is_ok() || child.try_wait().unwrap().is_some()
    });
    let tables =
        ["tcp", "tcp6"].map(|table| std::fs::read_to_string(format!("/proc/{}/net/{table}", child.id())));
    let _ = child.kill();
    let _ = child.wait();
    let tables = tables.into_iter().collect::<Result<String, _>>().ok()?;
    let listening = tables.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let listening =
        listening.filter(|fields| fields.get(3) == Some(&"0A")).map(|fields| fields[1].to_owned());
    Some((listening.collect(), said()))
}

#[test]
fn without_tls_the_port_is_open_to_this_host_unless_more_is_asked_for() {
    let tools = Command::new("unshare").args(["--net", "sh", "-c", "ip link set lo up"]).output();
    if !tools.is_ok_and(|made| made.status.success()) {
        return vmove_skip::skip!("no network of our own (unshare, ip)");
    }
    let (listening, said) = listens_on(&["--insecure"]).expect("a daemon");
    assert_eq!(listening, ["0100007F:1CFC"], "{said}");
    assert!(said.contains("127.0.0.1:7420 is open to this host only"), "{said}");
    let (listening, said) = listens_on(&["--insecure", "--listen", "0.0.0.0:7420"]).expect("a daemon");
    assert_eq!(listening, ["00000000:1CFC"], "{said}");
    assert!(said.contains("whoever reaches 0.0.0.0:7420"), "{said}");
}

#[test]
fn folders_of_others_are_refused_with_what_mends_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let start = |what: &str| {
        let mut command = Command::new(VMOVED);
        command.args(["--insecure", "--listen", "127.0.0.1:0", "--control"]).arg(path("c.sock"));
        for folder in ["state", "run", "memory"] {
            command.arg(format!("--{folder}-dir")).arg(path(if folder == what { "shared" } else { folder }));
        }
        Ended::of(&mut command)
    };
    std::fs::create_dir(path("shared")).unwrap();
    for what in ["state", "run", "memory"] {
        std::fs::set_permissions(path("shared"), PermissionsExt::from_mode(0o1777)).unwrap();
        let ended = start(what).expect(1);
        for word in [format!("{what} folder").as_str(), "found mode 1777", "chmod go-w", "shared"] {
            assert!(ended.err.contains(word), "{what}, {word}: {}", ended.err);
        }
        std::fs::set_permissions(path("shared"), PermissionsExt::from_mode(0o700)).unwrap();
        if std::os::unix::fs::chown(path("shared"), Some(12345), None).is_err() {
            return vmove_skip::skip!(part = "another owner", "not root");
        }
        let ended = start(what).expect(1);
        for word in [format!("{what} folder").as_str(), "found user 12345", "chown 0"] {
            assert!(ended.err.contains(word), "{what}, {word}: {}", ended.err);
        }
        std::os::unix::fs::chown(path("shared"), Some(0), None).unwrap();
    }
}

#[test]
fn a_folder_may_be_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let (target, link) = (dir.path().join("target"), dir.path().join("link"));
    std::fs::create_dir(&target).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let node = Node::start_with(&["--insecure", "--run-dir", link.to_str().unwrap()]);
    assert_eq!(node.ask(&["list"]), serde_json::json!({ "node": "tester", "vms": [] }));
    // What could be done to the link later has no effect.
    std::fs::remove_file(&link).unwrap();
    let ended = node.vmove(&["run", "--name", "a", "--", "/no/such/qemu"]);
    assert_ne!(ended.code, Some(0), "{ended:?}");
    assert!(!link.exists());
}

#[test]
fn a_secret_in_a_command_line_is_pointed_out() {
    let node = Node::start();
    let run = |object: &str| node.vmove(&["run", "--name", "a", "--", "/no/such/qemu", "-object", object]);
    let open = run("secret,id=s0,data=letmein");
    assert!(
        open.err.contains("every user of the host can read") && open.err.contains("file=PATH"),
        "{open:?}"
    );
    assert!(!open.err.contains("letmein"), "{open:?}");
    let closed = run("secret,id=s0,file=/etc/key");
    assert!(!closed.err.contains("can read"), "{closed:?}");
}

#[test]
fn run_and_state_folders_on_one_file_system_are_warned_of() {
    let node = Node::start();
    let info = node.ask(&["node"]);
    assert!(info["shared_disk"].as_str().unwrap().contains("share a file system"), "{info}");
    assert!(node.vmove(&["node"]).expect(0).out.contains("--run-dir"));
    assert!(node.log().contains("share a file system"), "{}", node.log());
    let own = vmove_skip::need!(tempfile::tempdir_in("/dev/shm"));
    let run = own.path().join("run");
    let apart = Node::start_with(&["--insecure", "--run-dir", run.to_str().unwrap()]);
    assert!(apart.ask(&["node"])["shared_disk"].is_null() && !apart.log().contains("share a file system"));
}
