//! Moves that fail or are cut: the guest runs where its configuration is, there alone, and nothing stays locked.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::proxmox::{self, Cluster, VMID};

use crate::moves::guest;

/// Waits until something is so.
fn until(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is() {
        assert!(Instant::now() < deadline, "{what} within a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_destination_that_cannot_leaves_the_guest_where_it_was() {
    need!(proxmox::ready());
    let cluster = Cluster::running(&guest()).expect("two nodes");
    // Its QEMU does not start; then it starts, takes the guest, and is not let run.
    for command in ["start", "resume"] {
        cluster.hosts[1].qm_refuses(command).expect("written");
        let said = cluster.fails_from(0, 1).unwrap_or_else(|error| panic!("{command}: {error:#}"));
        assert!(said.contains("refused by the test") && said.contains("runs on here"), "{command}: {said}");
        cluster.sound_at(0).unwrap_or_else(|error| panic!("after {command}: {error:#}"));
    }
    cluster.hosts[1].qm_refuses("").expect("written");
    cluster.move_from(0).expect("it moves");
    cluster.sound_at(1).expect("sound");
}

#[test]
fn a_destination_that_dies_leaves_the_guest_where_it_was() {
    need!(proxmox::ready());
    let mut cluster = Cluster::running(&guest()).expect("two nodes");
    for victim in ["QEMU", "vmoved"] {
        let mut moving = cluster.moving(0, &[]).expect("a command").spawn().expect("it starts");
        until("the destination has a QEMU", || cluster.hosts[1].qemu().is_some());
        if victim == "QEMU" {
            let qemu = cluster.hosts[1].qemu().expect("a QEMU");
            kill(Pid::from_raw(qemu), Signal::SIGKILL).expect("killed");
        } else {
            cluster.hosts[1].node.crash();
        }
        let ended = moving.wait().expect("it ends");
        assert_eq!(ended.code(), Some(1), "{victim}\n{}", cluster.logs());
        if victim == "vmoved" {
            cluster.hosts[1].node.run().expect("vmoved");
        }
        cluster.sound_at(0).unwrap_or_else(|error| panic!("after the death of {victim}: {error:#}"));
    }
    cluster.move_from(0).expect("it moves");
    cluster.sound_at(1).expect("sound");
}

#[test]
fn ctrl_c_calls_a_move_off() {
    need!(proxmox::ready());
    let cluster = Cluster::running(&guest()).expect("two nodes");
    let mut moving = cluster.moving(0, &[]).expect("a command").spawn().expect("it starts");
    until("the destination has a QEMU", || cluster.hosts[1].qemu().is_some());
    kill(Pid::from_raw(i32::try_from(moving.id()).expect("a pid")), Signal::SIGINT).expect("interrupted");
    assert_eq!(moving.wait().expect("it ends").code(), Some(1));
    cluster.sound_at(0).expect("it goes on");
}

#[test]
fn a_killed_move_is_recovered_wherever_it_was_cut() {
    need!(proxmox::ready());
    let cluster = Cluster::running(&guest()).expect("two nodes");
    let mut at = 0;
    // Before the switch; and after the configuration has moved, when the other side was not told yet or has just heard of it.
    for after in ["a QEMU waits", "the configuration has moved"] {
        let mut moving = cluster.moving(at, &[]).expect("a command").spawn().expect("it starts");
        until(after, || match after {
            "a QEMU waits" => cluster.hosts[1 - at].qemu().is_some(),
            _ => cluster.conf(1 - at).exists(),
        });
        moving.kill().expect("killed");
        moving.wait().expect("it ends");
        let said = cluster.hosts[at].run(&["vmove-pve", "recover", VMID]).unwrap_or_else(|error| {
            panic!("after {after}: {error:#}\n{}", cluster.logs());
        });
        at = if cluster.conf(0).exists() { 0 } else { 1 };
        assert!(said.contains(["runs on a", "runs on b"][at]), "{said}");
        cluster.sound_at(at).unwrap_or_else(|error| panic!("after {after}: {error:#}"));
    }
    let said =
        cluster.hosts[at].run(&["vmove-pve", "recover", VMID]).expect_err("nothing is left").to_string();
    assert!(said.contains("was cut"), "{said}");
}

/// The move is cut when the configuration has moved, and the VM is moved on from there before anybody recovers it.
#[test]
fn a_killed_move_of_a_vm_that_has_moved_on_is_recovered() {
    need!(proxmox::ready());
    let cluster = Cluster::running(&guest()).expect("two nodes");
    let mut moving = cluster.moving(0, &[]).expect("a command").spawn().expect("it starts");
    until("the configuration has moved", || cluster.conf(1).exists());
    moving.kill().expect("killed");
    moving.wait().expect("it ends");
    until("the guest runs there", || {
        let status = cluster.hosts[1].ask_qemu("query-status");
        status.is_ok_and(|status| status["status"] == "running")
    });
    // As a move to a third node would leave it.
    let third = cluster.file("nodes/c/qemu-server");
    std::fs::create_dir_all(&third).expect("a third node");
    let moved_on = third.join(format!("{VMID}.conf"));
    std::fs::rename(cluster.conf(1), &moved_on).expect("moved on");
    let said = cluster.hosts[0].run(&["vmove-pve", "recover", VMID]).unwrap_or_else(|error| {
        panic!("{error:#}\n{}", cluster.logs());
    });
    assert!(said.contains("is on c, where it was moved on from b"), "{said}");
    assert_eq!(cluster.hosts[0].qemu(), None, "nothing of it is left here");
    std::fs::rename(&moved_on, cluster.conf(1)).expect("as it was");
    cluster.hosts[1].run(&["qm", "unlock", VMID]).expect("unlocked");
    cluster.sound_at(1).expect("sound");
}
