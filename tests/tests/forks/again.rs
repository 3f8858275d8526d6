//! A fork leaves its parent as it was: it can be forked again and moved at once, whatever happens meanwhile.
#![cfg(test)]

use std::time::Duration;

use serde_json::Value;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions, Vm};
use vmove_tests::disks;
use vmove_tests::fleet::until;
use vmove_tests::forks::{ForkPhase, Parent, done, journals, kill_in_fork_after, names, on, template_files};
use vmove_tests::guest::Guest;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib, ready, vmove};

/// A guest that writes all the time, and leaves something of two cores to its children.
fn busy() -> Config {
    Config {
        working_set_mib: 32,
        cold_mib: 32,
        rate: Rate::PagesPerSecond(10_000),
        verify: 16_000,
        ..Config::default()
    }
}

fn start(node: &Node) -> Parent {
    let guest = Guest::new(memory_mib(&busy()), busy()).expect("a QEMU");
    Parent::start(node, NAME, "thp", guest).expect("the guest runs")
}

fn is_private(node: &Node) -> Value {
    done(node, &["tree", NAME]).expect("a tree")["private"].clone()
}

/// The folder with RAM files of all VMs, and of templates.
fn node_memory(vm: &Vm) -> String {
    let path = vm.ram[0].path.display().to_string();
    path.split_once("/thp/").map_or(path.clone(), |(memory, _)| format!("{memory}/thp/"))
}

/// How much of its RAM files a VM has mapped shared, and how much of its RAM is private.
fn shared_and_private(vm: &Vm, bytes: u64) -> (u64, u64) {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", vm.pid)).unwrap_or_default();
    let file = vm.ram[0].path.display().to_string();
    let len = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        Some(u64::from_str_radix(end, 16).ok()? - u64::from_str_radix(start, 16).ok()?)
    };
    let of = |filter: &dyn Fn(&&str) -> bool| maps.lines().filter(filter).filter_map(len).sum::<u64>();
    let shared = of(&|line| line.ends_with(&file) && line.contains("rw-s"));
    let folder = node_memory(vm);
    let private = of(&|line| line.contains(&folder) && line.contains("rw-p"));
    assert!(private <= bytes, "{maps}");
    (shared, private)
}

#[test]
fn a_busy_guest_is_forked_again_and_again() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let parent = start(&node);
    let mut children = Vec::new();
    for round in 1..=6 {
        let answer = done(&node, &["create", NAME, "--count", "1", "--verify"]).expect("a child");
        let own = &answer["own_memory"];
        let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("no number: {answer}"));
        eprintln!(
            "{round}: all ran after {} ms, stood still {} ms ({} in its pause), {own}",
            answer["all_running_ms"], answer["parent_stood_still_ms"], answer["parent_pause_ms"]
        );
        // It never had to be made ready first.
        assert!(answer["own_memory_before"].is_null(), "{answer}");
        assert!(number(&own["template_bytes"]) > 0.0 && number(&own["own_bytes"]) > 0.0, "{answer}");
        assert_eq!(own["pause_ms"], 0.0, "it ran all the while: {answer}");
        let all = number(&answer["parent_pause_ms"]) + number(&own["pause_ms"]) + number(&own["waited_ms"]);
        assert!((number(&answer["parent_stood_still_ms"]) - all).abs() < 1e-6, "all is told of: {answer}");
        assert_eq!(is_private(&node), false);
        children.extend(names(&answer));
        // Children of several forks live beside each other, each over a template of its own.
        if children.len() > 2 {
            let oldest = children.remove(0);
            parent.sound(&node, &oldest).expect("sound after later forks");
            done(&node, &["kill", &oldest]).expect("it ends");
        }
        assert!(template_files(&node).is_empty() && journals(&node).is_empty());
    }
    parent.all_sound(&on(&node, &children, Some(NAME))).expect("sound");
    let vm = node.vm(NAME).expect("it is listed");
    assert_eq!(shared_and_private(&vm, parent.guest.bytes()), (parent.guest.bytes(), 0));
}

#[test]
fn a_guest_is_moved_right_after_a_fork() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let parent = start(&a);
    let answer = done(&a, &["create", NAME, "--count", "1"]).expect("a child");
    let end = vmove(&a, &["migrate", NAME, "--to", "b", "--mode", "hybrid", "--verify"]).expect("an end");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    assert_eq!(end.answer["verified"], true, "{}", end.answer);
    assert!(!end.said.contains("memory of its own first"), "nothing was left to do: {}", end.said);
    parent.all_sound(&[(&b, NAME), (&a, &names(&answer)[0])]).expect("sound");
}

