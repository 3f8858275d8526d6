//! Daemons and QEMUs that are killed, and hooks that fail, at each step of a migration by libvirt.

use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::libvirt::{self, DOMAIN, Pair};

use crate::moves::guest;
use crate::steps::{self, Step};

/// What becomes of what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blow {
    SourceVmoved,
    DestinationVmoved,
    SourceLibvirtd,
    DestinationLibvirtd,
    DestinationQemu,
    HookFails,
}

/// Where the guest runs afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Stays,
    Arrives,
    /// As libvirt, or the daemon that comes back, finds things.
    Either,
}

/// A daemon that was killed is away for so long.
const AWAY: Duration = Duration::from_millis(300);
/// From a blow until one guest runs again and virsh has ended: more than a daemon's absence and libvirt's own limits on a busy machine.
const LONGEST: Duration = Duration::from_secs(45);
/// For libvirt to have one guest run.
const VERDICT_TIMEOUT: Duration = Duration::from_secs(60);
/// A QEMU that is paused beside the guest that runs is libvirt's to end. After this it does not.
const LEFT_PAUSED: Duration = Duration::from_secs(8);

/// What is to become of the guest; nothing where there is no such case.
fn expected(step: Step, blow: Blow) -> Option<Then> {
    use Step::{BeforeHook, Ended, Returned, Rounds, Runs, Sent, Stopped};
    match (step, blow) {
        (BeforeHook | Returned, Blow::HookFails) => Some(Then::Stays),
        (_, Blow::HookFails) => None,
        // It would take the guest that runs in it with it.
        (Runs | Ended, Blow::DestinationQemu) => None,
        (Runs | Ended, _) => Some(Then::Arrives),
        (BeforeHook | Rounds, _) | (_, Blow::DestinationQemu) => Some(Then::Stays),
        (Stopped, Blow::SourceVmoved | Blow::DestinationVmoved) => Some(Then::Stays),
        (Sent, Blow::SourceVmoved | Blow::DestinationVmoved) => Some(Then::Arrives),
        (Returned | Stopped | Sent, _) => Some(Then::Either),
    }
}

/// Where the guest was, and is.
fn strike(pair: &mut Pair, mut from: usize, step: Step, blow: Blow) -> Result<(usize, usize)> {
    if blow == Blow::HookFails {
        steps::hook_fails(&pair.hosts[1 - from], step, true)?;
    }
    let mut held = steps::hold(pair, &mut from, step, &[])?;
    let begun = Instant::now();
    let side = match blow {
        Blow::SourceVmoved | Blow::SourceLibvirtd => from,
        _ => 1 - from,
    };
    match blow {
        Blow::SourceVmoved | Blow::DestinationVmoved => {
            let node = &mut pair.hosts[side].node;
            node.crash();
            held.let_go();
            std::thread::sleep(AWAY);
            node.run()?;
        }
        Blow::SourceLibvirtd | Blow::DestinationLibvirtd => {
            let host = &pair.hosts[side];
            host.end_libvirtd(Signal::SIGKILL)?;
            held.let_go();
            std::thread::sleep(AWAY);
            host.start_libvirtd()?;
        }
        Blow::DestinationQemu => {
            let qemu = pair.hosts[side].qemu().ok_or_else(|| anyhow::anyhow!("no QEMU"))?;
            kill(Pid::from_raw(qemu), Signal::SIGKILL)?;
        }
        Blow::HookFails => {}
    }
    let output = held.ended()?;
    if blow == Blow::HookFails {
        steps::hook_fails(&pair.hosts[1 - from], step, false)?;
    }
    let at = verdict(pair, &String::from_utf8_lossy(&output.stderr))?;
    let took = begun.elapsed();
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
    let copy = end_paused_copy(pair, 1 - at)?;
    let place = if at == from { "stays" } else { "arrives" };
    println!("| {step:?} | {blow:?} | {place}{copy} | {:.1} s | {said}", took.as_secs_f64());
    anyhow::ensure!(
        took < LONGEST,
        "expected one guest that runs within {LONGEST:?}, it took {took:?}\n{}",
        pair.logs()
    );
    Ok((from, at))
}

