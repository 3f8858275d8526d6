//! libvirt at the source has the guest run again, which has run at the destination: there libvirtd was killed after QEMU's RESUME, and before it could say so.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::libvirt::{self, Pair};

use crate::moves::guest;
use crate::steps::{self, Step};

/// libvirtd may be quicker than the blow: then the migration succeeds, and the next one is tried.
const TRIES: usize = 12;
/// For libvirt at the source to have the guest run there.
const RETURN_TIMEOUT: Duration = Duration::from_secs(30);
/// For the guest to be at one host alone.
const VERDICT_TIMEOUT: Duration = Duration::from_secs(30);

/// What is done to the source's vmoved from before the guest runs at the destination until libvirt has it run at the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Vmoved {
    Works,
    /// It is stopped, then killed and started anew.
    StartedAnew,
}

/// Has a migration end so that libvirt has the guest run on both sides. The source.
fn twice(pair: &mut Pair, vmoved: Vmoved) -> Result<usize> {
    let mut from = 0;
    for _ in 0..TRIES {
        if try_twice(pair, &mut from, vmoved)? {
            return Ok(from);
        }
        from = 1 - from;
        pair.sound_at(from)?;
    }
    anyhow::bail!(
        "libvirtd at the destination has told of the guest's start {TRIES} times before it was killed"
    )
}

fn try_twice(pair: &mut Pair, from: &mut usize, vmoved: Vmoved) -> Result<bool> {
    let mut held = steps::hold(pair, from, Step::Sent, &[])?;
    let (here, there) = (&pair.hosts[*from], &pair.hosts[1 - *from]);
    let source = steps::watch(here)?;
    let arriving = steps::watch(there)?;
    let libvirtd = there.libvirtd()?;
    if vmoved == Vmoved::StartedAnew {
        held.stop(here.node.pid().context("no vmoved")?)?;
    }
    kill(Pid::from_raw(libvirtd), Signal::SIGCONT)?;
    let deadline = Instant::now() + RETURN_TIMEOUT;
    while arriving.count("RESUME") == 0 {
        ensure!(Instant::now() < deadline, "libvirt does not have the guest run at the destination");
        std::hint::spin_loop();
    }
    there.end_libvirtd(Signal::SIGKILL)?;
    let returned = source.wait("RESUME", RETURN_TIMEOUT, |_| true);
    let output = match returned {
        // The source's QEMU has ended: libvirt had heard of the guest's start.
        Err(_) if here.qemu().is_none() => None,
        Err(error) => return Err(error),
        Ok(_) => {
            println!("the guest was let run at both hosts");
            Some(())
        }
    };
    if vmoved == Vmoved::StartedAnew {
        let node = &mut pair.hosts[*from].node;
        node.crash();
        node.run()?;
    }
    let ended = held.ended()?;
    pair.hosts[1 - *from].start_libvirtd()?;
    ensure!(
        output.is_none() || !ended.status.success(),
        "virsh says that it was migrated, and libvirt has had it run at the source"
    );
    Ok(output.is_some())
}

/// The guest is at the destination alone, and whole; the source says what it did.
fn is_at_the_destination_alone(pair: &Pair, from: usize) -> Result<()> {
    let begun = Instant::now();
    while pair.hosts[from].qemu().is_some() {
        ensure!(
            begun.elapsed() < VERDICT_TIMEOUT,
            "QEMU at the source should have ended: {:?}\n{}",
            pair.hosts.each_ref().map(|host| host.state()),
            pair.logs()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    println!(
        "QEMU at the source ended {:.0} ms after that was looked for",
        begun.elapsed().as_secs_f64() * 1e3
    );
    pair.sound_at(1 - from)?;
    let history = pair.hosts[from].node.ask(&["history"])?;
    let told = history["migrations"].as_array().into_iter().flatten().any(|one| {
        let told = &one["outcome"]["report"]["ended_copy"];
        told.as_str().is_some_and(|told| told.contains("its QEMU was ended before it had run anything"))
    });
    ensure!(told, "the history should say so: {history}");
    Ok(())
}

fn both_run_and_one_stays(vmoved: Vmoved) {
    need!(libvirt::ready());
    let mut pair = steps::hosts(&guest());
    let from = twice(&mut pair, vmoved).unwrap_or_else(|error| panic!("{error:#}\n{}", pair.logs()));
    is_at_the_destination_alone(&pair, from).unwrap_or_else(|error| panic!("{error:#}\n{}", pair.logs()));
    pair.migrate(1 - from, &[])
        .unwrap_or_else(|error| panic!("it moves afterwards: {error}\n{}", pair.logs()));
    pair.sound_at(from).expect("sound");
}

#[test]
fn a_guest_that_libvirt_has_run_on_both_sides_runs_at_the_destination_alone() {
    both_run_and_one_stays(Vmoved::Works);
}

#[test]
fn the_same_where_the_sources_vmoved_is_started_anew() {
    both_run_and_one_stays(Vmoved::StartedAnew);
}
