//! Huge pages that run out at the destination of a guest: the guest stays where it is, or they are not those of the guest.
#![cfg(test)]

use vmove_skip::{need, skip};
use vmove_tests::beacon;
use vmove_tests::control_groups::Group;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::Guest;
use vmove_tests::huge_pages::{Hog, free_huge_pages, waiting_qemu};
use vmove_tests::places;
use vmove_tests::sandbox::{Sandbox, qemu_in};
use vmove_tests::scene::{NAME, SLOW, Scene, memory_mib, ready, steady};

use crate::waits::until;

/// There were enough huge pages when the guest was admitted, and there are not when they are taken: here, since the daemon's control group may
/// not have them.
#[test]
fn huge_pages_that_cannot_be_had_after_all_leave_the_guest_where_it_is() {
    need!(ready());
    let group = need!(Group::new("vmove-huge-pages", &["hugetlb"]));
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    if let Err(reason) = sandbox.reserve_huge_pages(2 << 20, 2 * guest.bytes() + (16 << 20)) {
        return skip!("{reason:#}");
    }
    let program = places::product("vmoved").and_then(|vmoved| group.program(&sandbox, "", &vmoved));
    let options = NodeOptions { program: Some(program.expect("a program")), ..NodeOptions::default() };
    let b = Node::start(&sandbox, "b", options).expect("a daemon");
    let scene = Scene::to(sandbox, b, "hugetlb-2m", &guest).expect("a guest");
    let half = (guest.bytes() / 2).to_string();
    // What is promised to mappings, and what is taken.
    for bound in ["hugetlb.2MB.rsvd.max", "hugetlb.2MB.max"] {
        group.set(bound, &half).expect("a bound");
        for mode in ["postcopy", "hybrid"] {
            let end = scene.migrate_to("b", &["--mode", mode]).expect("it ends");
            let told = format!("{bound}, {mode}: {} {}", end.answer, end.said);
            assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{told}");
            for words in ["huge pages", "vm.nr_hugepages", "hugetlb"] {
                assert!(end.error().contains(words), "no {words:?} in {told}");
            }
            scene.unharmed().unwrap_or_else(|error| panic!("{told}: {error:#}"));
        }
        group.set(bound, "max").expect("no bound");
    }
    scene.moves_now().expect("nothing of the attempts is in the way");
    drop(scene);
}

/// Somebody takes them after the guest was admitted, and before its QEMU has mapped them.
#[test]
fn huge_pages_that_others_take_while_a_destination_is_prepared_leave_the_guest_where_it_is() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    if let Err(reason) = sandbox.reserve_huge_pages_alone(2 << 20, 2 * guest.bytes() + (16 << 20)) {
        return skip!("{reason:#}");
    }
    let (wrapper, waiting) = waiting_qemu(sandbox.path(), &guest.qemu);
    guest.qemu.clone_from(&wrapper);
    let config = format!("[peers]\nqemu-binaries = [{wrapper:?}]\n");
    let options = NodeOptions { config, ..NodeOptions::default() };
    let scene = Scene::with_options(sandbox, &options, "hugetlb-2m", &guest).expect("a guest");
    let id = scene.start(&["--mode", "hybrid", "--bandwidth", SLOW]).expect("it begins");
    until("the destination's QEMU is about to start", || Ok(waiting.exists())).expect("it starts");
    let _hog = Hog::all_but(scene.sandbox(), 0).expect("all are taken");
    std::fs::remove_file(&waiting).expect("it goes on");
    let end = scene.end(&id).expect("it ends");
    assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
    for words in ["huge pages", "vm.nr_hugepages"] {
        assert!(end.error().contains(words), "no {words:?} in: {}", end.error());
    }
    scene.unharmed().expect("the guest goes on, and nothing is left");
}

/// QEMU has mapped the guest's memory by then, and the kernel keeps the pages of it from others.
#[test]
fn huge_pages_that_others_take_in_post_copy_are_not_those_of_the_guest() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    if let Err(reason) = sandbox.reserve_huge_pages_alone(2 << 20, 2 * guest.bytes() + (16 << 20)) {
        return skip!("{reason:#}");
    }
    let scene = Scene::in_sandbox(sandbox, "hugetlb-2m", &guest).expect("a guest");
    let id = scene.start(&["--mode", "postcopy", "--bandwidth", SLOW]).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    let _hog = Hog::all_but(scene.sandbox(), 0).expect("all are taken");
    assert_eq!(free_huge_pages(), 0);
    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.arrived().expect("it is whole");
    scene.b.ask(&["stop", "--force", NAME]).expect("it can be ended");
    assert_eq!((qemu_in(scene.b.folder()), beacon::ram_files(&scene.b.memory()).len()), (None, 0));
}
