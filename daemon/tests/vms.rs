//! VMs under `vmoved`, with a real QEMU. Each test says so when it is skipped.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use common::{Ended, Node, Pki, alive, signal, tls_node, wait};
use rustix::process::Signal;
use serde_json::Value;
use vmove_skip::{need, qemu};

const NAME: &str = "two wörds 機械";

fn pid_of(vm: &Value) -> i32 {
    i32::try_from(vm["pid"].as_i64().unwrap()).unwrap()
}

fn ram_of(vm: &Value) -> PathBuf {
    vm["ram"][0]["path"].as_str().unwrap().into()
}

/// Starts an idle guest: the firmware finds nothing to boot.
#[track_caller]
fn run(node: &Node, name: &str, qemu: &str) -> Value {
    node.ask(&["run", "--name", name, "--", qemu, "-nodefaults", "-display", "none", "-m", "96M"])
}

fn status(node: &Node, name: &str) -> Value {
    node.ask(&["show", name])["status"].clone()
}

#[test]
fn a_vm_is_started_listed_shown_and_stopped() {
    let qemu = need!(qemu());
    let node = Node::start();
    let vm = node.ask(&[
        "run",
        "--name",
        NAME,
        "--env",
        "VMOVE_TEST=x y",
        "--",
        &qemu,
        "-nodefaults",
        "-display",
        "none",
        "-m",
        "96M",
        "-serial",
        "unix:{vmdir}/console.sock,server=on,wait=off",
    ]);
    let (pid, ram) = (pid_of(&vm), ram_of(&vm));
    assert_eq!(vm["name"], NAME);
    assert_eq!(vm["status"], "running");
    assert_eq!(vm["memory_bytes"], 96 << 20);
    assert!(alive(pid) && ram.exists());
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    assert!(String::from_utf8_lossy(&environment).contains("VMOVE_TEST=x y"));
    // QEMU is in a session of its own, so that no signal for the daemon's group reaches it.
    let session = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    assert_eq!(session.rsplit_once(") ").unwrap().1.split(' ').nth(3), Some(pid.to_string().as_str()));

    let listed = node.ask(&["list"]);
    assert_eq!(listed["vms"][0]["name"], NAME);
    assert_eq!(listed["vms"][0]["memory"], "thp");
    let shown = node.ask(&["show", NAME]);
    let console: PathBuf =
        shown["consoles"]["serial0"].as_str().unwrap().strip_prefix("unix:").unwrap().into();
    assert!(console.exists(), "{console:?}");
    assert_eq!(shown["command_line"][0], qemu);
    assert!(shown["qemu"].is_string() && shown["huge_share"].is_number(), "{shown}");
    let text = node.vmove(&["show", NAME]).expect(0).out;
    assert!(text.contains(NAME) && text.contains(console.to_str().unwrap()), "{text}");

    assert_eq!(node.problem(&["run", "--name", NAME, "--", &qemu], 1)["code"], "name-taken");
    assert_eq!(node.problem(&["forget", NAME], 1)["code"], "not-adopted");
    assert_eq!(node.ask(&["stop", NAME])["how"], "quit");
    assert!(!alive(pid) && !ram.exists());
    assert_eq!(node.ask(&["list"])["vms"], serde_json::json!([]));
    // The name is free again.
    run(&node, NAME, &qemu);
}

/// `OOMScoreAdjust=` of the unit is for the daemon alone.
#[test]
fn a_qemu_is_not_protected_from_the_out_of_memory_killer_as_its_daemon_is() {
    let qemu = need!(qemu());
    let node = Node::start();
    let score = |pid: i32| PathBuf::from(format!("/proc/{pid}/oom_score_adj"));
    let read = |pid| std::fs::read_to_string(score(pid)).unwrap().trim().to_owned();
    let usual = read(i32::try_from(std::process::id()).unwrap());
    if let Err(error) = std::fs::write(score(node.pid()), "-900") {
        // Without CAP_SYS_RESOURCE a process can only be made less safe, which its children inherit as well.
        println!("NOTE: the daemon cannot have an oom_score_adj of -900 here ({error}); tested with 300");
        std::fs::write(score(node.pid()), "300").unwrap();
    }
    assert_ne!(read(node.pid()), usual);
    let vm = run(&node, NAME, &qemu);
    assert_eq!(read(pid_of(&vm)), usual);
    assert_ne!(read(node.pid()), usual, "the daemon keeps its own");
}

