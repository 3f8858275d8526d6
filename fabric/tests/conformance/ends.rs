//! How connections begin and end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmove_fabric::local::LocalFabric;
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
#[cfg(feature = "verbs")]
use vmove_fabric::verbs::{VerbsFabric, VerbsOptions};
use vmove_fabric::{
    Access, Class, CompletionKind, Fabric, FabricError, FabricKind, PeerAddress, PostError, Remedy,
    ThreadOptions, WrId,
};

use crate::support::{Kind, Memory, Side, pair, patterned, read_segment, wait_until, whole_read};

on_every_fabric! {
    an_orderly_end_is_told_from_a_loss
    what_was_sent_before_the_end_arrives
    a_served_connection_ends_with_its_handle
    a_message_ends_a_served_connection
    a_failed_connection_refuses_posts
}

fn an_orderly_end_is_told_from_a_loss(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let source = Memory::filled(1 << 20, 1);
    let target = Memory::new(1 << 20);
    let from = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    let asked = pair.asked.endpoint;
    drop(asked);
    for n in 0..3 {
        pair.asking.endpoint.post_read(WrId(n), &[read_segment(&from, 0, &to, 0, 1 << 20)]).unwrap();
    }
    let (done, error) = pair.asking.fail();
    assert!(done.is_empty(), "{done:?}");
    match error {
        FabricError::PeerClosed { outstanding } | FabricError::PeerGone { outstanding, .. } => {
            assert_eq!(outstanding, 3);
        }
        other => panic!("{other}"),
    }
    assert_eq!(error.remedy(), Remedy::Reconnect);
    assert!(target.read(0, 1 << 20) == vec![0; 1 << 20], "bytes came from nowhere");
}

fn what_was_sent_before_the_end_arrives(kind: Kind) {
    let mut pair = pair(kind, Class::Message);
    for n in 0..100_u64 {
        pair.asking.endpoint.post_send(WrId(n), &patterned(0, 1000, u8::try_from(n).unwrap())).unwrap();
    }
    // Something that the side that ends never takes in.
    pair.asked.endpoint.post_send(WrId(0), &[0; 5000]).unwrap();
    pair.asked.endpoint.flush().unwrap();
    drop(pair.asking.endpoint);
    let (mut done, error) = pair.asked.fail();
    done.retain(|completion| completion.kind != CompletionKind::Send);
    assert_eq!(done.len(), 100);
    for (n, completion) in done.iter().enumerate() {
        let CompletionKind::Received(bytes) = &completion.kind else { panic!("{completion:?}") };
        assert!(*bytes == patterned(0, 1000, u8::try_from(n).unwrap()));
    }
    assert!(matches!(error, FabricError::PeerClosed { outstanding: 0 }), "{error}");
}

fn a_served_connection_ends_with_its_handle(kind: Kind) {
    let pair = pair(kind, Class::Urgent);
    let source = Memory::filled(1 << 20, 1);
    let target = Memory::new(1 << 20);
    let from = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let mut asking = pair.asking;
    let to = target.register(&*asking.fabric, Access::LOCAL);
    let serving = pair.asked.endpoint.serve(ThreadOptions::urgent("answers")).unwrap();
    asking.endpoint.post_read(WrId(1), &[read_segment(&from, 0, &to, 0, 4096)]).unwrap();
    assert_eq!(whole_read(&asking.complete(1)[0]), WrId(1));
    assert!(!serving.is_finished() && serving.error().is_none());
    wait_until("the thread says how it is scheduled", || serving.sched().is_some());
    if kind.answers_by_program() {
        assert_eq!(serving.counters().reads_served, 1);
    }
    let begin = Instant::now();
    drop(serving);
    assert!(begin.elapsed() < Duration::from_secs(2), "ending took {:?}", begin.elapsed());
    let (_, error) = asking.fail();
    assert_eq!(error.remedy(), Remedy::Reconnect, "{error}");
}

fn a_message_ends_a_served_connection(kind: Kind) {
    let pair = pair(kind, Class::Bulk);
    let mut asking = pair.asking;
    let serving = pair.asked.endpoint.serve(ThreadOptions::normal("answers")).unwrap();
    asking.endpoint.post_send(WrId(1), b"anybody there?").unwrap();
    let (_, error) = asking.fail();
    assert_eq!(error.remedy(), Remedy::Reconnect, "{error}");
    wait_until("the connection has ended", || serving.is_finished());
    let error = serving.error().expect("an error");
    assert!(error.to_string().contains("only answers"), "{error}");
}

fn a_failed_connection_refuses_posts(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    drop(pair.asked.endpoint);
    pair.asking.fail();
    assert_eq!(pair.asking.endpoint.post_send(WrId(1), b"x"), Err(PostError::Dead));
    pair.asking.poll().expect_err("failed for good");
    assert!(!pair.asking.endpoint.wants_write());
}

