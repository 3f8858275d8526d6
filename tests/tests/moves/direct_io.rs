//! A guest whose disk bypasses the page cache: for each scan of its writes it is stopped and its I/O drained.
#![cfg(test)]

use serde_json::Value;
use vmove_skip::{need, skip};
use vmove_tests::disks;
use vmove_tests::guest::Guest;
use vmove_tests::monitor::Monitor;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{Scene, memory_mib, ready, steady};

/// Moves a guest with such a disk by rounds. Returns the number of stops, of resumptions, and of rounds.
fn stops_of(cache: &str) -> anyhow::Result<(usize, usize, usize, Value)> {
    let sandbox = Sandbox::new()?;
    let image = sandbox.path().join("disk.raw");
    disks::blank(&image, 16 << 20)?;
    let mut guest = Guest::new(memory_mib(&steady()), steady())?;
    let drive = format!("if=none,id=disk0,format=raw,cache={cache},file={}", image.display());
    guest.extra.extend(["-drive".to_owned(), drive]);
    guest.extra.extend(["-device", "virtio-blk-pci,drive=disk0"].map(str::to_owned));
    guest.extra.extend(["-qmp", "unix:{vmdir}/operator.sock,server=on,wait=off"].map(str::to_owned));
    let scene = Scene::in_sandbox(sandbox, "thp", &guest)?;
    let monitor = Monitor::connect(&scene.a.vm("guest")?.dir.join("operator.sock"))?;
    let end = scene.migrate_to("b", &["--mode", "hybrid", "--verify"])?;
    anyhow::ensure!(end.code == 0, "{} {}", end.answer, end.said);
    anyhow::ensure!(end.answer["verified"] == true, "{}", end.answer);
    scene.arrived()?;
    let rounds = end.answer["rounds"].as_array().map_or(0, Vec::len);
    Ok((monitor.count("STOP"), monitor.count("RESUME"), rounds, end.answer))
}

#[test]
fn a_guest_with_direct_io_is_stopped_for_each_scan() {
    need!(ready());
    let (stops, resumes, rounds, report) = match stops_of("none") {
        Err(error) if format!("{error:#}").contains("O_DIRECT") => {
            return skip!("this file system has no direct I/O: {error:#}");
        }
        other => other.expect("it moves"),
    };
    assert!(rounds > 0, "{report}");
    // One stop at the beginning, one after each round, and one for the hand-over, after which it does not resume here.
    assert_eq!((stops, resumes), (rounds + 2, rounds + 1), "{report}");
    assert!(report["direct_io"].as_str().is_some_and(|how| how.contains("stopped")), "{report}");
}

#[test]
fn a_guest_without_direct_io_runs_on() {
    need!(ready());
    let (stops, resumes, _, report) = stops_of("writeback").expect("it moves");
    assert_eq!((stops, resumes), (1, 0), "{report}");
}
