//! A guest under load is forked on one host; parent and children check their own memory, and never see each other's writes.
#![cfg(test)]

use std::collections::BTreeSet;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::disks;
use vmove_tests::fleet::until;
use vmove_tests::forks::{ForkPhase, Parent, done, journals, kill_in_fork, names, on, template_files, vfork};
use vmove_tests::guest::Guest;
use vmove_tests::monitor::Monitor;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib, ready, steady};

/// A guest that leaves enough of two cores to its children.
fn light() -> Config {
    Config {
        working_set_mib: 16,
        cold_mib: 16,
        rate: Rate::PagesPerSecond(1_000),
        verify: 8_000,
        ..Config::default()
    }
}

struct Stage {
    node: Node,
    parent: Parent,
    // Last: it ends whatever is left.
    sandbox: Sandbox,
}

fn stage_with(options: NodeOptions, extra: &[&str]) -> Stage {
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", options).expect("a daemon");
    let mut guest = Guest::new(memory_mib(&light()), light()).expect("a QEMU");
    guest.extra.extend(extra.iter().map(|word| (*word).to_owned()));
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    Stage { node, parent, sandbox }
}

/// Memory of pages of 2 MiB, of which a write takes one from the machine.
#[test]
fn a_guest_on_huge_pages_of_the_machine_is_forked_if_there_are_enough() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest = Guest::new(memory_mib(&light()), light()).expect("a QEMU");
    let bytes = guest.bytes();
    // Alone: pages of another test's would be enough for memory of its own.
    need!(sandbox.reserve_huge_pages_alone(2 << 20, 3 * bytes));
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let parent = Parent::start(&node, NAME, "hugetlb-2m", guest).expect("the guest runs");
    let answer = done(&node, &["create", NAME, "--count", "1", "--verify"]).expect("a child");
    let children = names(&answer);
    parent.all_sound(&on(&node, &children, Some(NAME))).expect("sound");
    let warning = answer["warnings"][0].as_str().unwrap_or_default();
    for words in ["private memory", "free huge pages", "vfork promote guest"] {
        assert!(warning.contains(words), "no {words:?} in {answer}");
    }
    assert_eq!(done(&node, &["tree", NAME]).expect("a tree")["private"], true);
    // To be forked again, the parent needs memory of its own, and there are not so many pages.
    let end = vfork(&node, &["create", NAME, "--count", "8"]).expect("an answer");
    assert_eq!(end.code, 3, "{}", end.said);
    assert!(end.said.contains("huge pages"), "{}", end.said);
    assert_eq!(node.vms().expect("a list").len(), 2);
    parent.sound(&node, NAME).expect("the parent is unharmed");
}

fn stage() -> Stage {
    stage_with(NodeOptions::default(), &[])
}

/// A number over the bytes of a file, holes and zeros alike.
fn sum(path: &Path) -> u64 {
    let file = std::fs::File::open(path).expect("it opens");
    let length = file.metadata().expect("stat").len();
    let mut part = vec![0; 1 << 20];
    let mut sum = 0_u64;
    for at in (0..length).step_by(part.len()) {
        file.read_exact_at(&mut part, at).expect("it reads");
        for word in part.chunks_exact(8) {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            sum = sum.rotate_left(5).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word;
        }
    }
    sum
}