#[test]
fn a_vm_that_does_not_start_leaves_nothing() {
    let qemu = need!(qemu());
    let node = Node::start();
    for (line, code, exit, word) in [
        (&[&qemu, "-device", "no-such-device"][..], "qemu-failed", 1, "no-such-device"),
        (&["/no/such/qemu"], "qemu-failed", 1, "/no/such/qemu"),
        (&[&qemu, "-m", "900T"], "no-memory", 1, "free"),
        (&[&qemu, "-daemonize"], "not-movable", 3, "-daemonize"),
        (&[&qemu, "-mem-path", "/x"], "not-movable", 3, "-mem-path"),
        (
            &[&qemu, "-M", "q35", "-device", "vfio-pci,host=ffff:99:00.0"],
            "device-unavailable",
            3,
            "no such PCI device",
        ),
        (
            &[&qemu, "-M", "q35", "-device", "vfio-pci,host=ffff:99:00.0,bus=pcie.0"],
            "not-movable",
            3,
            "pcie-root-port",
        ),
    ] {
        let args = [&["run", "--name", NAME, "--"], line].concat();
        let problem = node.problem(&args, exit);
        assert_eq!(problem["code"], code, "{problem}");
        assert!(problem["error"].as_str().unwrap().contains(word), "{problem}");
        assert_eq!(node.ask(&["list"])["vms"], serde_json::json!([]));
        assert!(node.processes().is_empty());
        let left: Vec<_> = ["run", "memory/thp", "vms"]
            .iter()
            .filter_map(|d| std::fs::read_dir(node.state().join(d)).ok())
            .flat_map(|d| d.flatten().map(|e| e.path()))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn the_devices_of_the_node_are_listed_and_one_that_it_lacks_is_refused() {
    let node = Node::start();
    let listed = node.ask(&["devices"])["devices"].as_array().unwrap().clone();
    let class = |name: &str| std::fs::read_to_string(format!("/sys/bus/pci/devices/{name}/class")).unwrap();
    let names = std::fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().into_string().unwrap());
    let mut expected: Vec<String> = names.filter(|name| !class(name).starts_with("0x06")).collect();
    expected.sort();
    let found: Vec<&str> = listed.iter().map(|device| device["address"].as_str().unwrap()).collect();
    assert_eq!(found, expected);
    for device in &listed {
        // Whatever cannot be given says why and what to do.
        let why = device["refused"].as_str();
        assert!(device["group"].is_u64() || why.is_some(), "{device}");
        assert!(why.is_none_or(|why| why.contains("; ")), "{device}");
    }
    let args =
        ["run", "--name", NAME, "--device", "net0=ffff:99:00.0", "--", "qemu-system-x86_64", "-M", "q35"];
    let problem = node.problem(&args, 3);
    assert_eq!(problem["code"], "device-unavailable", "{problem}");
    assert!(problem["error"].as_str().unwrap().contains("'vmove devices'"), "{problem}");
}

#[test]
fn vms_outlive_the_daemon_and_are_found_again() {
    let qemu = need!(qemu());
    let mut node = Node::start();
    let (stays, goes) = (run(&node, "stays", &qemu), run(&node, "goes", &qemu));
    assert_eq!(node.stop(), Some(0));
    assert!(alive(pid_of(&stays)), "SIGTERM of vmoved ended a QEMU");
    node.run();
    assert_eq!(status(&node, "stays"), "running");
    node.kill();
    assert!(alive(pid_of(&stays)) && alive(pid_of(&goes)), "SIGKILL of vmoved ended a QEMU");
    signal(pid_of(&goes), Signal::KILL);
    wait("QEMU has ended", || !alive(pid_of(&goes)));
    assert!(ram_of(&goes).exists());
    node.run();
    let again = node.ask(&["show", "stays"]);
    assert_eq!((again["pid"].clone(), again["status"].clone()), (stays["pid"].clone(), "running".into()));
    wait("the memory of the dead one is free", || !ram_of(&goes).exists());
    wait("its end is reported", || status(&node, "goes") == "ended");
    assert_eq!(node.ask(&["stop", "goes"])["how"], "had ended before");
    assert_eq!(node.ask(&["list"])["vms"].as_array().unwrap().len(), 1);
}

#[test]
fn the_end_of_a_qemu_is_noticed() {
    let qemu = need!(qemu());
    let node = Node::start();
    let vm = run(&node, NAME, &qemu);
    signal(pid_of(&vm), Signal::KILL);
    wait("it is reported", || status(&node, NAME) == "ended");
    wait("its memory is free", || !ram_of(&vm).exists());
    assert!(node.log().contains("QEMU has ended"));
    run(&node, NAME, &qemu);
    assert_eq!(status(&node, NAME), "running");
}

/// A QEMU that somebody else started, ended with the test.
struct Foreign(Child);

impl Foreign {
    fn start(qemu: &str, node: &Node, args: &[&str]) -> Self {
        let socket = node.path("foreign.qmp");
        let _ = std::fs::remove_file(&socket);
        let qmp = format!("unix:{},server=on,wait=off", socket.display());
        let child = Command::new(qemu)
            .args(["-nodefaults", "-display", "none", "-m", "64M", "-qmp", &qmp])
            .args(args)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        wait("its monitor is there", || socket.exists());
        Self(child)
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A file in the machine's shared memory, removed with the test.
struct SharedFile(PathBuf);

impl Drop for SharedFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Those that have failed are kept like those that were stopped; what is of somebody else's making is left alone.
#[test]
fn the_folder_of_a_vm_that_is_no_more_goes_after_a_while() {
    let qemu = need!(qemu());
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("v.toml");
    std::fs::write(&config, "insecure = true\nkeep-stopped = '4s'\n").unwrap();
    let node = Node::start_with(&["--config", config.to_str().unwrap()]);
    let folder = |name: &str| node.state().join("run").join(name);
    for name in ["stopped", "failed", "has-an-image", "lives"] {
        run(&node, name, &qemu);
    }
    std::fs::write(folder("stopped").join("console.log"), "login:").unwrap();
    std::fs::write(folder("has-an-image").join("disk.raw"), "data").unwrap();
    std::fs::create_dir(folder("somebody-elses")).unwrap();
    std::fs::write(folder("somebody-elses").join("a.log"), "x").unwrap();
    signal(pid_of(&node.ask(&["show", "failed"])), Signal::KILL);
    wait("it is ended", || status(&node, "failed") == "ended");
    assert!(folder("failed").join("qemu.log").exists(), "its log is kept for a while");
    node.ask(&["stop", "stopped"]);
    assert!(folder("stopped").join("qemu.log").exists(), "its log is kept for a while");
    node.ask(&["stop", "has-an-image"]);
    for name in ["stopped", "failed"] {
        wait("its folder is gone", || !folder(name).exists());
    }
    // As old by now.
    std::thread::sleep(std::time::Duration::from_secs(5));
    assert_eq!(std::fs::read(folder("has-an-image").join("disk.raw")).unwrap(), b"data");
    assert!(folder("lives").join("qemu.log").exists() && folder("somebody-elses").join("a.log").exists());
    assert_eq!(status(&node, "lives"), "running");
    // The name is free as ever.
    run(&node, "stopped", &qemu);
}

#[test]
fn a_foreign_qemu_is_adopted_released_and_only_ended_by_force() {
    let qemu = need!(qemu());
    let node = Node::start();
    let file = SharedFile(format!("/dev/shm/vmove-adopt-{}", std::process::id()).into());
    let backend = format!("memory-backend-file,id=ram0,size=64M,share=on,mem-path={}", file.0.display());
    let mut foreign = Foreign::start(&qemu, &node, &["-object", &backend, "-machine", "memory-backend=ram0"]);
    let socket = node.path("foreign.qmp");
    let adopt = |name: &'static str| {
        vec![
            "adopt".to_owned(),
            "--name".to_owned(),
            name.to_owned(),
            "--qmp".to_owned(),
            socket.display().to_string(),
        ]
    };
    let adopt = |name| adopt(name).iter().map(String::as_str).map(str::to_owned).collect::<Vec<_>>();
    let args = adopt("legacy");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();

    let vm = node.ask(&args);
    assert_eq!(u32::try_from(pid_of(&vm)).unwrap(), foreign.0.id());
    assert_eq!((vm["adopted"].clone(), vm["status"].clone()), (true.into(), "running".into()));
    assert_eq!(ram_of(&vm), file.0);
    assert!(
        !vm["command_line"].to_string().contains("foreign.qmp"),
        "its monitor would be in the way at the destination: {vm}"
    );
    let twice = adopt("twice");
    let twice: Vec<&str> = twice.iter().map(String::as_str).collect();
    assert_eq!(node.problem(&twice, 1)["code"], "name-taken");
    assert_eq!(node.problem(&["stop", "legacy"], 1)["code"], "adopted");

    node.ask(&["forget", "legacy"]);
    assert_eq!(node.ask(&["list"])["vms"], serde_json::json!([]));
    assert!(foreign.0.try_wait().unwrap().is_none() && file.0.exists());
    node.ask(&args);
    node.ask(&["stop", "legacy", "--force"]);
    assert!(foreign.0.wait().unwrap().code().is_some());
    assert!(file.0.exists(), "a file that is not ours was removed");
}

#[test]
fn a_foreign_qemu_that_could_never_move_is_refused_with_reasons() {
    let qemu = need!(qemu());
    let node = Node::start();
    let socket = node.path("foreign.qmp").display().to_string();
    let adopt = ["adopt", "--name", "x", "--qmp", &socket];
    let mut foreign = Foreign::start(&qemu, &node, &[]);
    let problem = node.problem(&adopt, 3);
    assert_eq!(problem["code"], "not-movable");
    assert!(problem["error"].as_str().unwrap().contains("memory-backend-file"), "{problem}");
    assert!(foreign.0.try_wait().unwrap().is_none());
    drop(foreign);
    assert_eq!(node.problem(&["adopt", "--name", "x", "--qmp", "/no/such.sock"], 1)["code"], "qmp-failed");
    assert_eq!(
        node.problem(&["adopt", "--name", "x", "--qmp", node.control().to_str().unwrap()], 1)["code"],
        "qmp-failed"
    );
}

/// The VM is where it was and runs.
#[track_caller]
fn unharmed(node: &Node, name: &str) {
    let vm = node.ask(&["show", name]);
    assert_eq!(vm["status"], "running");
    assert!(vm.get("migration").is_none(), "{vm}");
}

/// What `check` and `migrate` say of a peer that cannot be used.
#[track_caller]
fn peer_is_no_use(node: &Node, to: &str, word: &str) {
    let report = Ended::of(node.command(&["--json"]).args(["check", NAME, "--to", to])).expect(3).json();
    assert!(report["blockers"].to_string().contains(word), "{report}");
    let ended = Ended::of(node.command(&["--json"]).args(["migrate", NAME, "--to", to]));
    assert!(matches!(ended.code, Some(1 | 3)), "{ended:#?}");
    let json = ended.json();
    assert_eq!(json["guest"], "source", "{json}");
    assert!(json["error"].as_str().unwrap().contains(word), "{json}");
    assert!(json["id"].is_string() && json["vm"] == NAME, "{json}");
    unharmed(node, NAME);
}

#[test]
fn a_peer_that_cannot_be_used_leaves_the_guest_where_it_is() {
    let qemu = need!(qemu());
    let node = Node::start();
    run(&node, NAME, &qemu);
    peer_is_no_use(&node, &vmove_skip::free_port().to_string(), "connection refused");
    peer_is_no_use(&node, &fake_peer(|_| b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()), "vmove daemon");
    peer_is_no_use(&node, &fake_peer(|_| Vec::new()), "vmove daemon");
    let other_version = |_: &[u8]| [&b"VMOVE\r\n\0"[..], &77_u16.to_le_bytes(), &[1, 0]].concat();
    peer_is_no_use(&node, &fake_peer(other_version), "found 77");
    let secured = tls_node(&Pki::new());
    peer_is_no_use(&node, &secured.listen.to_string(), "expects TLS");
}

#[test]
fn nodes_of_different_authorities_do_not_talk() {
    let qemu = need!(qemu());
    let (node, other, plain) = (tls_node(&Pki::new()), tls_node(&Pki::new()), Node::start());
    run(&node, NAME, &qemu);
    peer_is_no_use(&node, &other.listen.to_string(), "same authority");
    peer_is_no_use(&node, &plain.listen.to_string(), "TLS");
}

/// A server that answers what it is told and hangs up, as often as it is asked.
fn fake_peer(reply: impl Fn(&[u8]) -> Vec<u8> + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut some = [0; 256];
            let got = stream.read(&mut some).unwrap_or(0);
            let _ = stream.write_all(&reply(&some[..got]));
        }
    });
    address
}

