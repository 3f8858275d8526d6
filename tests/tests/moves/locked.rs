//! Migrations of guests with locked memory (`-overcommit mem-lock=on`). At the destination, QEMU touches all memory before any has arrived.
#![cfg(test)]

use serde_json::json;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::bench::measure::nonzero;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::until;
use vmove_tests::forks::{Parent, done, names};
use vmove_tests::guest::Guest;
use vmove_tests::old_kernel::{self, Before};
use vmove_tests::places::Qemu;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, Scene, memory_mib, ready, steady, vmove};

fn busy() -> Config {
    Config { rate: Rate::PagesPerSecond(20_000), ..steady() }
}

fn locked(config: &Config) -> Guest {
    let mut guest = Guest::new(memory_mib(config), config.clone()).expect("a QEMU");
    guest.extra.extend(["-overcommit", "mem-lock=on"].map(str::to_owned));
    guest
}

/// Checks that the memory is locked and completely allocated, so that no page is touched for the first time later.
fn is_locked(node: &Node, guest: &Guest) {
    let vm = node.vm(NAME).expect("it is listed");
    let text = std::fs::read_to_string(format!("/proc/{}/status", vm.pid)).expect("it runs");
    let of_qemu = text.lines().find_map(|line| line.strip_prefix("VmLck:")).expect("a line");
    assert!(!of_qemu.trim().starts_with("0 "), "nothing is locked: {of_qemu}");
    let mapped = || match vm.smaps("Rss") {
        0 => vm.smaps("Shared_Hugetlb") + vm.smaps("Private_Hugetlb"),
        kib => kib,
    };
    until("all of its memory is mapped", || mapped() == guest.bytes() >> 10);
}

fn move_to(from: &Node, to: &Node, mode: &str, parent: &Parent) -> serde_json::Value {
    let end =
        vmove(from, &["migrate", NAME, "--to", to.name(), "--mode", mode, "--verify"]).expect("it ends");
    assert_eq!(end.code, 0, "{mode}: {} {}; {}", end.answer, end.said, to.log());
    assert_eq!(end.answer["verified"], true, "{mode}: {}", end.answer);
    parent.sound(to, NAME).expect("the guest is sound");
    is_locked(to, &parent.guest);
    end.answer
}

fn fork_at(node: &Node, parent: &Parent) {
    let answer = done(node, &["create", NAME, "--count", "1", "--verify"]).expect("a child");
    assert_eq!(answer["freeze"]["way"], "write-protected", "{answer}");
    let child = &names(&answer)[0];
    parent.sound(node, child).expect("the child is sound");
    parent.sound(node, NAME).expect("the parent is sound");
    done(node, &["kill", child]).expect("it ends");
}

/// Moves a guest, forks it at once at the destination, and moves it back.
fn moves_and_forks(memory: &str, qemu: Qemu, guest: Guest) {
    let qemu = need!(qemu.path());
    let sandbox = Sandbox::new().expect("a sandbox");
    if memory == "hugetlb-2m" {
        need!(sandbox.reserve_huge_pages(2 << 20, 2 * guest.bytes()));
    }
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let parent = Parent::start(&a, NAME, memory, Guest { qemu, ..guest }).expect("the guest runs");
    move_to(&a, &b, "hybrid", &parent);
    if memory == "thp" {
        fork_at(&b, &parent);
    }
    move_to(&b, &a, "postcopy", &parent);
    move_to(&a, &b, "precopy", &parent);
    if memory == "thp" {
        fork_at(&b, &parent);
    }
    drop((a, b));
}

#[test]
fn a_busy_locked_guest_moves_and_is_forked_where_it_is_on_qemu_10_0() {
    need!(ready());
    moves_and_forks("thp", Qemu::V10_0, locked(&busy()));
}

#[test]
fn a_busy_locked_guest_moves_and_is_forked_where_it_is_on_qemu_7_2() {
    need!(ready());
    moves_and_forks("thp", Qemu::V7_2, locked(&busy()));
}

