//! What real QEMUs do with writes while a mirror begins, and what is done about it.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

mod common;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Bench, TIMEOUT, qemus};
use serde_json::{Value, json};
use vmove_qmp::Client;
use vmove_qmp::client::QemuVersion;
use vmove_qmp::disks::{MoveOrder, Writes, begin_move, disks, loses_writes};

const SHORT: Duration = Duration::from_millis(300);

/// Runs a program of qemu-utils; false if it is not there.
fn ran(program: &str, arguments: &[&str]) -> bool {
    match Command::new(program).args(arguments).output() {
        Err(_) => false,
        Ok(output) => {
            assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
            true
        }
    }
}

/// A qcow2 image and a raw one, of 8 GiB. The first has data far behind, so that QEMU reads another table when it looks there. The second has some,
/// too: QEMU from 10.1 on would not zero an empty one, and there would be no time for a write.
fn images(folder: &Path) -> bool {
    let [source, target] = ["source.qcow2", "target.raw"].map(|name| folder.join(name).display().to_string());
    ran("qemu-img", &["create", "-q", "-f", "qcow2", &source, "8G"])
        && ran("qemu-io", &["-f", "qcow2", "-c", "write -P 3 4G 64k", &source])
        && ran("qemu-img", &["create", "-q", "-f", "raw", &target, "8G"])
        && ran("qemu-io", &["-f", "raw", "-c", "write -P 5 0 64k", &target])
}

fn drive(folder: &Path) -> String {
    format!(
        "if=none,id=d0,node-name=source,driver=qcow2,file.driver=blkdebug,file.image.driver=file,file.image.filename={}",
        folder.join("source.qcow2").display()
    )
}

async fn run(client: &Client, command: &str, arguments: Value) -> Value {
    client.execute_raw(command, arguments, TIMEOUT).await.unwrap_or_else(|error| panic!("{command}: {error}"))
}

/// A request to the drive as a guest makes it, or a stop of one at a point of its way.
async fn io(client: &Client, what: &str) {
    let line = format!("qemu-io d0 \"{what}\"");
    run(client, "human-monitor-command", json!({ "command-line": line })).await;
}

async fn until(client: &Client, what: &str, so: impl Fn(&Value) -> bool) {
    let begun = Instant::now();
    loop {
        let jobs = run(client, "query-block-jobs", Value::Null).await;
        if so(&jobs[0]) {
            return;
        }
        assert!(begun.elapsed() < TIMEOUT, "{what}: {jobs}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether the copy lacks a write that was under way when QEMU looked which blocks are in use, and that ended before the mirror noted writes.
async fn loses_a_write(bench: &mut Bench) -> (QemuVersion, bool) {
    let layout = bench.layout("a");
    let line = bench.guest(&["-drive", &drive(&bench.base)]);
    let mut movable = line.clone();
    movable.rewrite_movable(&layout).unwrap();
    let (process, client) = bench.spawn(&movable.to_argv(), &layout).await;
    // A target that takes a while to be zeroed, so that there is time to begin a write.
    let limits = json!({ "iops-total": 2, "iops-total-max": 2, "iops-total-max-length": 1 });
    run(&client, "object-add", json!({ "qom-type": "throttle-group", "id": "slow", "limits": limits })).await;
    let file = json!({ "driver": "file", "discard": "unmap", "filename": bench.base.join("target.raw") });
    let raw = json!({ "driver": "raw", "discard": "unmap", "file": file });
    let node = json!({ "node-name": "target", "driver": "throttle", "throttle-group": "slow", "discard": "unmap", "file": raw });
    run(&client, "blockdev-add", node).await;
    let job = json!({ "job-id": "job", "device": "source", "target": "target", "sync": "full", "auto-dismiss": false });
    run(&client, "blockdev-mirror", job).await;
    tokio::time::sleep(SHORT).await;
    io(&client, "break write_aio A").await;
    io(&client, "aio_write -P 7 1M 64k").await;
    // QEMU has looked at that block by the time when it reads the table of the next ones.
    io(&client, "break l2_load B").await;
    tokio::time::sleep(5 * SHORT).await;
    // It is still at its begin: otherwise this write would tell nothing.
    let jobs = run(&client, "query-block-jobs", Value::Null).await;
    assert_eq!((&jobs[0]["ready"], &jobs[0]["len"]), (&json!(false), &json!(0)), "{jobs}");
    io(&client, "resume A").await;
    tokio::time::sleep(SHORT).await;
    io(&client, "resume B").await;
    until(&client, "it is never ready", |job| job["ready"] == true).await;
    run(&client, "block-job-cancel", json!({ "device": "job" })).await;
    until(&client, "it does not end", |job| job["status"] == "concluded").await;
    process.quit(Some(&client), TIMEOUT).await.unwrap();
    let mut compare = Command::new("qemu-img");
    compare
        .args(["compare", "-f", "qcow2", "-F", "raw"])
        .args([bench.base.join("source.qcow2"), bench.base.join("target.raw")]);
    (client.version().clone(), !compare.output().unwrap().status.success())
}

#[tokio::test]
async fn qemus_that_lose_a_write_while_a_mirror_begins_are_known() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        if !images(&bench.base) {
            vmove_skip::skip!("qemu-img and qemu-io are not installed (package qemu-utils)");
        }
        let (version, loses) = loses_a_write(&mut bench).await;
        eprintln!("QEMU {version} loses a write: {loses}");
        // Otherwise a test that has come to show nothing would pass.
        let is_known = (version.major, version.minor, version.micro) == (10, 0, 2);
        assert!(
            loses || !is_known,
            "QEMU {version} is known to lose this write: the test does not make it any more"
        );
        assert!(
            !loses || loses_writes(&version),
            "QEMU {version} loses a write, and no guest is stopped for it"
        );
    }
}

#[tokio::test]
async fn the_guest_stands_still_until_a_mirror_notes_writes() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        if !images(&bench.base) {
            vmove_skip::skip!("qemu-img and qemu-io are not installed (package qemu-utils)");
        }
        let layout = bench.layout("a");
        let line = bench.guest(&["-drive", &drive(&bench.base), "-device", "virtio-blk-pci,drive=d0"]);
        let mut movable = line.clone();
        movable.rewrite_movable(&layout).unwrap();
        let (process, client) = bench.spawn(&movable.to_argv(), &layout).await;
        let stops = loses_writes(client.version());
        let known = disks(&client).await.unwrap();
        let mut order = MoveOrder::of(&known[0], "1".to_owned(), bench.base.join("target.raw"), false);
        order.format = "raw".to_owned();
        let (stopped, resumed) = (client.expect("STOP", |_| true), client.expect("RESUME", |_| true));
        let still = begin_move(&client, &order, 0, Writes::Later).await.unwrap();
        let jobs = run(&client, "query-block-jobs", Value::Null).await;
        assert!(jobs[0]["len"].as_u64() > Some(0) || jobs[0]["ready"] == true || !stops, "{jobs}");
        let (stopped, resumed) = (stopped.wait(SHORT).await.is_ok(), resumed.wait(SHORT).await.is_ok());
        assert_eq!((stopped, resumed, still > Duration::ZERO), (stops, stops, stops), "{still:?}");
        assert!(still < Duration::from_secs(1), "{still:?}");
        let status = run(&client, "query-status", Value::Null).await;
        assert_eq!(status["status"], "running");
        process.quit(Some(&client), TIMEOUT).await.unwrap();
    }
}
