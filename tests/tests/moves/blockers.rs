//! All blockers of a migration are found at once, before anything is changed.
#![cfg(test)]

use std::path::Path;

use serde_json::{Value, json};
use vmove_guest::config::Config;
use vmove_skip::{need, skip};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::disks;
use vmove_tests::guest::{Guest, StockQemu};
use vmove_tests::monitor::Monitor;
use vmove_tests::process::Guarded;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{End, NAME, Scene, ready, vmove};

/// A guest for checks only.
fn idle() -> Guest {
    Guest::new(192, Config { working_set_mib: 8, ..Config::default() }).expect("a QEMU")
}

/// (code, subject, message) of the blockers in an answer.
fn blockers(answer: &Value) -> Vec<(String, String, String)> {
    let list = answer["blockers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |blocker: &Value, key: &str| blocker[key].as_str().unwrap_or_default().to_owned();
    list.iter().map(|b| (text(b, "code"), text(b, "subject"), text(b, "message"))).collect()
}

#[track_caller]
fn has(answer: &Value, code: &str, subject: &str) {
    let found = blockers(answer);
    assert!(
        found.iter().any(|(c, s, message)| c == code && s.contains(subject) && !message.is_empty()),
        "no {code} about {subject:?} in {found:?}"
    );
}

fn check(node: &Node, name: &str) -> End {
    vmove(node, &["check", name, "--to", "b"]).expect("an answer")
}

fn run(node: &Node, name: &str, guest: &Guest) {
    let line = guest.command_line("{vmdir}/serial.log").expect("a command line");
    let mut arguments = vec!["run", "--name", name, "--"];
    arguments.extend(line.iter().map(String::as_str));
    node.ask(&arguments).expect("the guest starts");
}

fn disk(path: &Path, options: &str) -> [String; 4] {
    let drive = format!("if=none,id=disk0,format=raw,file={},{options}", path.display());
    ["-drive".to_owned(), drive, "-device".to_owned(), "virtio-blk-pci,drive=disk0,id=blk0".to_owned()]
}

#[test]
fn a_vm_that_can_move_has_no_blockers() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, _b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    run(&a, NAME, &idle());
    let end = check(&a, NAME);
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    assert_eq!(blockers(&end.answer), []);
    assert_eq!(end.answer["modes"], json!(["precopy", "postcopy", "hybrid"]));
}

/// Arguments for a second monitor, for the operator.
fn operator(socket: &str) -> [String; 2] {
    ["-qmp".to_owned(), format!("unix:{socket},server=on,wait=off")]
}

/// Plugs in a device through which other processes write guest RAM. `vmove run` would refuse it.
fn plug_shared_memory(socket: &Path) {
    let monitor = Monitor::connect(socket).expect("a monitor");
    let memory = json!({"qom-type": "memory-backend-ram", "id": "shmem0", "size": 1 << 20, "share": true});
    monitor.run("object-add", memory).expect("it is made");
    let device = json!({"driver": "ivshmem-plain", "id": "shm0", "memdev": "shmem0"});
    monitor.run("device_add", device).expect("it is plugged in");
}

#[test]
fn all_blockers_are_named_at_once() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let image = sandbox.path().join("disk.raw");
    disks::blank(&image, 16 << 20).expect("a disk");
    let mut guest = idle();
    guest.extra.extend(operator("{vmdir}/operator.sock"));
    guest.extra.extend(disk(&image, "cache=writeback"));
    run(&a, NAME, &guest);
    run(&b, NAME, &idle());
    plug_shared_memory(&a.vm(NAME).expect("it is listed").dir.join("operator.sock"));
    // QEMU keeps the disk open, but its name is gone.
    std::fs::remove_file(&image).expect("deletes");
    let end = check(&a, NAME);
    assert_eq!(end.code, 3, "{} {}", end.answer, end.said);
    has(&end.answer, "ivshmem", "shm0");
    has(&end.answer, "name-taken", NAME);
    has(&end.answer, "disk-not-shared", "");
    assert_eq!(end.answer["modes"], json!([]), "{}", end.answer);
    // A migration is refused as well, and the message says why.
    let refused = vmove(&a, &["migrate", NAME, "--to", "b"]).expect("an answer");
    assert_eq!((refused.code, &refused.answer["guest"]), (3, &"source".into()), "{}", refused.answer);
    let found = blockers(&refused.answer);
    assert!(!found.is_empty(), "{}", refused.answer);
    for (code, _, message) in found {
        assert!(refused.said.contains(&code) && refused.said.contains(&message), "{code}: {}", refused.said);
    }
    for node in [&a, &b] {
        assert_eq!(node.vm(NAME).expect("it is listed").status, "running");
    }
}

