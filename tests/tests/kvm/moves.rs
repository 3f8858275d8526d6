//! Moves in each mode, there and back.
#![cfg(test)]

use vmove_skip::{need, skip};
use vmove_tests::forks::done;
use vmove_tests::guest::{Accel, Guest};
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, Scene, vmove};

fn moves_and_is_verified(accel: Accel) {
    need!(payload::ready(accel));
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest = payload::guest(sandbox.path(), accel, &payload::busy(), KvmPages::None).expect("an image");
    there_and_back(sandbox, "thp", &guest);
}

/// Moves this guest in each mode, there and back, with this kind of memory. It is left where it was at first.
fn there_and_back(sandbox: Sandbox, memory: &str, guest: &Guest) -> Scene {
    let scene = Scene::in_sandbox(sandbox, memory, guest).expect("a guest");
    let (mut from, mut to) = (&scene.a, &scene.b);
    for mode in ["precopy", "postcopy", "hybrid"] {
        for _ in ["there", "back"] {
            let report = from.migrate(NAME, to.name(), &["--mode", mode, "--verify"]).expect("it moves");
            assert_eq!((report.mode.as_str(), report.verified), (mode, Some(true)), "{report:?}");
            eprintln!("{memory}, {mode}: {:.1} ms of {:.0} ms", report.downtime_ms, report.total_ms);
            scene.sound_at(to).unwrap_or_else(|error| panic!("{memory}, {mode}: {error:#}"));
            scene.gone_from(from).expect("nothing is left");
            (from, to) = (to, from);
        }
    }
    scene
}

#[test]
fn a_guest_under_kvm_moves_in_every_mode_and_is_verified() {
    moves_and_is_verified(Accel::Kvm);
}

#[test]
fn the_same_guest_emulated_moves_in_every_mode_and_is_verified() {
    moves_and_is_verified(Accel::Tcg);
}

#[test]
fn a_guest_under_kvm_moves_on_huge_pages() {
    need!(payload::ready(Accel::Kvm));
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest =
        payload::guest(sandbox.path(), Accel::Kvm, &payload::light(), KvmPages::All).expect("an image");
    need!(sandbox.reserve_huge_pages(2 << 20, 2 * guest.bytes()));
    there_and_back(sandbox, "hugetlb-2m", &guest);
}

#[test]
fn a_locked_guest_under_kvm_moves_and_is_forked() {
    need!(payload::ready(Accel::Kvm));
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut guest =
        payload::guest(sandbox.path(), Accel::Kvm, &payload::light(), KvmPages::All).expect("an image");
    guest.extra.extend(["-overcommit", "mem-lock=on"].map(str::to_owned));
    let scene = there_and_back(sandbox, "thp", &guest);
    let answer = done(&scene.a, &["create", NAME, "--count", "1", "--verify"]).expect("a child");
    assert_eq!(answer["freeze"]["way"], "write-protected", "{answer}");
    assert_eq!(answer["children"][0]["verified"], true, "{answer}");
    scene.sound_at(&scene.a).expect("the parent is sound");
}

/// KVM writes the guest's clock, wall clock and steal time from the kernel: such writes must be found in the rounds and must fault at the
/// destination like the guest's own. The payload finds an error if a version goes back.
#[test]
fn what_kvm_itself_writes_moves_too() {
    need!(payload::ready(Accel::Kvm));
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest =
        payload::guest(sandbox.path(), Accel::Kvm, &payload::busy(), KvmPages::All).expect("an image");
    let scene = Scene::in_sandbox(sandbox, "thp", &guest).expect("a guest");
    let seen = |node| payload::kvm_seen(&scene.beacon_page_at(node).expect("its beacon")).expect("words");
    let first = seen(&scene.a);
    if !first.has_clock || !first.has_steal_time {
        return skip!("this KVM has no paravirtual clock or no steal time: {first:?}");
    }
    let (mut from, mut to) = (&scene.a, &scene.b);
    for mode in ["precopy", "postcopy", "hybrid"] {
        let before = seen(from);
        // Slow enough for several rounds, or for some time without the pages that KVM writes.
        let options = ["--mode", mode, "--verify", "--bandwidth", "256Mbit"];
        let report = from.migrate(NAME, to.name(), &options).expect("it moves");
        assert_eq!(report.verified, Some(true), "{report:?}");
        scene.sound_at(to).unwrap_or_else(|error| panic!("{mode}: {error:#}"));
        let after = seen(to);
        eprintln!("{mode}: {:.1} ms; {before:?}, then {after:?}", report.downtime_ms);
        // It wrote the clock anew at the destination, and has written the steal time many times since.
        assert!(after.clock_version > before.clock_version, "{mode}: {before:?}, {after:?}");
        assert!(after.steal_version > before.steal_version + 20, "{mode}: {before:?}, {after:?}");
        (from, to) = (to, from);
    }
}

/// KVM writes the tokens of asynchronous page faults from the kernel, too. The payload provokes one in each period, takes each by the
/// interrupt that announces it, and finds an error if there is none, or if anything else in that page has changed.
#[test]
fn asynchronous_page_faults_of_kvm_move_too() {
    need!(payload::ready(Accel::Kvm));
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest =
        payload::guest(sandbox.path(), Accel::Kvm, &payload::busy(), KvmPages::All).expect("an image");
    let scene = Scene::in_sandbox(sandbox, "thp", &guest).expect("a guest");
    let tokens = |node| {
        let seen = payload::kvm_seen(&scene.beacon_page_at(node).expect("its beacon")).expect("words");
        (seen.has_async_faults, seen.async_tokens)
    };
    if !tokens(&scene.a).0 {
        return skip!("this KVM has no asynchronous page faults that end with an interrupt");
    }
    let (mut from, mut to) = (&scene.a, &scene.b);
    for mode in ["precopy", "postcopy", "hybrid"] {
        let before = tokens(from).1;
        let options = ["--mode", mode, "--verify", "--bandwidth", "256Mbit"];
        let report = from.migrate(NAME, to.name(), &options).expect("it moves");
        assert_eq!(report.verified, Some(true), "{report:?}");
        scene.sound_at(to).unwrap_or_else(|error| panic!("{mode}: {error:#}"));
        let after = tokens(to).1;
        eprintln!("{mode}: {:.1} ms; {before} tokens, then {after}", report.downtime_ms);
        assert!(after > before + 20, "{mode}: {before} tokens, then {after}");
        (from, to) = (to, from);
    }
}

/// What the guest and KVM itself (clock, steal time) write on a visit comes home, and nothing that they have not touched is lost: the payload checks
/// all of its memory.
#[test]
fn a_guest_under_kvm_visits_and_comes_home() {
    need!(payload::ready(Accel::Kvm));
    for pages in [KvmPages::All, KvmPages::None] {
        let sandbox = Sandbox::new().expect("a sandbox");
        let guest = payload::guest(sandbox.path(), Accel::Kvm, &payload::busy(), pages).expect("an image");
        let scene = Scene::in_sandbox(sandbox, "thp", &guest).expect("a guest");
        for _ in 0..4 {
            scene.visit(&[]).expect("it goes");
            scene.alive_at(&scene.b).expect("it works there");
            let back = vmove(&scene.b, &["visit", NAME, "--back"]).expect("an answer");
            assert_eq!(back.code, 0, "{} {}", back.answer, back.said);
            eprintln!(
                "{} bytes back, stood still for {} ms",
                back.answer["bytes_sent"], back.answer["downtime_ms"]
            );
            scene.sound_at(&scene.a).expect("it works at home again");
            scene.gone_from(&scene.b).expect("nothing is left");
        }
    }
}