#[test]
fn parent_and_children_never_see_each_others_writes() {
    need!(ready());
    let stage = stage();
    let Stage { node, parent, .. } = &stage;
    let answer = done(node, &["create", NAME, "--count", "4", "--verify"]).expect("four children");
    assert_eq!(names(&answer), ["guest.1", "guest.2", "guest.3", "guest.4"]);
    for child in answer["children"].as_array().expect("children") {
        assert_eq!(child["verified"], true, "{child}");
        assert!(child["running_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{child}");
        assert_eq!(child["node"], "a");
    }
    assert_eq!(answer["fabric"], "local");
    eprintln!("pause {} ms, all running after {} ms", answer["parent_pause_ms"], answer["all_running_ms"]);
    // Each counts its own work in a page that all of them had in common.
    parent.all_sound(&on(node, &names(&answer), Some(NAME))).expect("sound");
    let boot = |name: &str| parent.beacon(node, name).expect("a beacon").boot;
    for name in names(&answer) {
        assert_eq!(boot(&name), boot(NAME), "{name} is the same guest");
    }
    // What served the fork only is gone.
    assert!(template_files(node).is_empty(), "{:?}", template_files(node));
    let metric = |name: &str| node.metric(name).expect("metrics");
    assert_eq!(metric("vmove_forks_total{outcome=\"done\"}"), 1.0);
    assert_eq!(metric("vmove_fork_children_total{outcome=\"running\"}"), 4.0);
    assert_eq!(metric("vmove_fork_parent_pause_seconds_count"), 1.0);
    let tree = done(node, &["tree", NAME]).expect("a tree");
    assert_eq!(tree["children"].as_array().map(Vec::len), Some(4), "{tree}");
    assert_eq!(tree["private"], false, "{tree}");

    // One child ends; nobody minds.
    done(node, &["kill", "guest.2"]).expect("it ends");
    let end = vfork(node, &["kill", NAME]).expect("an answer");
    assert_eq!(end.code, 2, "the parent is no child: {}", end.said);
    parent.sound(node, "guest.1").expect("a sibling is sound");
    let end = vfork(node, &["join", NAME, "--timeout", "300ms"]).expect("an answer");
    assert_eq!(end.code, 1, "three are left: {}", end.said);

    // The parent is killed; its children live.
    let pid = node.vm(NAME).expect("it is listed").pid;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL)
        .expect("killed");
    let left = ["guest.1", "guest.3", "guest.4"];
    parent.all_sound(&left.map(|name| (node, name))).expect("children outlive their parent");
    for name in left {
        done(node, &["kill", name]).expect("it ends");
    }
    done(node, &["join", NAME, "--timeout", "10s"]).expect("all have ended");
}

