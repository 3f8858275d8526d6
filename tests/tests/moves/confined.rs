//! QEMUs run as a user without privileges and behind a filter of system calls, and are moved and forked all the same.
#![cfg(test)]

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use vmove_guest::config::Config;
use vmove_skip::need;
use vmove_tests::beacon;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::disks;
use vmove_tests::fleet::until;
use vmove_tests::forks::{Parent, done, names};
use vmove_tests::guest::{BOOT_TIMEOUT, Guest};
use vmove_tests::kvm_device::Closed;
use vmove_tests::places::Qemu;
use vmove_tests::process::Guarded;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{self, NAME, Scene, memory_mib, steady, vmove};

fn ready() -> Result<(), String> {
    scene::ready().map_err(|why| format!("{why:#}"))?;
    vmove_skip::open_to_qemu()
}

/// The rights of a process, as the kernel tells them.
#[derive(Debug, PartialEq, Eq)]
struct Rights {
    uid: u32,
    gid: u32,
    no_new_privileges: bool,
    seccomp: u32,
    /// What it has, and what a program that it starts could get.
    capabilities: [u64; 2],
}

fn rights(pid: i32) -> Rights {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field");
        line.split_ascii_whitespace().next().expect("a value").to_owned()
    };
    let number = |name: &str| field(name).parse().expect("a number");
    let capabilities = |name: &str| u64::from_str_radix(&field(name), 16).expect("a number");
    Rights {
        uid: number("Uid:"),
        gid: number("Gid:"),
        no_new_privileges: field("NoNewPrivs:") == "1",
        seccomp: number("Seccomp:"),
        capabilities: [capabilities("CapPrm:"), capabilities("CapBnd:")],
    }
}

#[track_caller]
fn confined(node: &Node, vm: &str) -> Rights {
    let found = rights(node.vm(vm).expect("it is here").pid);
    assert_ne!((found.uid, found.gid), (0, 0), "{vm} at {}: {found:?}", node.name());
    assert!(found.no_new_privileges && found.seccomp == 2, "{vm} at {}: {found:?}", node.name());
    assert_eq!(found.capabilities, [0, 0], "{vm} at {}: {found:?}", node.name());
    found
}

/// With the defaults of both daemons: there and back in each mode, every page compared.
#[test]
fn a_confined_guest_moves_in_each_mode() {
    need!(ready());
    let scene = Scene::new().expect("a guest that runs");
    let first = confined(&scene.a, NAME);
    let (mut from, mut to) = (&scene.a, &scene.b);
    for mode in ["precopy", "postcopy", "hybrid", "precopy"] {
        let report = from.migrate(NAME, to.name(), &["--mode", mode, "--verify"]).expect("it moves");
        assert_eq!(report.mode, mode);
        scene.sound_at(to).expect("its memory is what it was");
        assert_eq!(confined(to, NAME), first, "after {mode}");
        for ram in to.vm(NAME).expect("it is here").ram {
            let meta = std::fs::metadata(&ram.path).expect("a RAM file");
            assert_eq!((meta.uid(), meta.mode() & 0o777), (first.uid, 0o600), "{}", ram.path.display());
        }
        scene.gone_from(from).expect("nothing is left");
        std::mem::swap(&mut from, &mut to);
    }
}

#[test]
fn children_of_a_confined_guest_are_confined_as_it_is() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    let own = confined(&node, NAME);
    let answer = done(&node, &["create", NAME, "--count", "2", "--verify"]).expect("two children");
    for child in names(&answer) {
        assert_eq!(confined(&node, &child), own);
        parent.sound(&node, &child).expect("sound");
    }
    // Memory is moved under a QEMU that has no rights.
    assert!(!answer["own_memory"].is_null(), "{answer}");
    let child = &names(&answer)[0];
    done(&node, &["promote", child]).expect("memory of its own");
    parent.all_sound(&[(&node, NAME), (&node, child)]).expect("sound");
}

/// A user who is neither root nor the one of vmove's QEMUs.
const SOMEBODY: u32 = 60_999;

/// As libvirt starts a QEMU: as a user of its own, behind a filter. Its memory is in `ram`, its monitor `monitor.sock` in `folder`.
fn foreign(guest: &Guest, folder: &Path, ram: &Path) -> Guarded {
    let backend =
        format!("memory-backend-file,id=ram0,share=on,size={}M,mem-path={}", guest.memory_mib, ram.display());
    let user = [format!("--reuid={SOMEBODY}"), format!("--regid={SOMEBODY}")];
    let log = std::fs::File::create(folder.join("qemu.log")).expect("a log");
    let child = Command::new("setpriv")
        .args(user)
        .args(["--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--"])
        .args(guest.command_line("serial.log").expect("a command line"))
        .args(["-object", &backend, "-machine", "memory-backend=ram0", "-sandbox", "on,spawn=deny"])
        .args(["-qmp", "unix:monitor.sock,server=on,wait=off"])
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a log"))
        .stderr(log)
        .spawn();
    child.expect("setpriv runs").into()
}