#[test]
fn a_busy_locked_guest_moves_on_huge_pages() {
    need!(ready());
    moves_and_forks("hugetlb-2m", Qemu::V10_0, locked(&busy()));
}

/// One 1 GiB page. It is allocated and locked before its first byte is read.
#[test]
fn a_locked_guest_moves_on_a_page_of_one_gib() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    need!(sandbox.reserve_huge_pages(1 << 30, 2 << 30));
    let guest = Guest { memory_mib: 1024, ..locked(&steady()) };
    let scene = Scene::in_sandbox(sandbox, "hugetlb-1g", &guest).expect("a guest");
    for mode in ["hybrid", "postcopy"] {
        let end = scene.migrate_to("b", &["--mode", mode, "--verify"]).expect("it ends");
        assert_eq!(end.code, 0, "{mode}: {} {}", end.answer, end.said);
        assert_eq!(end.answer["verified"], true, "{mode}: {}", end.answer);
        scene.arrived().expect("the guest is whole");
        let back = vmove(&scene.b, &["migrate", NAME, "--to", "a", "--mode", mode]).expect("it ends");
        assert_eq!(back.code, 0, "{mode}: {} {}", back.answer, back.said);
    }
}

/// QEMU has touched all memory, so it may have written all of it. Unless vmove finds what was really written, it would have to fetch
/// everything again after the rounds, while the guest waits.
#[test]
fn what_crossed_in_the_rounds_is_not_fetched_again_and_pages_are_huge() {
    need!(ready());
    let guest = locked(&Config { rate: Rate::PagesPerSecond(500), ..steady() });
    let scene = Scene::with(NAME, "thp", &guest).expect("a guest");
    let content = nonzero(&scene.a.vm(NAME).expect("it is listed").ram_files()).expect("it can be read");
    let end = scene.migrate_to("b", &["--mode", "hybrid"]).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.arrived().expect("the guest is whole");
    let sent = end.answer["bytes_sent"].as_u64().expect("a number");
    eprintln!("{} MiB of content, {} MiB sent: {}", content >> 20, sent >> 20, end.answer["rounds"]);
    assert!(sent < content + content / 4, "{sent} bytes sent for {content}: {}", end.answer);
    is_locked(&scene.b, &guest);
    let huge = scene.b.vm(NAME).expect("it is listed").smaps("ShmemPmdMapped");
    assert!(huge > (guest.bytes() >> 10) * 9 / 10, "{huge} KiB are mapped by huge pages");
}

/// Before Linux 5.18 the kernel cannot discard locked memory of a process, and other memory only by an older request.
#[test]
fn before_linux_5_18_locked_guests_stay_and_others_move() {
    need!(ready());
    need!(old_kernel::possible());
    let options = NodeOptions { old_kernel: Some(Before::V5_18), ..NodeOptions::default() };
    for lock in [true, false] {
        let guest = if lock { locked(&steady()) } else { Guest::new(320, steady()).expect("a QEMU") };
        let sandbox = Sandbox::new().expect("a sandbox");
        let scene = Scene::with_options(sandbox, &options, "thp", &guest).expect("a guest");
        if !lock {
            scene.moves_now().expect("it moves");
            continue;
        }
        let check = vmove(&scene.a, &["check", NAME, "--to", "b"]).expect("an answer");
        assert_eq!(check.answer["modes"], json!([]), "{}", check.answer);
        let refused = scene.migrate_to("b", &["--mode", "postcopy"]).expect("it ends");
        assert_eq!((refused.code, &refused.answer["guest"]), (3, &"source".into()), "{}", refused.answer);
        for word in ["memory-locked", "5.18", "mem-lock=on"] {
            assert!(refused.said.contains(word), "{word}: {}", refused.said);
        }
        eprintln!("{}", refused.said.trim());
        scene.unharmed().expect("nothing was changed");
    }
}
