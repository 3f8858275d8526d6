//! A RAM file that somebody shortens while its guest moves: the daemons live on, and the migration fails with the file's name.
#![cfg(test)]

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::until;
use vmove_tests::pki::Pki;
use vmove_tests::places::Qemu;
use vmove_tests::proxy::{Fault, Proxy};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{SLOW, device_state, ready, vmove};

const MIB: u64 = 1 << 20;
/// The firmware that waits for a disk uses what is below this, and a little at the end of memory.
const LEFT: u64 = 128 * MIB;
const MEMORY: u64 = 256 * MIB;

/// A guest that sleeps in its firmware, with memory that it does not touch and that is not zero. Returns its RAM file.
fn sleeping_guest(node: &Node) -> PathBuf {
    let qemu = Qemu::under_test().expect("a QEMU").display().to_string();
    let line = [
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-machine",
        "pc",
        "-accel",
        "tcg",
        "-m",
        "256",
    ];
    node.ask(&[&["run", "--name", "sleeper", "--", qemu.as_str()][..], &line[..]].concat())
        .expect("it starts");
    std::thread::sleep(Duration::from_secs(2));
    let ram = node.vm("sleeper").expect("it is there").ram_files().remove(0);
    write(&ram, LEFT..MEMORY - 16 * MIB);
    ram
}

/// Gives the guest content.
fn write(ram: &Path, range: Range<u64>) {
    let file = File::options().write(true).open(ram).expect("its RAM");
    let text = b"what the guest has".repeat(1 << 16);
    for at in range.step_by(1 << 20) {
        file.write_all_at(&text[..1 << 20], at).expect("writes");
    }
}

fn shortened_in_the_rounds(options: &NodeOptions) {
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, options).expect("two daemons");
    let ram = sleeping_guest(&a);
    let asked =
        a.ask(&["migrate", "sleeper", "--to", "b", "--mode", "precopy", "--bandwidth", SLOW, "--detach"]);
    let id = asked.expect("it begins")["id"].as_str().expect("an id").to_owned();
    until("pages cross", || a.ask(&["status", &id]).expect("an answer")["phase"] == "rounds");
    std::thread::sleep(Duration::from_secs(1));
    File::options().write(true).open(&ram).and_then(|file| file.set_len(LEFT)).expect("shortens");
    let end = vmove(&a, &["status", &id, "--follow"]).expect("it ends");
    assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    let text = format!("{} {}", end.answer, end.said);
    assert!(text.contains(&*ram.to_string_lossy()) && text.contains("shortened"), "{text}");
    for node in [&a, &b] {
        node.ask(&["list"]).unwrap_or_else(|_| panic!("vmoved of {} has ended: {}", node.name(), node.log()));
    }
    until("the destination has cleaned up", || b.vms().expect("an answer").is_empty());
}

#[test]
fn a_ram_file_shortened_under_a_migration_ends_it_and_no_daemon() {
    need!(ready());
    shortened_in_the_rounds(&NodeOptions::default());
}

/// With TLS, the daemon itself reads what it sends.
#[test]
fn a_ram_file_shortened_under_tls_ends_the_migration_and_no_daemon() {
    need!(ready());
    let pki = Pki::new(&[[127, 0, 0, 1].into()]).expect("an authority");
    shortened_in_the_rounds(&NodeOptions { extra: pki.flags(), ..NodeOptions::default() });
}

/// Nobody has asked for a page that is cut off when the destination is ready for the guest: only a look at the file tells.
#[test]
fn a_guest_whose_ram_file_is_shortened_before_the_commit_is_not_given_away() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let b = Node::start(&sandbox, "b", NodeOptions::default()).expect("a daemon");
    let proxy = Proxy::start(b.listen()).expect("a proxy");
    let peers = vec![("b".to_owned(), proxy.address())];
    let a = Node::start(&sandbox, "a", NodeOptions { peers, ..NodeOptions::default() }).expect("a daemon");
    let ram = sleeping_guest(&a);
    // What comes before the pages that are cut off, and crosses so slowly that nobody asks for those meanwhile.
    write(&ram, 32 * MIB..LEFT);
    proxy.add(device_state(0, Fault::Stall));
    let asked = a.ask(&[
        "migrate",
        "sleeper",
        "--to",
        "b",
        "--mode",
        "postcopy",
        "--bandwidth",
        "16Mbit",
        "--detach",
    ]);
    let id = asked.expect("it begins")["id"].as_str().expect("an id").to_owned();
    until("the guest is stopped", || a.ask(&["status", &id]).expect("an answer")["phase"] == "hand-over");
    std::thread::sleep(Duration::from_millis(500));
    File::options().write(true).open(&ram).and_then(|file| file.set_len(LEFT)).expect("shortens");
    proxy.add(device_state(0, Fault::Delay(Duration::ZERO)));
    let end = vmove(&a, &["status", &id, "--follow"]).expect("it ends");
    assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
    let text = format!("{} {}", end.answer, end.said);
    assert!(
        text.contains(&*ram.to_string_lossy()) && text.contains("give the guest's memory away"),
        "{text}"
    );
    until("the destination has cleaned up", || b.vms().expect("an answer").is_empty());
    assert_eq!(a.vm("sleeper").expect("it is there").status, "running");
}
