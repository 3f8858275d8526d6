//! Daemons and QEMUs that are killed while a guest under KVM moves.
#![cfg(test)]

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::guest::Accel;
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::{Sandbox, qemu_in};
use vmove_tests::scene::Scene;

/// So slow that its memory takes some seconds.
const LINK: &str = "32Mbit";
const POSTCOPY: &[&str] = &["--mode", "postcopy", "--bandwidth", LINK];

fn scene() -> Scene {
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest =
        payload::guest(sandbox.path(), Accel::Kvm, &payload::busy(), KvmPages::None).expect("an image");
    Scene::in_sandbox(sandbox, "thp", &guest).expect("a guest")
}

/// Kills these daemons while the guest runs at the destination and pages are missing there, and starts them again.
fn killed_in_post_copy(source: bool, destination: bool) {
    let mut scene = scene();
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    let qemu = qemu_in(scene.b.folder()).expect("the guest's QEMU");
    if source {
        scene.a.crash();
    }
    if destination {
        scene.b.crash();
    }
    std::thread::sleep(Duration::from_millis(300));
    if source {
        scene.a.run().expect("it starts again");
    }
    if destination {
        scene.b.run().expect("it starts again");
    }
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!(end.code, 0, "{} {}\na: {}\nb: {}", end.answer, end.said, scene.a.log(), scene.b.log());
    assert!(end.answer["recoveries"].as_u64() >= Some(1), "nothing was interrupted: {}", end.answer);
    scene.arrived().unwrap_or_else(|e| panic!("{e:#}\na: {}\nb: {}", scene.a.log(), scene.b.log()));
    assert_eq!(scene.b.vm("guest").expect("it is listed").pid, qemu, "it is another QEMU");
}

#[test]
fn under_kvm_a_destination_killed_in_post_copy_finishes() {
    need!(payload::ready(Accel::Kvm));
    killed_in_post_copy(false, true);
}

#[test]
fn under_kvm_a_source_killed_in_post_copy_finishes() {
    need!(payload::ready(Accel::Kvm));
    killed_in_post_copy(true, false);
}

#[test]
fn under_kvm_both_daemons_killed_in_post_copy_finish() {
    need!(payload::ready(Accel::Kvm));
    killed_in_post_copy(true, true);
}

/// Before the hand-over the guest is the source's.
#[test]
fn under_kvm_a_destination_qemu_killed_in_the_rounds_leaves_the_guest_at_the_source() {
    need!(payload::ready(Accel::Kvm));
    let scene = scene();
    let id = scene.start(&["--mode", "precopy", "--bandwidth", LINK]).expect("it begins");
    scene.reach(&id, "rounds").expect("the rounds begin");
    vmove_tests::fleet::until("QEMU is started", || qemu_in(scene.b.folder()).is_some());
    let qemu = qemu_in(scene.b.folder()).expect("a QEMU");
    kill(Pid::from_raw(qemu), Signal::SIGKILL).expect("it is killed");
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
    scene.unharmed().expect("the guest goes on, and nothing is left");
    scene.moves_now().expect("it can be tried again");
}