#[test]
fn a_vm_moves_there_and_back() {
    let qemu = need!(qemu());
    let pki = Pki::new();
    let (a, b) = (tls_node(&pki), tls_node(&pki));
    let before = run(&a, NAME, &qemu);
    let report = a.ask(&["migrate", NAME, "--to", &b.listen.to_string(), "--mode", "hybrid", "--verify"]);
    for key in [
        "id",
        "vm",
        "mode",
        "mode_reason",
        "fabric",
        "memory",
        "total_ms",
        "downtime_ms",
        "setup_ms",
        "rounds",
        "bytes_sent",
        "pages_total",
        "pages_zero",
        "phases",
        "verified",
    ] {
        assert!(report.get(key).is_some(), "{key} is missing: {report}");
    }
    assert_eq!((report["mode"].clone(), report["verified"].clone()), ("hybrid".into(), true.into()));
    assert!(!alive(pid_of(&before)) && !ram_of(&before).exists());
    assert_eq!(a.ask(&["list"])["vms"], serde_json::json!([]));
    let gone = a.problem(&["pause", NAME], 1);
    let message = gone["error"].as_str().unwrap();
    assert_eq!(gone["code"], "unknown-vm");
    assert!(message.contains(&format!("moved to {}", b.listen)), "{message}");
    assert_eq!(status(&b, NAME), "running");

    let id = b.ask(&["migrate", NAME, "--to", &a.listen.to_string(), "--detach"])["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let followed = b.vmove(&["status", &id[..8], "--follow"]).expect(0);
    assert!(followed.out.contains("downtime") && followed.err.is_empty(), "{followed:#?}");
    let report = b.ask(&["status", &id[..8], "--follow"]);
    assert_eq!(report["id"].as_str().unwrap(), id);
    unharmed(&a, NAME);
    let history = b.ask(&["history", "--vm", NAME]);
    assert_eq!(history["migrations"].as_array().unwrap().len(), 2);
    assert!(b.vmove(&["history"]).expect(0).out.contains("done, down"));
    let shown = b.vmove(&["status", &id]).expect(0).out;
    assert!(shown.contains("downtime"), "{shown}");
    wait("it is counted", || {
        a.http("GET", "/metrics", "")
            .1
            .contains("vmove_migrations_total{mode=\"hybrid\",outcome=\"done\",role=\"source\"} 1")
    });
}

/// Gives the guest memory that must be sent: the end of its RAM, which an idle firmware never looks at.
fn fill(vm: &Value, bytes: usize) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().write(true).open(ram_of(vm)).unwrap();
    let noise: Vec<u8> = (0..bytes).map(|i| u8::try_from((i * 7 + i / 4096) % 251).unwrap() | 1).collect();
    file.write_all_at(&noise, (64 << 20) - u64::try_from(bytes).unwrap() / 2).unwrap();
}

