//! Disks that follow their guest, and what goes wrong meanwhile: the guest finds what it wrote, and has all of its disk once both nodes are back.
#![cfg(test)]

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::daemon::NodeOptions;
use vmove_tests::disks::{Moved, drive, lines, qemu_img, works};
use vmove_tests::fleet::until;
use vmove_tests::proxy::Fault;
use vmove_tests::sandbox::{Sandbox, qemu_in};
use vmove_tests::scene::{NAME, STEP_TIMEOUT, device_state, gone_from, ready, vmove};

use super::disks::stays;

/// So slow that a disk of 64 MiB takes some seconds: the memory before it does, too.
const SLOW: &str = "64Mbit";

/// Begins to move the guest from `a` to `b`, with its disk behind it, and waits until that is on its way.
fn follows(moved: &Moved) -> String {
    moved.works().expect("it works on its disk");
    let options = moved.options().expect("options");
    let mut words: Vec<&str> = options.iter().map(String::as_str).collect();
    words.extend_from_slice(&["--disks-after", "--mode", "hybrid", "--bandwidth", SLOW]);
    let id = moved.scene.start(&words).expect("it begins");
    moved.scene.reach(&id, "disks-after").expect("the disk follows");
    id
}

/// Waits for the end, as the source tells it.
fn arrives(moved: &Moved, id: &str) {
    let end = vmove(&moved.scene.a, &["status", id, "--follow"]).expect("an end");
    let logs = || format!("a: {}\nb: {}", moved.scene.a.log(), moved.scene.b.log());
    assert_eq!(end.code, 0, "{} {}\n{}", end.answer, end.said, logs());
    is_there(moved);
}

fn is_there(moved: &Moved) {
    works(&moved.scene.b, NAME).expect("it works on its disk there");
    gone_from(&moved.scene.a).expect("nothing is left at the source");
    moved.nothing_left().expect("nothing is left");
    let [here, there] = moved.images();
    assert!(there.is_file() && !here.exists(), "the source's image keeps its name: {:?}", moved.files());
    let info =
        std::process::Command::new("qemu-img").args(["info", "-U"]).arg(there).output().expect("it runs");
    let info = String::from_utf8_lossy(&info.stdout).into_owned();
    assert!(info.contains("file format: qcow2") && !info.contains("backing file"), "{info}");
    assert_eq!(servers(moved), Vec::<u32>::new(), "servers of images are left");
}

/// Servers of images of this test.
fn servers(moved: &Moved) -> Vec<u32> {
    let folder = moved.scene.sandbox().path().to_string_lossy().into_owned();
    let entries = std::fs::read_dir("/proc").expect("a list").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.contains("qemu-nbd") && line.contains(&folder)
    })
    .collect()
}

fn kill_servers(moved: &Moved) {
    for server in servers(moved) {
        kill(Pid::from_raw(i32::try_from(server).expect("an id")), Signal::SIGKILL).expect("it is killed");
    }
}

#[test]
fn a_daemon_killed_while_a_disk_follows_goes_on() {
    need!(ready());
    need!(qemu_img());
    let mut moved = Moved::start("raw", "").expect("a guest");
    let id = follows(&moved);
    moved.scene.a.crash();
    std::thread::sleep(Duration::from_secs(1));
    moved.scene.a.run().expect("it starts again");
    works(&moved.scene.b, NAME).expect("it works on its disk there");
    moved.scene.b.crash();
    std::thread::sleep(Duration::from_secs(1));
    moved.scene.b.run().expect("it starts again");
    arrives(&moved, &id);
}

#[test]
fn a_disk_follows_after_both_daemons_and_the_sources_qemu_were_killed() {
    need!(ready());
    need!(qemu_img());
    let mut moved = Moved::start("qcow2", "").expect("a guest");
    let id = follows(&moved);
    let qemu = qemu_in(moved.scene.a.folder()).expect("a QEMU");
    kill(Pid::from_raw(qemu), Signal::SIGKILL).expect("it is killed");
    works(&moved.scene.b, NAME).expect("it works on its disk there");
    moved.scene.a.crash();
    moved.scene.b.crash();
    kill_servers(&moved);
    moved.scene.b.run().expect("it starts again");
    moved.scene.a.run().expect("it starts again");
    arrives(&moved, &id);
}

#[test]
fn a_link_that_is_cut_while_a_disk_follows_costs_time_alone() {
    need!(ready());
    need!(qemu_img());
    let moved = Moved::behind_proxy("raw").expect("a guest");
    let id = follows(&moved);
    let proxy = moved.scene.proxy().expect("a proxy");
    proxy.refuse();
    proxy.cut_all();
    std::thread::sleep(Duration::from_secs(4));
    proxy.heal();
    arrives(&moved, &id);
}

