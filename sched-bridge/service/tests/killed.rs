//! Nothing is left of a test that is killed: no etcd, no bridge, no daemon and no job of Slurm.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use test_servers::{EtcdServer, SlurmCluster, killed_with_this_thread};

/// Set for the process that is killed.
const VICTIM: &str = "VMOVE_TEST_VICTIM";

/// Starts everything, says where, and waits to be killed.
#[test]
fn victim() {
    if std::env::var_os(VICTIM).is_none() {
        return;
    }
    let (etcd, cluster) = match (EtcdServer::start(), SlurmCluster::start(2, 2, 2)) {
        (Ok(etcd), Ok(cluster)) => (etcd, cluster),
        (Err(missing), _) | (_, Err(missing)) => {
            println!("\nvictim: missing: {missing}");
            return;
        }
    };
    let mut bridge = killed_with_this_thread(Path::new(env!("CARGO_BIN_EXE_vbridged")))
        .args(["--store", &format!("etcd:{}", etcd.url()), "--control"])
        .arg(format!("{}/c.sock", cluster.folder()))
        .spawn()
        .unwrap();
    cluster.run(&["sbatch", "--output=/dev/null", "--wrap=sleep 3600"]).unwrap();
    while cluster.run(&["squeue", "-h", "-t", "R"]).unwrap().trim().is_empty() {
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("\nvictim: {} {} {}", cluster.folder(), etcd.url(), bridge.id());
    let _ = bridge.wait();
}

/// Command lines of processes that have these words in command line or environment.
fn with(words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let read = |name: &str| {
            String::from_utf8_lossy(&std::fs::read(entry.path().join(name)).unwrap_or_default())
                .replace('\0', " ")
        };
        let (line, environment) = (read("cmdline"), read("environ"));
        if words.iter().any(|word| line.contains(word) || environment.contains(word)) {
            found.push(format!("{}: {line}", entry.file_name().to_string_lossy()));
        }
    }
    found
}

#[test]
fn nothing_is_left_of_a_test_that_is_killed() {
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["victim", "--exact", "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(victim.stdout.take().unwrap()).lines();
    let told = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("victim: ").map(str::to_owned));
    let told = told.expect("the victim says what it started");
    if let Some(missing) = told.strip_prefix("missing: ") {
        victim.wait().unwrap();
        return vmove_skip::skip!("{missing}");
    }
    let words: Vec<&str> = told.split(' ').collect();
    let [folder, etcd, bridge] = words[..] else { panic!("the victim says: {told}") };
    // munged, slurmctld, two slurmds, slurmstepd and its job, etcd, a bridge (which names etcd).
    let before = with(&[folder, etcd]);
    assert!(before.len() >= 7, "{before:?}");
    assert!(Path::new(&format!("/proc/{bridge}")).exists());
    victim.kill().unwrap();
    victim.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let stepd = || with(&["slurmstepd"]).into_iter().filter(|line| before.contains(line)).collect::<Vec<_>>();
    while !with(&[folder, etcd]).is_empty() || !stepd().is_empty() || Path::new(folder).exists() {
        assert!(Instant::now() < deadline, "left: {:?} {:?}", with(&[folder, etcd]), stepd());
        std::thread::sleep(Duration::from_millis(100));
    }
}
