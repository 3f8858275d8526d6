//! A destination has told QEMU to run the guest, and QEMU has not answered: it may wait for a page that only the source has.
#![cfg(test)]

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::blows::moment::journaled;
use vmove_tests::guest::Guest;
use vmove_tests::proxy::Fault;
use vmove_tests::sandbox::qemu_in;
use vmove_tests::scene::{NAME, Scene, memory_mib, ready, steady};

use crate::space::commit;
use crate::waits::{status, until};

/// Less than a source waits for an answer (15 s) and a destination for QEMU (30 s), and many times what a new connection takes.
const HEARD_WITHIN: Duration = Duration::from_secs(10);

/// A QEMU that stands still until this is dropped.
struct Frozen(Pid);

impl Frozen {
    fn new(pid: i32) -> Result<Self> {
        let pid = Pid::from_raw(pid);
        kill(pid, Signal::SIGSTOP).context("could not stop QEMU")?;
        Ok(Self(pid))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

fn lost_while_qemu_is_told(scene: &Scene) -> Result<()> {
    let proxy = scene.proxy()?;
    let first = proxy.connections();
    let id = scene.start_and_stick_in_the_switchover()?;
    proxy.add(commit(first, Fault::Stall));
    std::thread::sleep(Duration::from_millis(200));
    scene.unstick(first)?;
    until("the source has committed", || Ok(journaled(&scene.a, &id, "source.jsonl") == "committed"))?;
    let frozen = Frozen::new(qemu_in(scene.b.folder()).context("a QEMU at the destination")?)?;
    proxy.add(commit(first, Fault::Delay(Duration::ZERO)));
    until("the guest is the destination's", || Ok(journaled(&scene.b, &id, "destination.jsonl") == "owner"))?;
    // It has told QEMU.
    std::thread::sleep(Duration::from_millis(300));
    let cut = Instant::now();
    proxy.cut_all();
    proxy.heal();
    until("the source has lost it", || Ok(scene.a.log().contains("destination lost; dialling again")))?;
    while status(&scene.a, &id)?["outcome"]["state"] != "running" {
        ensure!(cut.elapsed() < HEARD_WITHIN, "the source is not heard: {}", status(&scene.a, &id)?);
        std::thread::sleep(Duration::from_millis(20));
    }
    ensure!(
        journaled(&scene.b, &id, "destination.jsonl") == "owner",
        "it is complete without an answer of QEMU"
    );
    drop(frozen);
    let end = scene.end(&id)?;
    ensure!(end.code == 0, "{} {}", end.answer, end.said);
    scene.arrived()
}

#[test]
fn a_source_is_heard_while_qemu_is_told_to_run_the_guest() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let done = lost_while_qemu_is_told(&scene);
    done.unwrap_or_else(|e| panic!("{e:#}\na: {}\nb: {}", scene.a.log(), scene.b.log()));
}

/// Every page is here, and the guest is waited for: its agent, which does not answer, is to run a script, as it would wait for its devices.
/// What the daemon needs to take the session up must still be there.
#[test]
fn a_destination_killed_while_the_guest_is_waited_for_takes_it_up() {
    need!(ready());
    let port = [
        "-device",
        "virtio-serial-pci",
        "-chardev",
        "socket,id=qga,path={vmdir}/qga.sock,server=on,wait=off",
        "-device",
        "virtserialport,chardev=qga,name=org.qemu.guest_agent.0",
    ];
    let mut guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    guest.extra = port.map(str::to_owned).to_vec();
    let mut scene = Scene::with(NAME, "thp", &guest).expect("a scene");
    let id = scene
        .start(&["--mode", "postcopy", "--resume", "true", "--script-timeout", "30s"])
        .expect("it begins");
    scene.handed_over(&id).expect("it runs there");
    until("mappings are made huge", || Ok(scene.b.log().contains("guest memory is settled")))
        .unwrap_or_else(|e| panic!("{e:#}\nb: {}", scene.b.log()));
    scene.b.crash();
    assert_eq!(journaled(&scene.b, &id, "destination.jsonl"), "owner", "the script is over");
    scene.b.run().expect("it starts again");
    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "{} {}\nb: {}", end.answer, end.said, scene.b.log());
    assert!(end.answer["resume_problem"].is_string(), "{}", end.answer);
    scene.arrived().expect("it is whole");
}