#[test]
fn a_move_that_fails_before_the_hand_over_leaves_no_overlay() {
    need!(ready());
    need!(qemu_img());
    let mut moved = Moved::behind_proxy("raw").expect("a guest");
    let options = moved.options().expect("options");
    let mut words: Vec<&str> = options.iter().map(String::as_str).collect();
    words.extend_from_slice(&["--disks-after", "--mode", "hybrid"]);
    for kills in [false, true] {
        let proxy = moved.scene.proxy().expect("a proxy");
        proxy.add(device_state(proxy.connections(), Fault::Stall));
        let id = moved.scene.start(&words).expect("it begins");
        moved.scene.reach_one_of(&id, &["switchover", "hand-over"]).expect("the guest stops");
        assert!(moved.images()[1].is_file(), "an overlay waits at the destination");
        if kills {
            moved.scene.b.crash();
            moved.scene.proxy().expect("a proxy").heal();
            moved.scene.b.run().expect("it starts again");
        } else {
            moved.scene.a.ask(&["cancel", &id]).expect("it is cancelled");
            moved.scene.proxy().expect("a proxy").heal();
        }
        let end = moved.scene.end(&id).expect("an end");
        assert_eq!(end.answer["guest"], "source", "{}", end.answer);
        until("the guest stays and nothing is left", || stays(&moved).is_ok());
        assert_eq!(servers(&moved), Vec::<u32>::new(), "an image is served");
    }
    let id = follows(&moved);
    arrives(&moved, &id);
}

/// The source's daemon does not come back for a while: what is missing waits, is not made up, and comes in the end.
#[test]
fn what_is_missing_waits_for_the_source() {
    need!(ready());
    need!(qemu_img());
    let mut moved = Moved::start("raw", "").expect("a guest");
    let id = follows(&moved);
    moved.scene.a.crash();
    kill_servers(&moved);
    let deadline = Instant::now() + STEP_TIMEOUT;
    // It says whom it waits for, and a second move is refused meanwhile.
    while moved.scene.b.ask(&["status", &id]).expect("an answer")["outcome"]["state"] != "reconnecting" {
        assert!(Instant::now() < deadline, "{}", moved.scene.b.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let again = vmove(&moved.scene.b, &["migrate", NAME, "--to", "127.0.0.1:1"]).expect("an answer");
    assert!(again.code != 0 && again.error().contains(&id[..8]), "{} {}", again.answer, again.said);
    std::thread::sleep(Duration::from_secs(3));
    moved.scene.a.run().expect("it starts again");
    arrives(&moved, &id);
}

/// A read of what is not there waits for its source, also when nobody tries to reach it any more. QEMU would answer a read that failed with whatever
/// was in the guest's buffer.
#[test]
fn a_read_of_what_is_missing_waits_for_longer_than_the_daemons_try() {
    need!(ready());
    need!(qemu_img());
    let nodes = NodeOptions { config: "reconnect-for = '4s'\n".to_owned(), ..NodeOptions::default() };
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut moved = Moved::between(&nodes, sandbox, "raw", |image| drive(image, "raw", "")).expect("a guest");
    let id = follows(&moved);
    moved.scene.a.crash();
    kill_servers(&moved);
    std::thread::sleep(Duration::from_secs(12));
    let before = lines(&moved.scene.b, NAME).expect("the guest has read nothing wrong");
    std::thread::sleep(Duration::from_secs(1));
    let later = lines(&moved.scene.b, NAME).expect("the guest has read nothing wrong");
    assert_eq!(before, later, "it should wait for a read of what is missing");
    moved.scene.a.run().expect("it starts again");
    arrives(&moved, &id);
}

/// The way out where the source is lost for good.
#[test]
fn a_guest_that_waits_for_a_lost_source_can_be_ended() {
    need!(ready());
    need!(qemu_img());
    let mut moved = Moved::start("raw", "").expect("a guest");
    follows(&moved);
    moved.scene.a.crash();
    kill_servers(&moved);
    std::thread::sleep(Duration::from_secs(5));
    let qemu = qemu_in(moved.scene.b.folder()).expect("a QEMU");
    moved.scene.b.ask(&["stop", NAME, "--force"]).expect("it is ended");
    let ended = || !std::path::Path::new(&format!("/proc/{qemu}")).exists();
    until("QEMU has ended", ended);
}
