//! A connection whose network is bad: bytes come in crumbs, late, or not at all.
#![allow(missing_docs, clippy::tests_outside_test_module)]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::{
    Kind, Memory, Pair, fabrics, patterned, read_segment, sockets, tcp_pair, whole_read, write_segment,
};
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::{Access, Class, CompletionKind, FabricError, Remedy, ThreadOptions, WrId};

/// What happens to the bytes of one direction.
#[derive(Debug, Clone, Copy)]
struct Rule {
    /// Pieces of up to this many bytes, of varying length.
    piece: usize,
    /// A pause after each piece.
    pause: Duration,
    /// The connection is cut after so many bytes.
    cut_after: u64,
}

const FINE: Rule = Rule { piece: 65_536, pause: Duration::ZERO, cut_after: u64::MAX };

/// Passes bytes from one socket to the other.
fn pass(mut from: TcpStream, mut to: TcpStream, rule: Rule, passed: &AtomicU64) {
    let mut bytes = vec![0; rule.piece];
    let mut seed = 1_usize;
    loop {
        seed = seed.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        let left = rule.cut_after - passed.load(Ordering::Relaxed);
        let most = (1 + (seed >> 16) % rule.piece).min(usize::try_from(left).unwrap_or(usize::MAX));
        let Ok(read) = (if most == 0 { Ok(0) } else { from.read(&mut bytes[..most]) }) else { break };
        if read == 0 || to.write_all(&bytes[..read]).is_err() {
            break;
        }
        passed.fetch_add(read as u64, Ordering::Relaxed);
        if !rule.pause.is_zero() {
            std::thread::sleep(rule.pause);
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// A pair whose bytes go through the rules: first those of the asking side, then those of the asked.
fn through(kind: Kind, asking: Rule, asked: Rule) -> (Pair, Arc<[AtomicU64; 2]>) {
    let (left, near_left) = sockets();
    let (near_right, right) = sockets();
    for socket in [&near_left, &near_right] {
        socket.set_nodelay(true).unwrap();
    }
    let passed = Arc::new([const { AtomicU64::new(0) }; 2]);
    let (a, b) = (near_left.try_clone().unwrap(), near_right.try_clone().unwrap());
    let counter = Arc::clone(&passed);
    std::thread::spawn(move || pass(a, b, asking, &counter[0]));
    let counter = Arc::clone(&passed);
    std::thread::spawn(move || pass(near_right, near_left, asked, &counter[1]));
    let (here, there) = fabrics(kind);
    (tcp_pair(kind, Class::Bulk, (here, left), (there, right)), passed)
}

/// READs with and without zeros, WRITEs and messages in both directions; everything must come out right.
fn exercise(mut pair: Pair) {
    let len = 100_000;
    let access = Access { remote_read: true, remote_write: true };
    let (mine, yours) = (Memory::filled(3 * len, 1), Memory::filled(3 * len, 2));
    yours.write(10_000, &[0; 5000]);
    let ours = mine.register(&*pair.asking.fabric, access);
    let theirs = yours.register(&*pair.asked.fabric, access);
    for round in 0..3 {
        let at = |n: usize| n * 1500;
        let segments: Vec<_> =
            (0..60).map(|n| read_segment(&theirs, at(n), &ours, len + at(n), 1 + n * 25)).collect();
        pair.asking.endpoint.post_read(WrId(round), &segments).unwrap();
        pair.asking
            .endpoint
            .post_write(WrId(round), &[write_segment(&ours, 0, &theirs, len, 30_000)])
            .unwrap();
        pair.asking.endpoint.post_send(WrId(round), &patterned(0, 20_000, 9)).unwrap();
        pair.asked
            .endpoint
            .post_read(WrId(round), &[read_segment(&ours, 0, &theirs, 2 * len, 30_000)])
            .unwrap();
        pair.asked.endpoint.post_send(WrId(round), b"").unwrap();
    }
    let (left, right) = pair.drive(4 * 3, 3 * 3);
    for completion in left.iter().chain(&right) {
        completion.status.unwrap();
        if let CompletionKind::Received(bytes) = &completion.kind {
            assert!(bytes.is_empty() || *bytes == patterned(0, 20_000, 9), "a message differs");
        }
        if let CompletionKind::Read { zero_mask } = completion.kind {
            // Segments 7 to 9 lie inside the zeros.
            assert!(zero_mask == 0 || zero_mask == 0b11 << 7 || zero_mask == 0b111 << 7, "{zero_mask:#b}");
        }
    }
    for n in 0..60 {
        let found = mine.read(len + n * 1500, 1 + n * 25);
        let zero = (7..=9).contains(&n) && found == patterned(len + n * 1500, 1 + n * 25, 1);
        assert!(zero || found == yours.read(n * 1500, 1 + n * 25), "segment {n} differs");
    }
    assert!(yours.read(len, 30_000) == patterned(0, 30_000, 1), "a WRITE brought something else");
    assert!(yours.read(2 * len, 30_000) == patterned(0, 30_000, 1), "a READ brought something else");
}

#[test]
fn crumbs_make_no_difference() {
    for kind in [Kind::Tcp, Kind::Tls] {
        for piece in [1, 7, 40, 700] {
            let crumbs = Rule { piece, ..FINE };
            exercise(through(kind, crumbs, crumbs).0);
        }
    }
}

#[test]
fn delays_make_no_difference() {
    for kind in [Kind::Tcp, Kind::Tls] {
        let slow = Rule { piece: 9000, pause: Duration::from_millis(2), ..FINE };
        exercise(through(kind, slow, FINE).0);
        exercise(through(kind, FINE, slow).0);
    }
}

#[test]
fn a_cut_is_an_error_and_never_half_a_completion() {
    let len = 1 << 20;
    for kind in [Kind::Tcp, Kind::Tls] {
        let mut broke_inside = 0;
        // Where the cut falls: in the first header, in payload, in a trailer, between replies, in the last.
        for cut in [
            0,
            1,
            23,
            24,
            25,
            5000,
            1 << 19,
            len + 23,
            len + 24,
            len + 31,
            len + 32,
            len + 40,
            2 * len,
            4 * len - 1,
        ] {
            // The handshake of TLS takes some bytes before; the sum matters little then.
            let cut_after = cut as u64 + if kind == Kind::Tls { 4000 } else { 0 };
            let (pair, _) = through(kind, FINE, Rule { cut_after, ..FINE });
            let source = Memory::filled(len, 3);
            let target = Memory::new(4 * len);
            let from = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
            let to = target.register(&*pair.asking.fabric, Access::LOCAL);
            let serving = pair.asked.endpoint.serve(ThreadOptions::normal("answers")).unwrap();
            let mut asking = pair.asking;
            for n in 0..4 {
                let segment = read_segment(&from, 0, &to, n * len, len);
                asking.endpoint.post_read(WrId(n as u64), &[segment]).unwrap();
            }
            let (done, error) = asking.fail();
            assert!(done.len() <= cut / len, "{} completions of {cut} bytes", done.len());
            for completion in &done {
                let at = usize::try_from(whole_read(completion).0).unwrap() * len;
                assert!(target.read(at, len) == patterned(0, len, 3), "a completed READ is not complete");
            }
            match error {
                FabricError::PeerGone { outstanding, .. } => {
                    assert_eq!(outstanding, 4 - done.len());
                    broke_inside += 1;
                }
                FabricError::PeerClosed { outstanding } => assert_eq!(outstanding, 4 - done.len()),
                ref other => panic!("cut after {cut}: {other}"),
            }
            assert_eq!(error.remedy(), Remedy::Reconnect);
            drop(serving);
        }
        assert!(broke_inside >= 8, "{broke_inside} cuts inside a frame");
    }
}

#[test]
fn a_cut_of_requests_ends_the_responder_and_changes_nothing_beyond_what_arrived() {
    let len = 1 << 20;
    for cut_after in [10, 47, 48, 49, 4096, len as u64 + 60] {
        let (pair, _) = through(Kind::Tcp, Rule { cut_after, ..FINE }, FINE);
        let source = Memory::filled(len, 3);
        let target = Memory::filled(2 * len, 4);
        let from = source.register(&*pair.asking.fabric, Access::LOCAL);
        let to = target.register(&*pair.asked.fabric, Access::REMOTE_WRITE);
        let serving = pair.asked.endpoint.serve(ThreadOptions::normal("answers")).unwrap();
        let mut asking = pair.asking;
        for n in 0..2 {
            asking.endpoint.post_write(WrId(n), &[write_segment(&from, 0, &to, 0, len)]).unwrap();
        }
        let (done, _) = asking.fail();
        assert!(done.len() <= 1, "{done:?}");
        support::wait_until("the responder noticed", || serving.is_finished());
        assert!(target.read(len, len) == patterned(len, len, 4), "memory beyond the target changed");
    }
}

#[test]
fn a_peer_that_takes_nothing_is_cut_off_after_the_user_timeout() {
    let mut options = TcpOptions::default();
    options.user_timeout = Duration::from_millis(600);
    let fabric = TcpFabric::new(options).unwrap();
    let (here, there) = sockets();
    let mut endpoint = fabric.adopt(here, Class::Bulk).unwrap();
    let source = Memory::filled(16 << 20, 1);
    let from = source.register(&fabric, Access::LOCAL);
    let mut remote = from.remote();
    remote.len = 1 << 30;
    let begin = Instant::now();
    for n in 0..4 {
        let segment = vmove_fabric::WriteSegment {
            local: from.local(0, 16 << 20).unwrap(),
            remote: remote.at(0).unwrap(),
        };
        endpoint.post_write(WrId(n), &[segment]).unwrap();
    }
    let mut found = vmove_fabric::Completions::default();
    let error = loop {
        assert!(begin.elapsed() < support::TIMEOUT, "a dead peer was not noticed");
        match endpoint.poll(&mut found) {
            Ok(_) => endpoint.wait(Some(Duration::from_millis(100))).unwrap(),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, FabricError::PeerGone { outstanding: 4, .. }), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(6), "it took {:?}", begin.elapsed());
    drop(there);
}