/// The host that has the guest run.
fn verdict(pair: &Pair, said: &str) -> Result<usize> {
    let deadline = Instant::now() + VERDICT_TIMEOUT;
    loop {
        let runs: Vec<usize> = (0..2).filter(|at| pair.hosts[*at].runs().unwrap_or(false)).collect();
        if let [at] = runs[..] {
            return Ok(at);
        }
        let states = pair.hosts.each_ref().map(|host| host.state());
        anyhow::ensure!(
            Instant::now() < deadline,
            "one guest should run, found {states:?}: {said}\n{}",
            pair.logs()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// libvirt leaves a source's guest paused if it could not learn what became of the migration: an operator ends it.
fn end_paused_copy(pair: &Pair, at: usize) -> Result<String> {
    let deadline = Instant::now() + LEFT_PAUSED;
    while let Some(state) = pair.hosts[at].state()? {
        if pair.hosts[at].qemu().is_none() {
            break;
        }
        anyhow::ensure!(state != "running", "the guest runs twice\n{}", pair.logs());
        if Instant::now() > deadline {
            pair.hosts[at].virsh(&["destroy", DOMAIN])?;
            return Ok(format!(", the other QEMU is left {state}"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(String::new())
}

/// Strikes, and looks whether the guest is where it should be, alone and whole. Where it is.
fn struck(pair: &mut Pair, at: usize, step: Step, blow: Blow) -> usize {
    let (from, at) =
        strike(pair, at, step, blow).unwrap_or_else(|error| panic!("{step:?}, {blow:?}: {error:#}"));
    pair.sound_at(at).unwrap_or_else(|error| panic!("{step:?}, {blow:?}: {error:#}\n{}", pair.logs()));
    let then = if at == from { Then::Stays } else { Then::Arrives };
    let wanted = expected(step, blow);
    assert!(
        wanted == Some(Then::Either) || wanted == Some(then),
        "{step:?}, {blow:?}: {then:?}, not {wanted:?}"
    );
    at
}

fn saved_and_restored(pair: &Pair, at: usize) {
    let file = pair.path().join("saved");
    let file = file.to_string_lossy();
    pair.hosts[at].virsh(&["save", DOMAIN, &file]).expect("saved");
    pair.hosts[at].virsh(&["restore", &file]).expect("restored");
    pair.sound_at(at).expect("sound after it was saved and restored");
}

/// A case of each step from the hook's return on, where no migration of a vmove of its own goes by.
#[test]
fn blows_between_the_hooks_return_and_the_end_leave_one_guest() {
    need!(libvirt::ready());
    let mut pair = steps::hosts(&guest());
    let mut at = 0;
    for (step, blow) in [
        (Step::Returned, Blow::HookFails),
        (Step::Stopped, Blow::SourceVmoved),
        (Step::Sent, Blow::DestinationQemu),
        (Step::Runs, Blow::SourceVmoved),
    ] {
        at = struck(&mut pair, at, step, blow);
    }
    pair.migrate(at, &[]).unwrap_or_else(|error| panic!("it moves afterwards: {error}\n{}", pair.logs()));
    pair.sound_at(1 - at).expect("sound");
    saved_and_restored(&pair, 1 - at);
}

/// The destination's QEMU waits for a page of a guest that stays at the source, and libvirt for that QEMU, which vmoved ends after some seconds: also one
/// that is killed before it has.
#[test]
fn a_stuck_qemu_is_ended_though_vmoved_is_started_anew_before_it_has_ended_it() {
    need!(libvirt::ready());
    let mut pair = steps::hosts(&guest());
    let mut from = 0;
    let mut held = steps::hold(&pair, &mut from, Step::Stopped, &[]).expect("held");
    let begun = Instant::now();
    pair.hosts[from].node.crash();
    held.let_go();
    std::thread::sleep(AWAY);
    pair.hosts[from].node.run().expect("vmoved");
    // Its session has ended; QEMU has not.
    while !pair.hosts[1 - from].node.log().contains("migration failed") {
        assert!(begun.elapsed() < LONGEST, "{}", pair.logs());
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("QEMU at the destination: {:?}", pair.hosts[1 - from].qemu());
    let there = &mut pair.hosts[1 - from].node;
    there.crash();
    there.run().expect("vmoved");
    let output = held.ended().expect("virsh ends");
    let at = verdict(&pair, &String::from_utf8_lossy(&output.stderr)).expect("one guest runs");
    println!("one guest runs {:.1} s after the blow", begun.elapsed().as_secs_f64());
    assert!(at == from && begun.elapsed() < LONGEST, "it should stay\n{}", pair.logs());
    pair.sound_at(from).unwrap_or_else(|error| panic!("{error:#}\n{}", pair.logs()));
}

/// `./run soak --libvirt`: each blow at each of these steps, and a move without one after it.
fn each_blow_at(all: &[Step]) {
    need!(libvirt::ready());
    let mut pair = steps::hosts(&guest());
    let mut at = 0;
    for &step in all {
        for blow in [
            Blow::SourceVmoved,
            Blow::DestinationVmoved,
            Blow::SourceLibvirtd,
            Blow::DestinationLibvirtd,
            Blow::DestinationQemu,
            Blow::HookFails,
        ] {
            if expected(step, blow).is_none() {
                continue;
            }
            at = struck(&mut pair, at, step, blow);
            let moved = pair.migrate(at, &[]);
            moved.unwrap_or_else(|error| panic!("after {step:?}, {blow:?}: {error}\n{}", pair.logs()));
            at = 1 - at;
            pair.sound_at(at).unwrap_or_else(|error| panic!("after {step:?}, {blow:?}: {error:#}"));
        }
    }
    saved_and_restored(&pair, at);
}

#[test]
#[ignore = "takes several minutes: ./run soak --libvirt"]
fn each_blow_up_to_the_hooks_return_leaves_one_guest() {
    each_blow_at(&[Step::BeforeHook, Step::Rounds, Step::Returned]);
}

#[test]
#[ignore = "takes several minutes: ./run soak --libvirt"]
fn each_blow_from_the_stop_on_leaves_one_guest() {
    each_blow_at(&[Step::Stopped, Step::Sent, Step::Runs, Step::Ended]);
}