/// Killed while some of the parent's memory is private and some is not: it may be stopped for the moment, runs on with the next daemon, and
/// all of it is its own afterwards. A mapping that was made aside for the pieces that were next would be taken for guest memory.
#[test]
fn a_daemon_killed_while_the_parent_gets_memory_of_its_own_loses_nothing_of_it() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let parent = start(&node);
    let (vm, bytes) = (node.vm(NAME).expect("it is listed"), parent.guest.bytes());
    let page = parent.page(&vm).expect("a beacon");
    let (mut mixed, mut aside) = (0, 0);
    for round in 0..6 {
        kill_in_fork_after(&mut node, 1, ForkPhase::Frozen, || {
            until("some of its memory is shared again", || shared_and_private(&vm, bytes).0 > 0);
            std::thread::sleep(Duration::from_micros(700) * round);
        });
        let (shared, private) = shared_and_private(&vm, bytes);
        eprintln!("{} MiB shared, {} MiB private", shared >> 20, private >> 20);
        mixed += u32::from(shared > 0 && private > 0);
        aside += u32::from(shared + private > bytes);
        let first = page.read().expect("a beacon");
        node.run().expect("the next life");
        until("the guest writes on", || page.read().is_some_and(|now| now.beats > first.beats + 20));
        until("the fork is taken up", || journals(&node).is_empty());
        assert_eq!(is_private(&node), false, "it gets memory of its own then");
        assert_eq!(shared_and_private(&vm, bytes), (bytes, 0));
        let vms = node.vms().expect("a list");
        parent.all_sound(&on(&node, &vms, None)).expect("sound");
        for child in vms.iter().filter(|name| *name != NAME) {
            done(&node, &["kill", child]).expect("it ends");
        }
    }
    eprintln!("killed {mixed} times with mixed memory, {aside} times with a mapping aside");
    assert!(mixed > 0, "no kill met it");
    let answer = done(&node, &["create", NAME, "--count", "1", "--verify"]).expect("it can be forked");
    assert!(answer["own_memory_before"].is_null(), "{answer}");
    parent.all_sound(&on(&node, &names(&answer), Some(NAME))).expect("sound");
}

/// Where there is no memory for a copy beside what the children may write, a fork does what it can: the children run, and the parent's
/// memory stays private until there is.
#[test]
fn without_room_for_a_copy_the_parent_stays_private_until_there_is() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bytes = u64::from(memory_mib(&busy())) << 20;
    sandbox.mount_small("a/mem/thp", 2 * bytes - (32 << 20)).expect("a small folder of memory");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    std::fs::set_permissions(sandbox.path().join("a/mem/thp"), open).expect("for QEMU's user");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let parent = start(&node);
    let expected = (bytes / 8 * 7).to_string();
    let request = ["create", NAME, "--count", "1", "--expect-written", &expected];
    let answer = done(&node, &request).expect("a child");
    let warning = answer["warnings"][0].as_str().unwrap_or_default();
    for words in ["private memory", "memory of its own needs", "MiB of memory", "reserved for fork"] {
        assert!(warning.contains(words), "no {words:?} in {answer}");
    }
    assert!(answer["own_memory"].is_null() && is_private(&node) == true, "{answer}");
    parent.all_sound(&on(&node, &names(&answer), Some(NAME))).expect("sound");
    let end = vmove(&node, &["check", NAME, "--to", "127.0.0.1:1"]).expect("an answer");
    assert!(end.answer["warnings"].to_string().contains("private"), "{} {}", end.answer, end.said);
    // Nothing is reserved for the child any more.
    let promoted = done(&node, &["promote", NAME]).expect("there is room");
    assert_eq!(promoted["was_private"], true, "{promoted}");
    assert_eq!(is_private(&node), false);
    parent.all_sound(&on(&node, &names(&answer), Some(NAME))).expect("sound");
}

/// While its memory is moved, a guest with direct I/O is stopped for moments, and set running again. Not if somebody has paused it meanwhile.
#[test]
fn a_guest_that_is_paused_while_it_gets_memory_of_its_own_stays_paused() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let image = sandbox.path().join("disk.raw");
    disks::blank(&image, 16 << 20).expect("a disk");
    let mut guest = Guest::new(memory_mib(&busy()), busy()).expect("a QEMU");
    guest.extra.extend(disks::drive(&image, "raw", ",cache=none"));
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    let (vm, bytes) = (node.vm(NAME).expect("it is listed"), parent.guest.bytes());
    let mut stopped = false;
    for round in 0..4 {
        let answer = std::thread::scope(|scope| {
            let forking = scope.spawn(|| done(&node, &["create", NAME, "--count", "1"]));
            until("its memory is private", || shared_and_private(&vm, bytes).1 == bytes);
            until("some of its memory is shared again", || shared_and_private(&vm, bytes).0 > 0);
            std::thread::sleep(Duration::from_millis(round));
            vmove(&node, &["pause", NAME]).expect("paused");
            forking.join().expect("vfork was waited for").expect("a child")
        });
        assert_eq!(shared_and_private(&vm, bytes), (bytes, 0), "{answer}");
        assert_eq!(node.vm(NAME).expect("it is listed").status, "paused", "{answer}");
        // Not in a round in which it was paused before the first of these moments.
        stopped |= answer["own_memory"]["pause_ms"].as_f64() > Some(0.0);
        vmove(&node, &["resume", NAME]).expect("it runs");
        for child in names(&answer) {
            done(&node, &["kill", &child]).expect("it ends");
        }
    }
    assert!(stopped, "it was stopped for moments");
    parent.sound(&node, NAME).expect("sound");
}