#[test]
fn direct_io_is_a_warning_and_a_guest_with_it_moves() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let image = sandbox.path().join("disk.raw");
    disks::blank(&image, 16 << 20).expect("a disk");
    let mut guest = idle();
    guest.extra.extend(disk(&image, "cache=none"));
    let line = guest.command_line("{vmdir}/serial.log").expect("a command line");
    let mut arguments = vec!["--json", "run", "--name", NAME, "--"];
    arguments.extend(line.iter().map(String::as_str));
    let started = a.vmove(&arguments).expect("an answer");
    if !started.status.success() {
        let said = String::from_utf8_lossy(&started.stderr).into_owned();
        assert!(said.contains("O_DIRECT") || said.contains("direct"), "{said}");
        return skip!("this file system has no direct I/O: {said}");
    }
    let end = check(&a, NAME);
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    let warnings = end.answer["warnings"].to_string();
    assert!(warnings.contains("bypasses the page cache") && warnings.contains("disk.raw"), "{warnings}");
    let report = a.ask(&["migrate", NAME, "--to", "b", "--mode", "hybrid"]).expect("it moves");
    assert!(report["direct_io"].as_str().is_some_and(|how| how.contains("stopped")), "{report}");
    assert_eq!(b.vm(NAME).expect("it is listed").status, "running");
}

#[test]
fn a_disk_that_is_another_one_at_the_destination_is_told() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, _b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let image = sandbox.path().join("disk.raw");
    let make = |bytes| disks::blank(&image, bytes).expect("a disk");
    make(16 << 20);
    let mut guest = idle();
    guest.extra.extend(disk(&image, "file.locking=off"));
    run(&a, NAME, &guest);
    assert_eq!(check(&a, NAME).code, 0);
    std::fs::remove_file(&image).expect("deletes");
    let end = check(&a, NAME);
    assert_eq!(end.code, 3, "{} {}", end.answer, end.said);
    has(&end.answer, "disk-not-shared", "");
    assert!(end.answer.to_string().contains("disk.raw"), "{}", end.answer);
}

