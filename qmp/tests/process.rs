//! Processes: started apart from us, waited for, ended; their words are quoted when they die.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

mod common;

use std::{ffi::OsString, os::fd::AsRawFd, path::Path, time::Duration};

use common::{Bench, TIMEOUT, qemus};
use vmove_qmp::{QemuProcess, QmpError, confine::Confinement, process::ProcessError};

const FREE: Confinement = Confinement { user: None, sandbox: false };

fn words(text: &[&str]) -> Vec<OsString> {
    text.iter().map(OsString::from).collect()
}

fn stat(pid: u32) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // After the command in brackets: state, parent, group, session.
    text.rsplit_once(')').unwrap().1.split_whitespace().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_process_is_in_a_session_of_its_own_with_only_its_own_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("q.log");
    let held = std::fs::File::open(folder.path()).unwrap();
    let process = QemuProcess::spawn(&words(&["sleep", "60"]), folder.path(), &log, &FREE).unwrap();
    let pid = process.pid();
    let comm = Path::new("/proc").join(pid.to_string()).join("comm");
    for _ in 0..500 {
        if std::fs::read_to_string(&comm).unwrap().trim() == "sleep" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(stat(pid)[2..4], [pid.to_string(), pid.to_string()], "group and session are its own");
    assert_eq!(
        std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap(),
        folder.path().canonicalize().unwrap()
    );
    let target = |fd: i32| std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok();
    assert_eq!(target(0).unwrap(), Path::new("/dev/null"));
    assert_eq!(target(1), target(2));
    assert_eq!(target(held.as_raw_fd()), None, "a descriptor of ours was inherited");
    assert!(process.alive());
    // Dropping ends nothing.
    let second = process.clone();
    drop(process);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(second.alive());
    second.quit(None, TIMEOUT).await.unwrap();
    assert!(!second.alive());
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "it must be reaped");
}

#[tokio::test]
async fn what_was_started_in_a_folder_is_found_and_ended_and_nothing_else_there() {
    let parent = tempfile::tempdir().unwrap();
    let (folder, link) = (parent.path().join("vm"), parent.path().join("link"));
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(&folder, &link).unwrap();
    let log = folder.join("qemu.log");
    let sleep = words(&["sleep", "60"]);
    let ours = QemuProcess::spawn(&sleep, &link, &log, &FREE).unwrap();
    let elsewhere = QemuProcess::spawn(&sleep, parent.path(), &log, &FREE).unwrap();
    let mut shell = std::process::Command::new("sleep").arg("60").current_dir(&folder).spawn().unwrap();
    let ended = vmove_qmp::process::end_started_in(&link).await.unwrap();
    assert_eq!(ended, [ours.pid()]);
    assert!(!ours.alive() && elsewhere.alive());
    assert!(shell.try_wait().unwrap().is_none(), "a shell of the operator was killed");
    assert!(vmove_qmp::process::end_started_in(&folder).await.unwrap().is_empty());
    elsewhere.kill().await.unwrap();
    shell.kill().unwrap();
    shell.wait().unwrap();
}

#[tokio::test]
async fn a_process_of_someone_else_can_be_taken_in() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let process = QemuProcess::adopt(child.id(), Path::new("/dev/null")).unwrap();
    assert!(process.alive());
    process.kill().await.unwrap();
    assert!(!process.alive());
    child.wait().unwrap();
    let gone = QemuProcess::adopt(child.id(), Path::new("/dev/null"));
    assert!(matches!(gone, Err(ProcessError::NoProcess { .. })), "{gone:?}");
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[tokio::test]
async fn hundreds_of_processes_are_watched_without_a_thread_for_each() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("q.log");
    // Other tests run beside this one.
    let before = threads();
    let mut ours = Vec::new();
    let mut adopted = Vec::new();
    for _ in 0..100 {
        let process = QemuProcess::spawn(&words(&["sleep", "60"]), folder.path(), &log, &FREE).unwrap();
        adopted.push(QemuProcess::adopt(process.pid(), &log).unwrap());
        ours.push(process);
    }
    let (first, second) = (adopted[0].clone(), adopted[0].clone());
    let waiting = tokio::spawn(async move { tokio::join!(first.exited(), second.exited()) });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(threads() < before + 50, "{} threads for 200 processes, {before} before", threads());
    for process in &ours {
        process.kill_now();
    }
    for process in ours.iter().chain(&adopted) {
        tokio::time::timeout(TIMEOUT, process.exited()).await.unwrap();
    }
    tokio::time::timeout(TIMEOUT, waiting).await.unwrap().unwrap();
    assert!(ours.iter().all(|process| !Path::new(&format!("/proc/{}", process.pid())).exists()), "reaped");
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("q.log");
    let empty = QemuProcess::spawn(&[], folder.path(), &log, &FREE);
    assert!(matches!(empty, Err(ProcessError::NoProgram)));
    let process =
        QemuProcess::spawn(&words(&["no-such-qemu", "-m", "1G"]), folder.path(), &log, &FREE).unwrap();
    let died = process.wait_qmp(&folder.path().join("qmp.sock"), TIMEOUT).await.unwrap_err();
    let ProcessError::Died { tail, .. } = &died else { panic!("{died:?}") };
    assert!(tail.contains("no-such-qemu"), "{tail}");
    let nowhere = QemuProcess::spawn(&words(&["sleep", "1"]), &folder.path().join("none"), &log, &FREE);
    assert!(matches!(nowhere, Err(ProcessError::Start { .. })), "{nowhere:?}");
}

