//! What only RDMA has: devices, refusals that end a connection, things that the kernel keeps for us.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmove_fabric::verbs::{VerbsFabric, VerbsOptions};
use vmove_fabric::{
    Access, Class, CompletionKind, Fabric, FabricError, FabricKind, Remedy, RemoteSlice, RemoteStatus, WrId,
};

use crate::support::{
    Kind, Memory, Side2, fabrics, local, pair, pair_of, patterned, read_segment, skip_without_rdma, sockets,
    tls, whole_read,
};

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let mut options = VerbsOptions::default();
    options.device = Some("no_such_device".to_owned());
    let error = VerbsFabric::new(options).unwrap_err();
    assert!(matches!(error, FabricError::NoDevice { .. }), "{error}");
    assert!(error.to_string().contains("no_such_device"), "{error}");
    assert_eq!(error.remedy(), Remedy::OtherFabric);
}

/// Queue pairs, completion queues, memory regions and the like that the kernel holds for programs, as `rdma` lists them:
/// for all programs, since it names the thread that made each, and none where that has ended. So nothing else may use RDMA meanwhile.
fn held() -> usize {
    let count = |kind: &str| {
        let found = std::process::Command::new("rdma").args(["resource", "show", kind]).output().unwrap();
        String::from_utf8_lossy(&found.stdout).lines().filter(|line| !line.contains("comm [")).count()
    };
    ["qp", "cq", "mr", "pd", "ctx"].into_iter().map(count).sum()
}

#[test]
fn a_hundred_sessions_leave_nothing_behind() {
    if skip_without_rdma() {
        return;
    }
    let before = held();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let open = descriptors();
    for round in 0..100 {
        let mut pair = pair(Kind::Verbs, Class::Urgent);
        let memory = Memory::filled(64 << 10, 1);
        let from = memory.register(&*pair.asked.fabric, Access::REMOTE_READ);
        let to = memory.register(&*pair.asking.fabric, Access::LOCAL);
        pair.asking.endpoint.post_read(WrId(1), &[read_segment(&from, 0, &to, 8192, 4096)]).unwrap();
        if round % 2 == 0 {
            let (done, _) = pair.drive(1, 0);
            assert_eq!(whole_read(&done[0]), WrId(1));
            assert!(held() > before, "`rdma resource` lists nothing of this process");
        } // else it goes away with everything under way
    }
    assert_eq!((held(), descriptors()), (before, open));
}

/// Each session has a protection domain: who knows a key and an address of another session still cannot use them.
#[test]
fn a_key_of_one_session_is_refused_on_a_connection_of_another() {
    if skip_without_rdma() {
        return;
    }
    let of_host = || VerbsFabric::new(VerbsOptions::default()).unwrap();
    let (asking, asked) = (of_host(), of_host());
    let side = |fabric: &VerbsFabric, session| Side2::Verbs(fabric.for_session(session).unwrap());
    let mut one = pair_of(Kind::Verbs, Class::Bulk, side(&asking, 1), side(&asked, 1));
    let mut other = pair_of(Kind::Verbs, Class::Bulk, side(&asking, 2), side(&asked, 2));
    let memory = Memory::filled(8192, 1);
    let secret = memory.register(&*one.asked.fabric, Access::REMOTE_READ);
    let to = memory.register(&*one.asking.fabric, Access::LOCAL);
    one.asking.endpoint.post_read(WrId(1), &[read_segment(&secret, 0, &to, 4096, 4096)]).unwrap();
    let (done, _) = one.drive(1, 0);
    assert_eq!(whole_read(&done[0]), WrId(1), "its own session may");
    let to = memory.register(&*other.asking.fabric, Access::LOCAL);
    other.asking.endpoint.post_read(WrId(2), &[read_segment(&secret, 0, &to, 4096, 4096)]).unwrap();
    let (done, _) = other.asking.fail();
    assert_eq!((done.len(), done[0].status), (1, Err(RemoteStatus::Refused)));
    let held = asked.for_session(7).unwrap();
    assert!(Arc::ptr_eq(&held, &asked.for_session(7).unwrap()), "one session has one");
}

#[test]
fn a_refusal_ends_one_connection_only() {
    if skip_without_rdma() {
        return;
    }
    let (left, right) = fabrics(Kind::Verbs);
    let mut good = pair_of(Kind::Verbs, Class::Bulk, left.clone(), right.clone());
    let mut bad = pair_of(Kind::Verbs, Class::Bulk, left, right);
    let memory = Memory::filled(8192, 1);
    let from = memory.register(&*good.asked.fabric, Access::REMOTE_READ);
    let to = memory.register(&*good.asking.fabric, Access::LOCAL);
    let stale = memory.register(&*good.asked.fabric, Access::REMOTE_READ).remote();
    let remote = RemoteSlice { addr: stale.addr, rkey: stale.rkey };
    let segment = vmove_fabric::ReadSegment { remote, local: local(&to, 0, 4096) };
    bad.asking.endpoint.post_read(WrId(1), &[segment]).unwrap();
    let (done, error) = bad.asking.fail();
    assert_eq!((done.len(), done[0].status), (1, Err(RemoteStatus::Refused)));
    assert_eq!(error.remedy(), Remedy::Reconnect, "{error}");
    good.asking.endpoint.post_read(WrId(2), &[read_segment(&from, 0, &to, 4096, 4096)]).unwrap();
    let (done, _) = good.drive(1, 0);
    assert_eq!(whole_read(&done[0]), WrId(2));
}