/// Nothing of it can be opened by another user, and it may not make a userfaultfd of its own.
#[test]
fn a_qemu_of_another_user_is_adopted_and_moved() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let memory = sandbox.mount_thp("memory").expect("a tmpfs");
    let folder = sandbox.folder("foreign").expect("a folder");
    for place in [&memory, &folder] {
        chown(place, Some(SOMEBODY), Some(SOMEBODY)).expect("theirs");
        std::fs::set_permissions(place, PermissionsExt::from_mode(0o700)).expect("closed");
    }
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    let ram = memory.join("ram");
    let qemu = foreign(&guest, &folder, &ram);
    let (_, page) = beacon::wait_running(|| vec![ram.clone()], BOOT_TIMEOUT).expect("the guest runs");
    let socket = folder.join("monitor.sock");
    let adopted =
        vmove(&a, &["adopt", "--name", NAME, "--qmp", &socket.to_string_lossy()]).expect("an answer");
    assert_eq!(adopted.code, 0, "{} {}", adopted.answer, adopted.said);
    let found = rights(qemu.pid());
    assert_eq!((found.uid, found.seccomp, found.capabilities), (SOMEBODY, 2, [0, 0]));
    assert_eq!(page.read().expect("it runs").errors, 0);
    // At another node it is one of that node's.
    a.migrate(NAME, b.name(), &["--mode", "precopy", "--verify"]).expect("it moves");
    let there = confined(&b, NAME);
    assert_ne!(there.uid, SOMEBODY);
    let page = b.vm(NAME).and_then(|vm| vm.beacon()).expect("a beacon");
    let before = page.read().expect("it runs");
    until("the guest works there", || page.read().is_some_and(|now| now.work > before.work + 500));
    assert_eq!(page.read().expect("it runs").errors, 0);
}

/// What the operator chooses: `[qemu]` of both nodes.
#[test]
fn an_operator_who_wants_root_gets_it() {
    need!(ready());
    for (table, seccomp) in [("user = 'root'", 2), ("user = 'root'\nsandbox = false", 0)] {
        let options = NodeOptions { config: format!("[qemu]\n{table}"), ..NodeOptions::default() };
        let sandbox = Sandbox::new().expect("a sandbox");
        let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
        let scene = Scene::with_options(sandbox, &options, "thp", &guest).expect("a guest that runs");
        scene.moves_now().expect("it moves");
        let found = rights(scene.b.vm(NAME).expect("it is here").pid);
        assert_eq!((found.uid, found.seccomp), (0, seccomp), "{table}");
    }
}

/// A command line that says what it wants keeps that.
#[test]
fn a_command_line_with_a_sandbox_of_its_own_is_left_alone() {
    need!(ready());
    let mut guest = Guest::new(192, Config { working_set_mib: 8, ..Config::default() }).expect("a QEMU");
    guest.extra.extend(["-sandbox", "off"].map(str::to_owned));
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let vm = a.run_guest(NAME, "thp", &guest).expect("the guest runs");
    let found = rights(vm.pid);
    assert!(found.uid != 0 && found.seccomp == 0, "{found:?}");
    // Another node takes no guest that wants fewer limits than it has.
    let refused = vmove(&a, &["migrate", NAME, "--to", b.name()]).expect("an answer");
    assert_eq!(refused.code, 3, "{}", refused.answer);
    assert!(
        refused.said.contains("option-not-allowed") && refused.said.contains("sandbox"),
        "{}",
        refused.said
    );
}