#[test]
fn prepared_children_are_used_first_and_renewed() {
    need!(ready());
    let stage = stage();
    let Stage { node, parent, .. } = &stage;
    let warm = done(node, &["warm", NAME, "--count", "3"]).expect("three are prepared");
    assert_eq!(warm["prepared"], 3);
    assert_eq!(node.vms().expect("a list"), [NAME], "prepared children are no VMs yet");
    let answer =
        done(node, &["create", NAME, "--count", "4", "--verify", "--warm", "2"]).expect("four children");
    let warm: Vec<_> =
        answer["children"].as_array().expect("children").iter().map(|c| c["warm"] == true).collect();
    assert_eq!(warm, [true, true, true, false]);
    let deadline = Instant::now() + Duration::from_secs(30);
    let answer = loop {
        let end = vfork(node, &["create", NAME, "--count", "2", "--verify"]).expect("an answer");
        // While the pool is being filled, the VM is busy.
        if end.code == 0 || Instant::now() > deadline {
            break end;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    assert_eq!(answer.code, 0, "{} {}", answer.answer, answer.said);
    assert!(answer.answer["own_memory_before"].is_null(), "{}", answer.answer);
    assert!(answer.answer["own_memory"]["total_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{}", answer.answer);
    assert!(answer.answer["children"].as_array().expect("children").iter().all(|c| c["warm"] == true));
    parent.all_sound(&on(node, &names(&answer.answer), Some(NAME))).expect("sound after the second fork");
}

#[test]
fn a_promoted_child_and_its_parent_move_to_another_node() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let guest = Guest::new(memory_mib(&light()), light()).expect("a QEMU");
    let parent = Parent::start(&a, NAME, "thp", guest).expect("the guest runs");
    done(&a, &["create", NAME, "--count", "1"]).expect("a child");
    // Private memory is told of, and is in no way: a migration mends it first.
    let check = vmove_tests::scene::vmove(&a, &["check", "guest.1", "--to", "b"]).expect("an answer");
    assert_eq!(check.code, 0, "{} {}", check.answer, check.said);
    let told = check.answer["warnings"].to_string();
    assert!(told.contains("memory of its own") && told.contains("There is no promise until"), "{told}");
    assert!(!told.contains("could not be watched"), "{told}");
    let promoted = done(&a, &["promote", "guest.1"]).expect("memory of its own");
    assert_eq!(promoted["was_private"], true, "{promoted}");
    assert_eq!(done(&a, &["promote", "guest.1"]).expect("again")["was_private"], false);
    parent.sound(&a, "guest.1").expect("sound with memory of its own");
    let own = a.vm("guest.1").expect("it is listed");
    let (huge, all) = (own.smaps("ShmemPmdMapped"), own.smaps("Rss"));
    assert!(huge > 0 && huge >= all / 2, "{huge} of {all} KiB are mapped by huge pages");
    for name in ["guest.1", NAME] {
        let end =
            vmove_tests::scene::vmove(&a, &["migrate", name, "--to", "b", "--mode", "hybrid", "--verify"])
                .expect("an end");
        assert_eq!(end.code, 0, "{name}: {} {}", end.answer, end.said);
        assert_eq!(end.answer["verified"], true, "{}", end.answer);
        assert!(!end.said.contains("memory of its own first"), "{}", end.said);
        parent.sound(&b, name).expect("sound at the other node");
    }
    // A child that was moved is forked again.
    let answer = done(&b, &["create", "guest.1", "--count", "2", "--verify"]).expect("grandchildren");
    parent.all_sound(&on(&b, &names(&answer), None)).expect("sound");
}

#[test]
fn a_paused_parent_stays_paused() {
    need!(ready());
    let stage = stage();
    let Stage { node, parent, .. } = &stage;
    node.ask(&["pause", NAME]).expect("it pauses");
    let answer = done(node, &["create", NAME, "--count", "2", "--verify"]).expect("two children");
    assert_eq!(answer["parent_pause_ms"], 0.0, "{answer}");
    assert_eq!(node.vm(NAME).expect("it is listed").status, "paused");
    parent.all_sound(&on(node, &names(&answer), None)).expect("children run");
    node.ask(&["resume", NAME]).expect("it resumes");
    parent.sound(node, NAME).expect("the parent runs on");
}

/// Runs a QMP command on the monitor that the guest's command line gives each VM.
fn ask(node: &Node, vm: &str, command: &str, arguments: Value) -> anyhow::Result<Value> {
    Monitor::connect(&node.vm(vm)?.dir.join("operator.sock"))?.run(command, arguments)
}

const OPERATOR: [&str; 2] = ["-qmp", "unix:{vmdir}/operator.sock,server=on,wait=off"];

#[test]
fn children_share_no_identity() {
    need!(ready());
    let extra = [
        &OPERATOR[..],
        &["-device", "vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87"],
        &["-uuid", "11111111-1111-4111-8111-111111111111"],
        &["-netdev", "hubport,id=n0,hubid=0", "-device", "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:01"],
    ]
    .concat();
    let stage = stage_with(NodeOptions::default(), &extra);
    let Stage { node, parent, .. } = &stage;
    let answer = done(node, &["create", NAME, "--count", "3", "--verify"]).expect("three children");
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for name in names(&answer).iter().chain([&NAME.to_owned()]) {
        let word = |value: &Value| value.as_str().map(str::to_owned).unwrap_or_default();
        let uuid = ask(node, name, "query-uuid", Value::Null).expect("a uuid");
        let generation = ask(node, name, "query-vm-generation-id", Value::Null).expect("a generation id");
        let id = if name == NAME {
            "/machine/peripheral-anon/device[1]"
        } else {
            "/machine/peripheral/vmove-nic0"
        };
        let mac =
            ask(node, name, "qom-get", json!({ "path": id, "property": "mac" })).expect("a MAC address");
        for one in [word(&uuid["UUID"]), word(&generation["guid"]), word(&mac)] {
            assert!(
                !one.is_empty() && seen.insert(one.clone()),
                "{name} shares {one} with another: {seen:?}"
            );
        }
    }
    for child in answer["children"].as_array().expect("children") {
        assert_eq!(child["network"], "up", "{child}");
        let nic = &child["nics"][0];
        assert_eq!(
            (nic["netdev"].as_str(), nic["parents"].as_str()),
            (Some("n0"), Some("52:54:00:00:00:01"))
        );
        assert!(nic["mac"].as_str().is_some_and(|mac| seen.contains(mac)), "{child}");
    }
    // The guest's own memory holds the new id, where QEMU put it: all but that was compared before the child ran.
    parent.sound(node, "guest.1").expect("sound");
}

#[test]
fn a_hook_that_fails_ends_its_child_before_it_runs() {
    need!(ready());
    let folder = tempfile::tempdir().expect("a folder");
    let (hook, told) = (folder.path().join("hook"), folder.path().join("told"));
    let script = format!(
        "#!/bin/sh\necho \"$VMOVE_CHILD $VMOVE_CHILD_INDEX $VMOVE_PARENT\" >> {}\n\
         [ \"$VMOVE_CHILD_INDEX\" != 2 ] || {{ echo no address left >&2; exit 7; }}\n",
        told.display()
    );
    std::fs::write(&hook, script).expect("writes");
    std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    let config = format!("[fork]\nmax-children = 3\nchild-start = {:?}\n", hook.display().to_string());
    let stage = stage_with(NodeOptions { config, ..NodeOptions::default() }, &[]);
    let Stage { node, parent, .. } = &stage;
    let end = vfork(node, &["create", NAME, "--count", "3"]).expect("an answer");
    assert_eq!(end.code, 1, "{}", end.said);
    let error = end.answer["children"][1]["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("no address left"), "{}", end.answer);
    assert!(end.answer["children"][1].get("running_ms").is_none(), "{}", end.answer);
    let vms: BTreeSet<String> = node.vms().expect("a list").into_iter().collect();
    assert_eq!(vms, ["guest", "guest.1", "guest.3"].map(str::to_owned).into());
    let lines: BTreeSet<String> =
        std::fs::read_to_string(&told).expect("it was run").lines().map(str::to_owned).collect();
    assert_eq!(lines, ["guest.1 1 guest", "guest.2 2 guest", "guest.3 3 guest"].map(str::to_owned).into());
    parent.sound(node, "guest.3").expect("its siblings run");

    // The configuration's word, and arithmetic, before anything is changed.
    let refused = |arguments: &[&str], code: i32, words: &str| {
        let end = vfork(node, arguments).expect("an answer");
        assert_eq!(end.code, code, "{arguments:?}: {} {}", end.answer, end.said);
        assert!(end.said.contains(words), "{arguments:?}: {}", end.said);
    };
    refused(&["create", NAME, "--count", "4"], 3, "this node allows 3");
    refused(&["create", NAME, "--count", "0"], 2, "found 0");
    refused(&["create", "nobody", "--count", "1"], 1, "nobody");
}

#[test]
fn too_many_children_for_the_memory_are_refused_with_the_arithmetic() {
    need!(ready());
    let config = "[fork]\nmax-children = 1000000\n".to_owned();
    let stage = stage_with(NodeOptions { config, ..NodeOptions::default() }, &[]);
    let end = vfork(&stage.node, &["create", NAME, "--count", "1000000"]).expect("an answer");
    assert_eq!(end.code, 3, "{}", end.said);
    assert!(end.said.contains("1000000 x (32 MiB of QEMU + 14 MiB"), "{}", end.said);
    assert_eq!(stage.node.vms().expect("a list"), [NAME]);
    stage.parent.sound(&stage.node, NAME).expect("the parent is unharmed");
}

#[test]
fn guests_that_cannot_be_forked_are_refused() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let disk = sandbox.path().join("disk.raw");
    disks::blank(&disk, 1 << 20).expect("a disk");
    let drive = format!("if=none,id=disk0,format=raw,file={}", disk.display());
    let extra = [
        "-device",
        "virtio-balloon-pci,id=balloon0",
        "-drive",
        &drive,
        "-device",
        "virtio-blk-pci,drive=disk0,share-rw=on",
    ];
    let stage = stage_with(NodeOptions::default(), &extra);
    let end = vfork(&stage.node, &["create", NAME, "--count", "1"]).expect("an answer");
    assert_eq!(end.code, 3, "{}", end.said);
    for word in ["balloon0", "disk.raw", "balloon", "disk-shared"] {
        assert!(end.said.contains(word), "{word}: {}", end.said);
    }
    stage.parent.sound(&stage.node, NAME).expect("the parent is unharmed");
}

/// What a balloon that is plugged in after the fork gives back must not be missing in the template.
#[test]
fn nothing_that_qemu_discards_reaches_the_template() {
    need!(ready());
    let stage = stage_with(NodeOptions::default(), &OPERATOR);
    let Stage { node, parent, .. } = &stage;
    done(node, &["template", "save", NAME, "golden"]).expect("a template");
    let files = template_files(node);
    assert_eq!(files.len(), 1, "{files:?}");
    let before = sum(&files[0]);
    let pid = node.vm(NAME).expect("it is listed").pid;
    // QEMU discards through its own descriptors: whatever writable one it has of the template would do harm.
    let inode = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&files[0]).expect("stat"));
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").flatten() {
        let Ok(meta) = std::fs::metadata(entry.path()) else { continue };
        assert_ne!(std::os::unix::fs::MetadataExt::ino(&meta), inode, "QEMU still holds {:?}", entry.path());
    }
    let answer =
        done(node, &["create", "--template", "golden", "--count", "3", "--verify"]).expect("children");
    assert_eq!(names(&answer), ["golden.1", "golden.2", "golden.3"]);
    parent.all_sound(&on(node, &names(&answer), Some(NAME))).expect("sound");
    assert_eq!(sum(&files[0]), before, "the template has changed");
}

