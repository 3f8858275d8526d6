//! Daemons and QEMUs that are killed while libvirt migrates.

use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::libvirt::{self, Pair};

use crate::moves::guest;

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Vmoved(usize),
    Libvirtd(usize),
    QemuThere,
}

/// Kills the victim so long after the beginning of a migration, and starts it again. Where the guest is then.
fn blow(pair: &mut Pair, from: usize, victim: Victim, after: Duration) -> usize {
    let migration =
        pair.migration(from, &[]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("virsh");
    // The time until libvirt has started a QEMU there differs.
    let deadline = Instant::now() + Duration::from_secs(30);
    while pair.hosts[1 - from].qemu().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(after);
    let side = |of: usize| if of == 0 { from } else { 1 - from };
    match victim {
        Victim::Vmoved(of) => {
            let node = &mut pair.hosts[side(of)].node;
            node.crash();
            std::thread::sleep(Duration::from_millis(200));
            node.run().expect("vmoved starts again");
        }
        Victim::Libvirtd(of) => {
            pair.hosts[side(of)].restart_libvirtd(Signal::SIGKILL).expect("libvirtd starts again");
        }
        Victim::QemuThere => {
            if let Some(pid) = pair.hosts[1 - from].qemu() {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
    let output = migration.wait_with_output().expect("virsh ends");
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let runs: Vec<usize> = (0..2).filter(|at| pair.hosts[*at].runs().unwrap_or(false)).collect();
        if let [at] = runs[..] {
            return at;
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let states = pair.hosts.each_ref().map(|host| host.state());
        assert!(Instant::now() < deadline, "{victim:?} after {after:?}: {states:?}: {said}\n{}", pair.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn strike(pair: &mut Pair, at: usize, victim: Victim, after: Duration) -> usize {
    let at = blow(pair, at, victim, after);
    pair.sound_at(at).unwrap_or_else(|error| panic!("{victim:?} after {after:?}: {error:#}"));
    at
}

#[test]
#[ignore = "long: ./run soak --libvirt"]
fn daemons_that_are_killed_while_a_guest_moves_leave_one_guest() {
    need!(libvirt::ready());
    let mut pair = Pair::running(&guest()).expect("two hosts");
    let mut at = 0;
    for (victim, after) in [
        (Victim::Vmoved(0), 100),
        (Victim::Vmoved(1), 300),
        (Victim::QemuThere, 300),
        (Victim::Libvirtd(1), 200),
        (Victim::Libvirtd(0), 200),
    ] {
        at = strike(&mut pair, at, victim, Duration::from_millis(after));
    }
    pair.migrate(at, &[]).unwrap_or_else(|error| panic!("it moves afterwards: {error}\n{}", pair.logs()));
    pair.sound_at(1 - at).expect("sound");
}

/// `./run soak --libvirt`: every second of forty moves meets a blow, each victim at four moments of the way.
#[test]
#[ignore = "takes several minutes: ./run soak --libvirt"]
fn forty_moves_with_twenty_blows_leave_one_guest() {
    need!(libvirt::ready());
    let mut pair = Pair::running(&guest()).expect("two hosts");
    let victims =
        [Victim::Vmoved(0), Victim::Vmoved(1), Victim::Libvirtd(0), Victim::Libvirtd(1), Victim::QemuThere];
    let (mut at, mut arrived) = (0, 0);
    for round in 0..20 {
        // In the rounds, about when libvirt goes on, in its migration, and when the guest has just moved.
        let after = [150, 700, 1500, 2500][round / victims.len()] + 37 * (round as u64 % 5);
        let before = at;
        at = strike(&mut pair, at, victims[round % victims.len()], Duration::from_millis(after));
        arrived += usize::from(at != before);
        pair.migrate(at, &[]).unwrap_or_else(|error| panic!("after blow {round}: {error}\n{}", pair.logs()));
        at = 1 - at;
        pair.sound_at(at).unwrap_or_else(|error| panic!("after blow {round}: {error:#}"));
        println!("blow {round}: {:?} after {after} ms, the guest is at {at}", victims[round % victims.len()]);
    }
    println!("{arrived} of 20 guests that met a blow had arrived all the same");
    let file = pair.path().join("saved");
    let file = file.to_string_lossy();
    pair.hosts[at].virsh(&["save", libvirt::DOMAIN, &file]).expect("saved");
    pair.hosts[at].virsh(&["restore", &file]).expect("restored");
    pair.sound_at(at).expect("sound after it was saved and restored");
}