/// A fabric that listens, and its address.
fn listening(kind: FabricKind) -> (Arc<dyn Fabric>, PeerAddress, Option<tempfile::TempDir>) {
    #[cfg(feature = "verbs")]
    if kind == FabricKind::Verbs {
        let fabric = VerbsFabric::bind(([127, 0, 0, 1], 0).into(), VerbsOptions::default()).unwrap();
        let address = fabric.local_addr().unwrap();
        return (Arc::new(fabric), PeerAddress::Tcp(address), None);
    }
    if kind == FabricKind::Local {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a socket");
        (Arc::new(LocalFabric::bind(&path).unwrap()), PeerAddress::Unix(path), Some(folder))
    } else {
        let fabric = TcpFabric::bind(([127, 0, 0, 1], 0).into(), TcpOptions::default()).unwrap();
        let address = fabric.local_addr().unwrap();
        (Arc::new(fabric), PeerAddress::Tcp(address), None)
    }
}

fn dialling(kind: FabricKind) -> Arc<dyn Fabric> {
    #[cfg(feature = "verbs")]
    if kind == FabricKind::Verbs {
        return Arc::new(VerbsFabric::new(VerbsOptions::default()).unwrap());
    }
    if kind == FabricKind::Local {
        Arc::new(LocalFabric::new().unwrap())
    } else {
        Arc::new(TcpFabric::new(TcpOptions::default()).unwrap())
    }
}

fn dial_and_accept(kind: FabricKind) {
    let (fabric, address, _folder) = listening(kind);
    let dialler = dialling(kind);
    let error = fabric.accept(Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, FabricError::Timeout { .. }), "{error}");
    let (mut here, mut there) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| fabric.accept(Duration::from_secs(10)).unwrap());
        let endpoint = dialler.connect(&address, Class::Urgent, b"\xffwho calls").unwrap();
        let incoming = accepting.join().unwrap();
        assert_eq!(
            (incoming.class, incoming.greeting.as_slice()),
            (Class::Urgent, b"\xffwho calls".as_slice())
        );
        assert_eq!((endpoint.class(), endpoint.kind()), (Class::Urgent, kind));
        (Side::new(Arc::clone(&dialler), endpoint), Side::new(Arc::clone(&fabric), incoming.endpoint))
    });
    here.endpoint.post_send(WrId(1), b"first").unwrap();
    here.complete(1);
    let CompletionKind::Received(bytes) = there.complete(1).remove(0).kind else { panic!("no message") };
    assert_eq!(bytes, b"first".as_slice());
    let error = dialler.accept(Duration::ZERO).unwrap_err();
    assert!(matches!(error, FabricError::Unsupported { .. }), "{error}");
    let error = dialler.connect(&address, Class::Bulk, &[0; 5000]).unwrap_err();
    assert!(error.to_string().contains("5000"), "{error}");
}

#[test]
fn tcp_dials_and_accepts() {
    dial_and_accept(FabricKind::Tcp);
}

#[cfg(feature = "verbs")]
#[test]
fn verbs_dials_and_accepts() {
    if !crate::support::skip_without_rdma() {
        dial_and_accept(FabricKind::Verbs);
    }
}

#[test]
fn local_dials_and_accepts() {
    dial_and_accept(FabricKind::Local);
}

#[test]
fn nobody_and_the_wrong_kind_are_refused() {
    let tcp = dialling(FabricKind::Tcp);
    let local = dialling(FabricKind::Local);
    let nobody = PeerAddress::Tcp(([127, 0, 0, 1], 1).into());
    let nowhere = PeerAddress::Unix("/nonexistent/socket".into());
    for (fabric, own, other) in [(&tcp, &nobody, &nowhere), (&local, &nowhere, &nobody)] {
        let error = fabric.connect(own, Class::Bulk, b"").unwrap_err();
        assert_eq!(error.remedy(), Remedy::Reconnect, "{error}");
        assert!(error.to_string().contains(&own.to_string()), "{error}");
        let error = fabric.connect(other, Class::Bulk, b"").unwrap_err();
        assert_eq!(error.remedy(), Remedy::OtherFabric, "{error}");
    }
}

#[test]
fn strangers_do_not_keep_a_friend_out() {
    for kind in [FabricKind::Tcp, FabricKind::Local] {
        let (fabric, address, _folder) = listening(kind);
        let stranger = |bytes: &'static [u8]| -> Box<dyn std::any::Any> {
            use std::io::Write;
            match &address {
                PeerAddress::Tcp(address) => {
                    let mut stream = std::net::TcpStream::connect(address).unwrap();
                    stream.write_all(bytes).unwrap();
                    Box::new(stream)
                }
                PeerAddress::Unix(path) => {
                    let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
                    stream.write_all(bytes).unwrap();
                    Box::new(stream)
                }
                _ => panic!("unknown address"),
            }
        };
        // One talks of something else, one says nothing, one hangs up.
        let _web = stranger(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n");
        let _silent = stranger(b"");
        drop(stranger(b"vm"));
        let dialler = dialling(kind);
        std::thread::scope(|scope| {
            let accepting = scope.spawn(|| fabric.accept(Duration::from_secs(10)).unwrap());
            let endpoint = dialler.connect(&address, Class::Bulk, b"friend").unwrap();
            assert_eq!(accepting.join().unwrap().greeting, b"friend");
            drop(endpoint);
        });
    }
}