#[test]
fn queue_pairs_are_introduced_over_tls_too() {
    if skip_without_rdma() {
        return;
    }
    let (Side2::Verbs(left), Side2::Verbs(right)) = fabrics(Kind::Verbs) else { unreachable!() };
    let (here, there) = sockets();
    let (mut asking, mut asked) = std::thread::scope(|scope| {
        let answering = scope.spawn(|| {
            let tls = tls::accept(&there);
            right.adopt_tls(there, tls, Class::Bulk).unwrap()
        });
        let tls = tls::connect(&here);
        let here = left.adopt_tls(here, tls, Class::Bulk).unwrap();
        let there = answering.join().unwrap();
        (
            crate::support::Side::new(Arc::<VerbsFabric>::clone(&left), here),
            crate::support::Side::new(Arc::<VerbsFabric>::clone(&right), there),
        )
    });
    assert_eq!(asking.endpoint.kind(), FabricKind::Verbs);
    let (source, target) = (Memory::filled(1 << 20, 1), Memory::new(1 << 20));
    let from = source.register(&*asked.fabric, Access::REMOTE_READ);
    let to = target.register(&*asking.fabric, Access::LOCAL);
    asking.endpoint.post_read(WrId(1), &[read_segment(&from, 0, &to, 0, 1 << 20)]).unwrap();
    assert_eq!(whole_read(&asking.complete(1)[0]), WrId(1));
    assert!(target.read(0, 1 << 20) == patterned(0, 1 << 20, 1), "memory differs");
    asking.endpoint.post_send(WrId(2), b"secret").unwrap();
    asking.complete(1);
    let CompletionKind::Received(bytes) = asked.complete(1).remove(0).kind else { panic!("no message") };
    assert_eq!(bytes, b"secret".as_slice());
}

#[test]
fn a_thread_that_sleeps_on_the_descriptor_is_woken() {
    if skip_without_rdma() {
        return;
    }
    let mut pair = pair(Kind::Verbs, Class::Bulk);
    let memory = Memory::filled(2 << 20, 1);
    let from = memory.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = memory.register(&*pair.asking.fabric, Access::LOCAL);
    for _ in 0..50 {
        pair.asking.endpoint.post_read(WrId(1), &[read_segment(&from, 0, &to, 1 << 20, 1 << 20)]).unwrap();
        let mut polls = 0;
        while pair.asking.poll().unwrap().is_empty() {
            polls += 1;
            let fd = pair.asking.endpoint.wait_fd().as_raw_fd();
            let mut wait = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one entry, a local that outlives the call.
            #[allow(unsafe_code)]
            let ready = unsafe { libc::poll(&raw mut wait, 1, 20_000) };
            assert_eq!(ready, 1, "nothing woke us");
        }
        assert!(polls < 10, "woken {polls} times for one completion");
    }
}

/// Adopts one end of a connection whose other end is used by hand.
fn adopt_against(hand: impl FnOnce(&mut std::net::TcpStream)) -> FabricError {
    let fabric = VerbsFabric::new(VerbsOptions::default()).unwrap();
    let (here, mut there) = sockets();
    hand(&mut there);
    fabric.adopt(here, Class::Bulk).unwrap_err()
}

#[test]
fn strange_peers_are_told_from_slow_ones() {
    if skip_without_rdma() {
        return;
    }
    let error = adopt_against(|stream| stream.write_all(&[b'x'; 100]).unwrap());
    assert!(matches!(error, FabricError::Protocol { .. }), "{error}");
    let error = adopt_against(|stream| stream.shutdown(std::net::Shutdown::Both).unwrap());
    assert!(matches!(error, FabricError::PeerGone { .. }), "{error}");
    let begin = Instant::now();
    let error = adopt_against(|_| {});
    assert!(matches!(error, FabricError::Timeout { .. }), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[test]
fn sides_that_disagree_on_the_class_do_not_connect() {
    if skip_without_rdma() {
        return;
    }
    let (Side2::Verbs(left), Side2::Verbs(right)) = fabrics(Kind::Verbs) else { unreachable!() };
    let (here, there) = sockets();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| right.adopt(there, Class::Urgent).unwrap_err());
        let error = left.adopt(here, Class::Bulk).unwrap_err();
        assert!(error.to_string().contains("Urgent") && error.to_string().contains("Bulk"), "{error}");
        other.join().unwrap();
    });
    assert_eq!(left.kind(), FabricKind::Verbs);
}
