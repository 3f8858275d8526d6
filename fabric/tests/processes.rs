//! Two processes, one of which dies.
#![allow(missing_docs, clippy::tests_outside_test_module)]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use support::{Memory, Side, patterned};
use vmove_fabric::local::LocalFabric;
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::{
    Access, Class, Fabric, FabricError, PeerAddress, ReadSegment, Remedy, RemoteRegion, RemoteStatus,
    ThreadOptions, WrId,
};

const ROLE: &str = "VMOVE_FABRIC_TEST_PEER";
const LEN: usize = 8 << 20;

/// Not a test but what the other process runs: registers memory, says where it is, serves until told otherwise.
#[test]
fn the_peer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let memory = Memory::filled(LEN, 5);
    let (fabric, address): (Box<dyn Fabric>, String) = match role.strip_prefix("local:") {
        Some(path) => (Box::new(LocalFabric::bind(path.as_ref()).unwrap()), path.to_owned()),
        None => {
            let fabric = TcpFabric::bind(([127, 0, 0, 1], 0).into(), TcpOptions::default()).unwrap();
            let address = fabric.local_addr().unwrap().to_string();
            (Box::new(fabric), address)
        }
    };
    let region = memory.register(&*fabric, Access::REMOTE_READ);
    let RemoteRegion { addr, len, rkey } = region.remote();
    println!("\nPEER {addr} {len} {rkey} {address}");
    std::io::stdout().flush().unwrap();
    let incoming = fabric.accept(Duration::from_secs(30)).unwrap();
    let serving = incoming.endpoint.serve(ThreadOptions::normal("answers")).unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    assert!(matches!(line.as_str(), "deregister\n" | ""), "{line}");
    drop(region);
    drop(memory);
    println!("PEER deregistered");
    let _ = std::io::stdin().lines().count();
    drop(serving);
    std::process::exit(0);
}

struct Peer {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    side: Side,
    region: RemoteRegion,
    _folder: tempfile::TempDir,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn peer(local: bool) -> Peer {
    let folder = tempfile::tempdir().unwrap();
    let role =
        if local { format!("local:{}", folder.path().join("socket").display()) } else { "tcp".to_owned() };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["the_peer", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = said(&mut lines);
    let mut words = line.splitn(4, ' ');
    let mut number = || words.next().unwrap().parse::<u64>().unwrap();
    let region = RemoteRegion { addr: number(), len: number(), rkey: number() };
    let address = words.next().unwrap();
    let (fabric, address): (Arc<dyn Fabric>, _) = if local {
        (Arc::new(LocalFabric::new().unwrap()), PeerAddress::Unix(address.into()))
    } else {
        (Arc::new(TcpFabric::new(TcpOptions::default()).unwrap()), PeerAddress::Tcp(address.parse().unwrap()))
    };
    let endpoint = fabric.connect(&address, Class::Bulk, b"").unwrap();
    Peer { child, lines, side: Side::new(fabric, endpoint), region, _folder: folder }
}

/// The next line that is meant for this process.
fn said(lines: &mut std::io::Lines<BufReader<std::process::ChildStdout>>) -> String {
    lines
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("PEER ").map(str::to_owned))
        .expect("the peer speaks")
}

fn killed_while_it_is_read(local: bool) {
    let mut peer = peer(local);
    let target = Memory::new(LEN);
    let to = target.register(&*peer.side.fabric, Access::LOCAL);
    let mut killed = false;
    let mut good = 0;
    let error = loop {
        while peer.side.endpoint.outstanding() < 4 {
            let local = to.local(0, u32::try_from(LEN).unwrap()).unwrap();
            let segment = ReadSegment { remote: peer.region.at(0).unwrap(), local };
            if peer.side.endpoint.post_read(WrId(1), &[segment]).is_err() {
                break;
            }
        }
        match peer.side.poll() {
            Ok(found) if found.is_empty() => {
                peer.side.endpoint.wait(Some(Duration::from_millis(50))).unwrap();
            }
            Ok(found) => {
                for completion in &found {
                    completion.status.unwrap();
                    good += 1;
                }
                if good == 1 {
                    assert!(target.read(0, LEN) == patterned(0, LEN, 5), "memory differs");
                }
            }
            Err(error) => break error,
        }
        if good > 10 && !killed {
            peer.child.kill().unwrap();
            killed = true;
        }
    };
    assert!(killed);
    match error {
        FabricError::PeerClosed { outstanding } | FabricError::PeerGone { outstanding, .. } => {
            assert!((1..=4).contains(&outstanding), "{error}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(error.remedy(), Remedy::Reconnect);
}

#[test]
fn a_killed_peer_is_an_error_tcp() {
    killed_while_it_is_read(false);
}

#[test]
fn a_killed_peer_is_an_error_local() {
    killed_while_it_is_read(true);
}

fn memory_of_the_other_process_vanishes(local: bool) {
    let mut peer = peer(local);
    let target = Memory::new(LEN);
    let to = target.register(&*peer.side.fabric, Access::LOCAL);
    let (mut good, mut told) = (0, false);
    loop {
        let local = to.local(0, u32::try_from(LEN).unwrap()).unwrap();
        let segment = ReadSegment { remote: peer.region.at(0).unwrap(), local };
        peer.side.endpoint.post_read(WrId(1), &[segment]).unwrap();
        match peer.side.complete(1)[0].status {
            Ok(()) => {
                assert!(target.read(0, LEN) == patterned(0, LEN, 5), "a READ that succeeded is not whole");
                good += 1;
            }
            Err(status) => {
                assert_eq!(status, RemoteStatus::BadKey);
                break;
            }
        }
        if good == 3 && !told {
            writeln!(peer.child.stdin.as_mut().unwrap(), "deregister").unwrap();
            told = true;
        }
    }
    assert!(told);
    assert_eq!(said(&mut peer.lines), "deregistered");
}

#[test]
fn deregistration_reaches_another_process_tcp() {
    memory_of_the_other_process_vanishes(false);
}

#[test]
fn deregistration_reaches_another_process_local() {
    memory_of_the_other_process_vanishes(true);
}

#[test]
fn a_stopped_peer_does_not_keep_memory_registered_for_ever() {
    // The peer of a local fabric holds a shared table; if it is stopped in the middle, dropping a region must return.
    let mut peer = peer(true);
    let memory = Memory::filled(LEN, 1);
    let region = memory.register(&*peer.side.fabric, Access::REMOTE_READ);
    let pid = rustix::process::Pid::from_child(&peer.child);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let begin = std::time::Instant::now();
    drop(region);
    assert!(begin.elapsed() < Duration::from_secs(5), "it took {:?}", begin.elapsed());
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    peer.side.poll().unwrap();
}