fn with_disk(image: &Path) -> Guest {
    let mut guest = Guest::new(192, Config { working_set_mib: 8, ..Config::default() }).expect("a QEMU");
    let drive = format!("if=none,id=disk0,format=raw,file={}", image.display());
    guest.extra.extend(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0"].map(str::to_owned));
    guest
}

/// The code and the message of the blocker about QEMU's user.
fn blocker(answer: &Value) -> String {
    let list = answer["blockers"].as_array().cloned().unwrap_or_default();
    let found = list.into_iter().find(|blocker| blocker["code"] == "qemu-user");
    found.map(|blocker| blocker["message"].to_string()).unwrap_or_default()
}

#[test]
fn a_disk_that_qemu_cannot_open_is_refused_by_name_with_a_way_out() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let folder = sandbox.folder("images").expect("a folder");
    let image = folder.join("disk.raw");
    disks::blank(&image, 16 << 20).expect("a disk");
    let guest = with_disk(&image);
    let of_root = || {
        chown(&image, Some(0), Some(0)).expect("root's");
        std::fs::set_permissions(&image, PermissionsExt::from_mode(0o600)).expect("nobody else's");
    };
    of_root();
    let refused = a.run_guest(NAME, "thp", &guest).expect_err("it is root's").to_string();
    let name = image.display().to_string();
    for word in [name.as_str(), "chown", "can read and write", "mode 0600"] {
        assert!(refused.contains(word), "{word}: {refused}");
    }
    assert!(a.vms().expect("a list").is_empty());

    disks::for_qemu(&image).expect("QEMU's");
    // The folder counts, too.
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).expect("closed");
    let refused = a.run_guest(NAME, "thp", &guest).expect_err("the folder is closed").to_string();
    assert!(refused.contains(&format!("chmod o+x {}", folder.display())), "{refused}");
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).expect("open");
    a.run_guest(NAME, "thp", &guest).expect("the guest runs");

    // It goes on here, and its disk is opened anew where it goes.
    of_root();
    let refused = vmove(&a, &["migrate", NAME, "--to", b.name()]).expect("an answer");
    assert_eq!(refused.code, 3, "{}", refused.answer);
    let message = blocker(&refused.answer);
    assert!(message.contains(&name) && message.contains("chown"), "{}", refused.answer);
    assert_eq!(a.vm(NAME).expect("it is here").status, "running");
    disks::for_qemu(&image).expect("QEMU's");
    a.migrate(NAME, b.name(), &[]).expect("it moves");
    confined(&b, NAME);
}

#[test]
fn a_tap_that_root_must_make_is_refused() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let mut guest = Guest::new(192, Config { working_set_mib: 8, ..Config::default() }).expect("a QEMU");
    guest.extra.extend(["-netdev", "tap,id=net0,ifname=vmt-none"].map(str::to_owned));
    let refused = node.run_guest(NAME, "thp", &guest).expect_err("root's").to_string();
    assert!(refused.contains("ip tuntap add dev vmt-none mode tap user"), "{refused}");
}

/// With `accel=kvm:tcg` QEMU itself would say nothing: the guest would be emulated.
#[test]
fn a_guest_that_would_be_emulated_for_lack_of_rights_is_refused() {
    need!(ready());
    let _closed = need!(Closed::take());
    let sandbox = Sandbox::new().expect("a sandbox");
    let b = Node::start(&sandbox, "b", NodeOptions::default()).expect("a daemon");
    let of_root = NodeOptions {
        config: "[qemu]\nuser = 'root'".to_owned(),
        peers: vec![("b".to_owned(), b.listen())],
        ..NodeOptions::default()
    };
    let a = Node::start(&sandbox, "a", of_root).expect("a daemon");
    let qemu = Qemu::under_test().expect("a QEMU").display().to_string();
    let line = |accel: &str| -> Vec<String> {
        let machine = format!("pc,accel={accel}");
        let words = ["-nodefaults", "-no-user-config", "-display", "none", "-machine", &machine, "-m", "96"];
        let run = ["run", "--name", NAME, "--", &qemu];
        run.iter().chain(&words).map(|word| (*word).to_owned()).collect()
    };
    let run = |node: &Node, accel: &str| {
        let line = line(accel);
        vmove(node, &line.iter().map(String::as_str).collect::<Vec<_>>()).expect("an answer")
    };
    let way_out = |text: &str| {
        for word in ["chmod 0666 /dev/kvm", "-machine accel=kvm:tcg", "would emulate the guest", "accel=tcg"]
        {
            assert!(text.contains(word), "{word}: {text}");
        }
    };
    let refused = run(&b, "kvm:tcg");
    assert_ne!(refused.code, 0, "{}", refused.answer);
    way_out(&refused.said);
    assert_eq!(run(&b, "tcg").code, 0, "as it says");
    b.ask(&["stop", "--force", NAME]).expect("it ends");
    // Root may.
    let started = run(&a, "kvm:tcg");
    assert_eq!(started.code, 0, "{} {}", started.answer, started.said);
    for command in ["check", "migrate"] {
        let refused = vmove(&a, &[command, NAME, "--to", "b"]).expect("an answer");
        assert_eq!(refused.code, 3, "{command}: {}", refused.answer);
        way_out(&blocker(&refused.answer));
    }
}