#[tokio::test]
async fn a_qemu_that_dies_at_start_is_quoted() {
    for qemu in qemus() {
        let bench = Bench::new(&qemu);
        let layout = bench.layout("a");
        let mut line = bench.guest(&["-device", "no-such-device"]);
        line.rewrite_movable(&layout).unwrap();
        let process =
            QemuProcess::spawn(&line.to_argv(), &layout.vm_dir, &layout.vm_dir.join("qemu.log"), &FREE)
                .unwrap();
        let died = process.wait_qmp(&layout.qmp_socket, TIMEOUT).await.unwrap_err();
        assert!(died.to_string().contains("no-such-device"), "{died}");
        tokio::time::timeout(TIMEOUT, process.exited()).await.unwrap();
    }
}

#[tokio::test]
async fn a_process_without_monitor_is_given_up_with_its_log() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("q.log");
    let argv = words(&["sh", "-c", "echo waiting for nothing; exec sleep 60"]);
    let process = QemuProcess::spawn(&argv, folder.path(), &log, &FREE).unwrap();
    let silent = process.wait_qmp(&folder.path().join("qmp.sock"), Duration::from_millis(200)).await;
    process.kill().await.unwrap();
    let Err(ProcessError::NoMonitor { tail, source, .. }) = &silent else { panic!("{silent:?}") };
    assert_eq!(tail, "waiting for nothing");
    assert!(matches!(**source, QmpError::Connect { .. }), "{source:?}");
}

#[tokio::test]
async fn only_the_end_of_a_long_log_is_quoted() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("q.log");
    let text: String = (0..2000).map(|line| format!("line {line}\n")).collect();
    std::fs::write(&log, text).unwrap();
    let process = QemuProcess::adopt(std::process::id(), &log).unwrap();
    let tail = process.log_tail();
    assert!(tail.len() <= 4096 && tail.starts_with("line ") && tail.ends_with("line 1999"), "{tail}");
}

#[tokio::test]
async fn quit_goes_through_the_monitor_or_by_signal() {
    for qemu in qemus() {
        for with_monitor in [true, false] {
            let mut bench = Bench::new(&qemu);
            let layout = bench.layout("a");
            let mut line = bench.guest(&[]);
            line.rewrite_movable(&layout).unwrap();
            let (process, client) = bench.spawn(&line.to_argv(), &layout).await;
            assert_eq!(client.peer_pid(), Some(process.pid()));
            process.quit(with_monitor.then_some(&client), TIMEOUT).await.unwrap();
            tokio::time::timeout(TIMEOUT, client.closed()).await.unwrap();
            assert!(!process.alive());
        }
    }
}

#[tokio::test]
async fn names_and_directories_of_all_kinds_reach_a_real_qemu() {
    for qemu in qemus() {
        for name in ["plain", "two words", "комма, и 100%", "../up/and \"away\"", "a,b=c,,d"] {
            let mut bench = Bench::new(&qemu);
            let mut layout = bench.layout(&format!("{} ,{}", "d".repeat(60), "ä".repeat(30)));
            layout.name = name.to_owned();
            assert!(layout.qmp_socket.as_os_str().len() > vmove_qmp::client::MAX_SOCKET_PATH);
            let original = bench.guest(&["-serial", "file:{vmdir}/serial, log", "-pidfile", "{vmdir}/p,id"]);
            let mut line = original.clone();
            let ram = line.rewrite_movable(&layout).unwrap();
            let (process, client) = bench.spawn(&line.to_argv(), &layout).await;
            let reply = client.execute(qapi::qmp::query_name {}, TIMEOUT).await.unwrap();
            assert_eq!(reply.name.as_deref(), Some(name));
            assert_eq!(std::fs::metadata(&ram[0].path).unwrap().len(), ram[0].size);
            for file in ["serial, log", "p,id"] {
                assert!(layout.vm_dir.join(file).exists(), "{file}");
            }
            // What a running QEMU was started with can be read back, and derived from.
            let read = vmove_qmp::CommandLine::from_proc(process.pid()).unwrap();
            assert_eq!(read.to_argv()[1..], line.to_argv()[1..]);
            process.quit(Some(&client), TIMEOUT).await.unwrap();
        }
    }
}
