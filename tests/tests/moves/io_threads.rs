//! Guests whose disks have an I/O thread of QEMU for themselves: they hear of each request that is done, however busy the host is.
#![cfg(test)]

use std::path::Path;
use std::process::Command;

use serde_json::json;
use vmove_skip::need;
use vmove_tests::disks::{DISK, Moved, OPERATOR};
use vmove_tests::monitor::Monitor;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, ready, vmove};

/// A disk past the page cache of the host, with a thread of its own.
fn disk(image: &Path) -> Vec<String> {
    let file =
        format!("driver=file,node-name=file0,filename={},cache.direct=on,aio=threads", image.display());
    let node = format!("driver=raw,node-name={DISK},file=file0,cache.direct=on");
    let device = "virtio-blk-pci,drive=disk0,id=vda,iothread=io0";
    ["-object", "iothread,id=io0", "-blockdev", &file, "-blockdev", &node, "-device", device]
        .map(str::to_owned)
        .into()
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect(program);
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The thread behind the disk, by the QEMU that has the guest.
fn thread(moved: &Moved) -> (i32, String) {
    let (node, ..) = moved.sides().expect("it is somewhere");
    let vm = node.vm(NAME).expect("a VM");
    let monitor = Monitor::connect(&vm.dir.join(OPERATOR)).expect("a monitor");
    let told = monitor.run("query-iothreads", json!({})).expect("threads");
    let number = told[0]["thread-id"].as_u64().expect("a number");
    (vm.pid, number.to_string())
}

/// Whatever else of QEMU wants the processor takes it from that thread at once: as on a host with more to do than processors.
fn gives_way(moved: &Moved) {
    let (pid, thread) = thread(moved);
    run("taskset", &["-a", "-p", "-c", "0", &pid.to_string()]);
    run("chrt", &["--idle", "-p", "0", &thread]);
}

fn migrate(moved: &Moved) {
    let (from, to, ..) = moved.sides().expect("it is somewhere");
    let end = vmove(from, &["migrate", NAME, "--to", &to.listen().to_string()]).expect("an answer");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
}

#[test]
fn no_request_is_forgotten_when_the_guest_stops() {
    need!(ready());
    let moved = Moved::start_with(Sandbox::new().expect("a sandbox"), "raw", disk).expect("a guest");
    for turn in 0..3 {
        gives_way(&moved);
        migrate(&moved);
        moved.works().unwrap_or_else(|error| panic!("after move {turn}: {error:#}"));
    }
    // Stopped and let run where it is.
    gives_way(&moved);
    let (node, ..) = moved.sides().expect("it is somewhere");
    for turn in 0..5 {
        node.ask(&["pause", NAME]).expect("it pauses");
        node.ask(&["resume", NAME]).expect("it runs");
        moved.works().unwrap_or_else(|error| panic!("after pause {turn}: {error:#}"));
    }
    let (_, thread) = thread(&moved);
    let policy = run("chrt", &["-p", &thread]);
    assert!(policy.contains("SCHED_IDLE"), "the thread is not as it was: {policy}");
}
