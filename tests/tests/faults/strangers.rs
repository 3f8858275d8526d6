//! Strangers at the peer port: hundreds of connections that say nothing keep no peer out.
#![cfg(test)]

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::TcpSocket;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{SLOW, Scene, ready};

/// More than the daemon has places.
const STRANGERS: usize = 600;
/// Silent connections are closed after 10 s. What succeeds before that did not wait for it.
const AT_ONCE: Duration = Duration::from_secs(5);

/// Opens `count` connections to `to`, from the addresses of `from` in turn, and says nothing on them.
fn silent(to: SocketAddr, from: &[Ipv4Addr], count: usize) -> Vec<TcpStream> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, most, most).expect("all that are allowed");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
    let one = async |number: usize| {
        let socket = TcpSocket::new_v4()?;
        socket.bind((from[number % from.len()], 0).into())?;
        let stream = socket.connect(to).await?.into_std()?;
        stream.set_nonblocking(false)?;
        Ok::<_, std::io::Error>(stream)
    };
    (0..count).map(|number| runtime.block_on(one(number)).expect("a connection")).collect()
}

/// How many of these connections the daemon has closed.
fn closed(connections: &mut [TcpStream]) -> usize {
    let is_closed = |stream: &mut TcpStream| {
        stream.set_nonblocking(true).expect("a socket");
        !stream.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    connections.iter_mut().map(is_closed).filter(|closed| *closed).count()
}

fn addresses(count: u8) -> Vec<Ipv4Addr> {
    (1..=count).map(|last| Ipv4Addr::new(127, 0, 0, last)).collect()
}

/// The strangers share the peer's address, or have many others, or both.
#[test]
fn silent_strangers_keep_no_migration_out() {
    need!(ready());
    for from in [addresses(1), addresses(200)] {
        let scene = Scene::new().expect("a guest");
        let mut strangers = silent(scene.b.listen(), &from, STRANGERS);
        let began = Instant::now();
        scene.a.ask(&["check", "guest", "--to", "b"]).expect("the peer is greeted");
        assert!(began.elapsed() < AT_ONCE, "the greeting took {:?}", began.elapsed());
        let end = scene.migrate_to("b", &["--mode", "postcopy"]).expect("it ends");
        assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
        let closed = closed(&mut strangers);
        assert!(closed >= STRANGERS - 512, "{closed} of {STRANGERS} silent connections had to leave");
        assert!(scene.b.log().contains("that have not greeted"), "{}", scene.b.log());
        scene.arrived().expect("the guest is whole");
    }
}

/// Connections that are cut in post-copy are made anew while strangers hold all places and come again and again.
#[test]
fn silent_strangers_keep_no_session_from_connecting_again() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let id = scene.start(&["--mode", "postcopy", "--bandwidth", SLOW]).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    let mut strangers = silent(scene.b.listen(), &addresses(200), STRANGERS);
    scene.proxy().expect("a proxy").cut_all();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        strangers.extend(silent(scene.b.listen(), &addresses(50), 50));
        std::thread::sleep(Duration::from_millis(100));
    }
    let state = || scene.a.ask(&["status", &id]).expect("an answer")["outcome"]["state"].clone();
    while state() == "reconnecting" {
        assert!(began.elapsed() < AT_ONCE, "not connected again after {:?}", began.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    assert!(end.answer["recoveries"].as_u64() >= Some(1), "nothing was cut: {}", end.answer);
    scene.arrived().expect("the guest is whole");
}

/// Questions over HTTP have places of their own: those that never end are closed when others come, and peers are not affected.
#[test]
fn open_http_connections_keep_nobody_out() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let mut asking = silent(node.listen(), &addresses(10), 300);
    for stream in &mut asking {
        std::io::Write::write_all(stream, b"GET /v1/node HTTP/1.1\r\n").expect("half a question");
    }
    let began = Instant::now();
    let mut last = TcpStream::connect(node.listen()).expect("connects");
    std::io::Write::write_all(&mut last, b"GET /healthz HTTP/1.0\r\n\r\n").expect("a question");
    let mut answer = String::new();
    last.read_to_string(&mut answer).expect("an answer");
    assert!(answer.ends_with("ok\n"), "{answer}");
    assert!(began.elapsed() < AT_ONCE, "the answer took {:?}", began.elapsed());
    while closed(&mut asking) < 300 - 256 {
        assert!(began.elapsed() < AT_ONCE, "{} of 300 had to leave", closed(&mut asking));
        std::thread::sleep(Duration::from_millis(20));
    }
}
