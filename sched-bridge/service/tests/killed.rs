//! Nothing is left of a test that is killed: no etcd, no bridge, no daemon and no job of Slurm.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use vmove_bridge::lab::{EtcdServer, SlurmLab, mortal, skip};
use vmove_bridge::slurm::Slurm;

/// Set for the process that is killed.
const VICTIM: &str = "VMOVE_TEST_VICTIM";

/// Starts everything, says where, and waits to be killed.
#[test]
fn victim() {
    if std::env::var_os(VICTIM).is_none() {
        return;
    }
    let (Some(etcd), Some(lab)) = (EtcdServer::start_or_skip(), SlurmLab::start_or_skip(2, 2, 2)) else {
        println!("victim: nothing");
        return;
    };
    let socket = tempfile::tempdir().unwrap().keep();
    let mut bridge = mortal(Path::new(env!("CARGO_BIN_EXE_vbridged")))
        .args(["--store", &format!("etcd:{}", etcd.url()), "--control"])
        .arg(socket.join("c.sock"))
        .spawn()
        .unwrap();
    let slurm = Slurm::new(lab.environment());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        slurm.run(&["sbatch", "--output=/dev/null", "--wrap=sleep 3600"]).await.unwrap();
        while slurm.run(&["squeue", "-h", "-t", "R"]).await.unwrap().trim().is_empty() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let folder = lab.environment().into_iter().find(|(key, _)| key == "SLURM_CONF").unwrap().1;
    println!("\nvictim: {} {} {}", folder.trim_end_matches("/slurm.conf"), etcd.url(), bridge.id());
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
    let words: Vec<&str> = told.split(' ').collect();
    let [folder, etcd, bridge] = words[..] else {
        let _ = victim.wait();
        skip("etcd or Slurm is missing, or this is not root");
        return;
    };
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