#[test]
fn a_migration_is_cancelled_by_ctrl_c_and_by_request() {
    let qemu = need!(qemu());
    let (a, b) = (
        Node::start_with(&["--insecure", "--fabric", "tcp"]),
        Node::start_with(&["--insecure", "--fabric", "tcp"]),
    );
    let vm = run(&a, NAME, &qemu);
    fill(&vm, 24 << 20);
    let to = b.listen.to_string();
    let migrate = ["migrate", NAME, "--to", &to, "--mode", "precopy", "--bandwidth", "1MiB"];
    let rounds = |node: &Node| {
        let all = node.ask(&["status"]);
        all["migrations"].as_array().unwrap().iter().any(|m| m["phase"] == "rounds")
    };
    let mut command = a.command(&["--json"]);
    let child = command
        .args(migrate)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait("it is at work", || rounds(&a));
    assert_eq!(a.problem(&["stop", NAME], 1)["code"], "busy");
    assert_eq!(a.problem(&["migrate", NAME, "--to", &to], 1)["code"], "busy");
    signal(i32::try_from(child.id()).unwrap(), Signal::INT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((json["cancelled"].clone(), json["guest"].clone()), (true.into(), "source".into()));
    assert!(String::from_utf8_lossy(&output.stderr).contains("press Ctrl-C again"));
    unharmed(&a, NAME);
    wait("the destination has nothing left", || {
        b.ask(&["list"])["vms"] == serde_json::json!([]) && b.processes().is_empty()
    });

    let id = a.ask(&[&migrate[..], &["--detach"]].concat())["id"].as_str().unwrap().to_owned();
    wait("it is at work", || rounds(&a));
    // Waiting ends, the migration does not.
    for json in [false, true] {
        let mut follow = a.command(if json { &["--json"][..] } else { &[] });
        follow.args(["status", &id, "--follow"]).stdin(Stdio::null());
        let mut child = follow.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A pipe has a line at once, not only at the end.
        let (mut out, mut line) = (BufReader::new(child.stdout.take().unwrap()), String::new());
        out.read_line(&mut line).unwrap();
        if json {
            let snapshot: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(
                (&snapshot["id"], &snapshot["phase"]),
                (&id.clone().into(), &"rounds".into()),
                "{line}"
            );
        } else {
            assert!(line.starts_with(&format!("{NAME}: rounds, ")), "{line}");
        }
        signal(i32::try_from(child.id()).unwrap(), Signal::INT);
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("goes on"));
        let objects = rest.lines().all(|line| serde_json::from_str::<Value>(line).is_ok());
        assert!(!json || objects && rest.contains("interrupted"), "{rest}");
        assert!(rounds(&a));
    }
    assert_eq!(a.ask(&["cancel", &id])["id"], id);
    wait("it has ended", || a.ask(&["status"])["migrations"] == serde_json::json!([]));
    unharmed(&a, NAME);
}

#[test]
fn a_daemon_that_dies_in_the_middle_is_waited_for() {
    let qemu = need!(qemu());
    let mut a = Node::start_with(&["--insecure", "--fabric", "tcp"]);
    let b = Node::start_with(&["--insecure", "--fabric", "tcp"]);
    let vm = run(&a, NAME, &qemu);
    fill(&vm, 24 << 20);
    let to = b.listen.to_string();
    let mut command =
        a.command(&["--json", "migrate", NAME, "--to", &to, "--mode", "precopy", "--bandwidth", "1MiB"]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait("it is at work", || a.ask(&["status"])["migrations"].to_string().contains("\"rounds\""));
    a.kill();
    assert!(alive(pid_of(&vm)));
    a.run();
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("lost the daemon"), "{told}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["guest"], "source", "{json}");
    unharmed(&a, NAME);
    // The past can be asked for after the next restart, too.
    let id = json["id"].as_str().unwrap();
    assert_eq!(a.stop(), Some(0));
    a.run();
    assert_eq!(a.ask(&["status", id])["outcome"]["guest"], "source");
    assert_eq!(
        Ended::of(a.command(&["--json"]).args(["status", &id[..6], "--follow"])).expect(1).json()["id"],
        id
    );
}