/// Starts a QEMU that was not prepared for a migration.
fn stranger(sandbox: &Sandbox, guest: &Guest, more: &[&str]) -> (Guarded, std::path::PathBuf) {
    let folder = sandbox.folder("stranger").expect("a folder");
    let socket = folder.join("qmp.sock");
    let line = guest.command_line(&folder.join("serial.log").to_string_lossy()).expect("a command line");
    let child = std::process::Command::new(&line[0])
        .args(&line[1..])
        .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
        .args(more)
        .current_dir(&folder)
        .stdin(std::process::Stdio::null())
        .spawn()
        .expect("QEMU starts");
    let process = Guarded::from(child);
    for _ in 0..3000 {
        if std::os::unix::net::UnixStream::connect(&socket).is_ok() {
            return (process, socket);
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("QEMU opens no monitor");
}

#[test]
fn a_qemu_with_private_memory_is_not_adopted() {
    need!(ready());
    for (more, words) in [
        (&[][..], "memory-backend-file,share=on"),
        (
            &["-object", "memory-backend-ram,id=ram0,size=192M", "-machine", "memory-backend=ram0"],
            "ram0 is memory-backend-ram",
        ),
        (
            &[
                "-object",
                "memory-backend-memfd,id=ram0,size=192M,share=on",
                "-machine",
                "memory-backend=ram0",
            ],
            "ram0 is memory-backend-memfd",
        ),
    ] {
        let sandbox = Sandbox::new().expect("a sandbox");
        let a = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
        let (mut process, socket) = stranger(&sandbox, &idle(), more);
        let arguments = ["adopt", "--name", NAME, "--qmp", &socket.to_string_lossy()];
        let end = vmove(&a, &arguments).expect("an answer");
        assert_eq!(end.code, 3, "{more:?}: {} {}", end.answer, end.said);
        assert_eq!(end.answer["code"], "not-movable", "{}", end.answer);
        assert!(end.error().contains(words), "{more:?}: no {words:?} in: {}", end.error());
        assert_eq!(a.vms().expect("a list"), Vec::<String>::new());
        assert!(process.ended().expect("waits").is_none(), "QEMU was ended");
        // The daemon has released the monitor.
        std::os::unix::net::UnixStream::connect(&socket).expect("connects");
    }
}

#[test]
fn an_adopted_qemu_names_its_blockers_and_stays_as_it_was() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let memory = sandbox.mount_thp("memory").expect("a tmpfs");
    let folder = sandbox.folder("stranger").expect("a folder");
    let socket = folder.join("operator.sock");
    let more = operator(&socket.to_string_lossy());
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let mut qemu = StockQemu::start(&idle(), &folder, &memory.join("ram"), &more).expect("QEMU starts");
    qemu.wait_running().expect("the guest is at work");
    let arguments = ["adopt", "--name", NAME, "--qmp", &qemu.qmp().to_string_lossy()];
    let adopted = vmove(&a, &arguments).expect("an answer");
    assert_eq!(adopted.code, 0, "{} {}", adopted.answer, adopted.said);
    run(&b, NAME, &idle());
    plug_shared_memory(&socket);
    let end = check(&a, NAME);
    assert_eq!(end.code, 3, "{} {}", end.answer, end.said);
    has(&end.answer, "ivshmem", "shm0");
    has(&end.answer, "name-taken", NAME);
    // Source and destination are on one host, so both QEMUs would open this socket.
    has(&end.answer, "same-path", "operator.sock");
    let forgotten = vmove(&a, &["forget", NAME]).expect("an answer");
    assert_eq!(forgotten.code, 0, "{} {}", forgotten.answer, forgotten.said);
    qemu.wait_running().expect("the guest is at work still");
}

#[test]
fn a_qemu_that_the_destination_has_not_is_told() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, _b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let mut guest = idle();
    let program = sandbox.path().join("qemu-system-x86_64");
    std::os::unix::fs::symlink(&guest.qemu, &program).expect("a link");
    guest.qemu.clone_from(&program);
    run(&a, NAME, &guest);
    assert_eq!(check(&a, NAME).code, 0);
    std::fs::remove_file(&program).expect("deletes");
    let end = check(&a, NAME);
    assert_eq!(end.code, 3, "{} {}", end.answer, end.said);
    has(&end.answer, "qemu-missing", "qemu-system-x86_64");
    let refused = vmove(&a, &["migrate", NAME, "--to", "b"]).expect("an answer");
    assert_eq!((refused.code, &refused.answer["guest"]), (3, &"source".into()), "{}", refused.answer);
    assert_eq!(a.vm(NAME).expect("it is listed").status, "running");
}

#[test]
fn a_command_line_that_can_never_move_is_refused_at_the_start() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let a = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let shared_memory = [
        "-object",
        "memory-backend-ram,id=shmem0,size=1M,share=on",
        "-device",
        "ivshmem-plain,memdev=shmem0,id=shm0",
    ];
    for (more, words) in [
        (&["-snapshot", "-incoming", "defer"][..], &["-snapshot", "-incoming"][..]),
        (&["-daemonize"], &["-daemonize"]),
        (&shared_memory, &["ivshmem-plain"]),
    ] {
        let mut guest = idle();
        guest.extra.extend(more.iter().map(|word| (*word).to_owned()));
        let line = guest.command_line("{vmdir}/serial.log").expect("a command line");
        let mut arguments = vec!["run", "--name", NAME, "--"];
        arguments.extend(line.iter().map(String::as_str));
        let end = vmove(&a, &arguments).expect("an answer");
        assert_eq!(end.code, 3, "{more:?}: {} {}", end.answer, end.said);
        assert_eq!(end.answer["code"], "not-movable", "{}", end.answer);
        for word in words {
            assert!(end.error().contains(word), "{more:?}: no {word:?} in: {}", end.error());
        }
        assert_eq!(a.vms().expect("a list"), Vec::<String>::new());
    }
}

#[test]
fn the_node_that_a_guest_is_on_is_no_destination() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let address = scene.a.listens_at().to_string();
    for verb in ["check", "migrate", "visit"] {
        for (to, why) in [(address.as_str(), "choose another"), ("a", "which is this node")] {
            let end = vmove(&scene.a, &[verb, NAME, "--to", to]).expect("an answer");
            let told = format!("{} {}", end.answer, end.said);
            assert!(end.code != 0 && told.contains(why), "{verb} to {to}: {} {told}", end.code);
        }
    }
    scene.unharmed().expect("nothing was changed");
}