#[test]
fn templates_are_kept_loaded_and_refused_when_damaged() {
    need!(ready());
    let stage = stage();
    let Stage { node, parent, .. } = &stage;
    let saved = done(node, &["template", "save", NAME, "golden"]).expect("a template");
    assert!(saved["parent_pause_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{saved}");
    let disk = node.folder().join("state/templates/golden");
    let bytes = saved["disk_bytes"].as_u64().expect("a number");
    assert!(bytes > 32 << 20 && bytes < parent.guest.bytes(), "sparse: {saved}");
    // As after a restart of the host: gone from memory.
    let copy = stage.sandbox.path().join("copy");
    copy_folder(&disk, &copy);
    done(node, &["template", "rm", "golden"]).expect("removed");
    assert!(template_files(node).is_empty());
    let end = vfork(node, &["create", "--template", "golden", "--count", "1"]).expect("an answer");
    assert_eq!(end.code, 1, "{}", end.said);

    let refused = |change: &dyn Fn(&Path), words: &str| {
        copy_folder(&copy, &disk);
        change(&disk);
        let end = vfork(node, &["template", "load", "golden"]).expect("an answer");
        assert_eq!(end.code, 1, "{words}: {} {}", end.answer, end.said);
        assert!(end.said.contains(words), "{words}: {}", end.said);
        assert!(template_files(node).is_empty(), "nothing is left of it");
    };
    refused(&|dir| flip(&dir.join("ram-0")), "the checksum differs");
    refused(&|dir| flip(&dir.join("device-state")), "device state is damaged");
    refused(
        &|dir| {
            let file = std::fs::File::options().write(true).open(dir.join("ram-0")).expect("opens");
            let length = file.metadata().expect("stat").len();
            file.set_len(length - 4096).expect("cut");
        },
        "bytes",
    );
    refused(
        &|dir| {
            let path = dir.join("manifest.json");
            let mut manifest: Value =
                serde_json::from_slice(&std::fs::read(&path).expect("reads")).expect("JSON");
            manifest["qemu"] = "6.1.0".into();
            std::fs::write(&path, manifest.to_string()).expect("writes");
        },
        "made by QEMU 6.1.0",
    );
    refused(&|dir| std::fs::remove_file(dir.join("ram-0")).expect("removes"), "ram-0");

    copy_folder(&copy, &disk);
    done(node, &["template", "load", "golden"]).expect("whole");
    let listed = done(node, &["template", "list"]).expect("a list");
    assert_eq!(listed["templates"][0]["loaded"], true, "{listed}");
    // Twice, as often as one likes.
    for _ in 0..2 {
        let answer =
            done(node, &["create", "--template", "golden", "--count", "2", "--verify"]).expect("children");
        parent.all_sound(&on(node, &names(&answer), None)).expect("sound");
    }
}

/// Changes one byte that is not zero.
fn flip(path: &Path) {
    let file = std::fs::File::options().read(true).write(true).open(path).expect("opens");
    let mut part = vec![0; 4096];
    let mut at = 0;
    loop {
        let read = file.read_at(&mut part, at).expect("reads");
        assert!(read > 0, "{} is all zero", path.display());
        if let Some(byte) = part[..read].iter().position(|b| *b != 0) {
            file.write_all_at(&[part[byte] ^ 0x10], at + byte as u64).expect("writes");
            return;
        }
        at += read as u64;
    }
}

fn copy_folder(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    let copied = std::process::Command::new("cp").args(["-r", "--sparse=always"]).arg(from).arg(to).status();
    assert!(copied.expect("cp runs").success());
}

/// Killed at whatever moment of a fork, the daemon leaves a parent that runs, or that its next life lets run.
#[test]
fn a_daemon_killed_in_the_middle_of_a_fork_leaves_the_parent_whole() {
    need!(ready());
    let stage = stage();
    let Stage { mut node, parent, sandbox } = stage;
    let mut hit = BTreeSet::new();
    let moments = [
        (ForkPhase::None, &[1, 5, 9][..]),
        (ForkPhase::Begun, &[0, 1, 3]),
        (ForkPhase::Stopping, &[0, 1, 3]),
    ];
    let moments = moments.into_iter().chain([(ForkPhase::Frozen, &[0, 5, 30, 100, 200][..])]);
    for (phase, after_ms) in moments.flat_map(|(phase, after)| after.iter().map(move |ms| (phase, *ms))) {
        let found = kill_in_fork(&mut node, 2, phase, Duration::from_millis(after_ms));
        hit.insert(found);
        node.run().expect("the next life");
        let context = format!("{after_ms} ms after {phase:?}, in {found:?}");
        // Until then, children that never ran are still there.
        until("the fork is taken up", || journals(&node).is_empty());
        let vms = node.vms().expect("a list");
        assert!(vms.iter().any(|name| name == NAME), "{context}: {vms:?}");
        parent.all_sound(&on(&node, &vms, None)).unwrap_or_else(|error| panic!("{context}: {error:#}"));
        for child in vms.iter().filter(|name| *name != NAME) {
            done(&node, &["kill", child]).expect("it ends");
        }
        assert!(template_files(&node).is_empty(), "{context}: {:?}", template_files(&node));
    }
    for phase in [ForkPhase::Begun, ForkPhase::Stopping, ForkPhase::Frozen] {
        assert!(hit.contains(&phase), "no kill met {phase:?}: {hit:?}");
    }
    let answer = done(&node, &["create", NAME, "--count", "2", "--verify"]).expect("it can still be forked");
    parent.all_sound(&on(&node, &names(&answer), None)).expect("sound");
    drop(node);
    drop(sandbox);
}

/// The first page that a guest with more than one child would show if memory were shared by mistake.
#[test]
fn a_fork_under_full_load_is_exact() {
    need!(ready());
    let config = Config { rate: Rate::Max, ..steady() };
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let guest = Guest::new(memory_mib(&config), config).expect("a QEMU");
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    let answer = done(&node, &["create", NAME, "--count", "3", "--verify"]).expect("children");
    parent.all_sound(&on(&node, &names(&answer), Some(NAME))).expect("sound");
}
