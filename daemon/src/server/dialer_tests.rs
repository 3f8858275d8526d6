//! Peers of every wrong kind, on loopback.

use std::path::Path;
use std::sync::Mutex;

use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use vmove_node::peer::hello::{MAGIC, answer};
use vmove_node::peer::{LinkKind, PROTOCOL_VERSION, SessionId, Status, Token};

use super::*;
use crate::config::{Client, FabricChoice, Named, Rate, Role, TlsFiles};

fn dialer(tls: Option<Tls>) -> PeerDialer {
    dialer_with(tls, Vec::new())
}

/// One of a node with these clients.
fn dialer_with(tls: Option<Tls>, clients: Vec<Client>) -> PeerDialer {
    let fabrics =
        Fabrics::new(FabricChoice::Tcp, &crate::config::RdmaConfig::default(), Path::new("/nowhere"))
            .unwrap();
    let tls = tls.map(|tls| (Arc::new(tls), Arc::new(Access::new("tester", None, true, clients))));
    PeerDialer::new(tls, &BTreeMap::new(), Arc::new(fabrics))
}

fn hello() -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        kind: LinkKind::Control,
        index: 0,
        session: SessionId::random(),
        token: Token::default(),
        rdma: false,
        node: "tester".to_owned(),
    }
}

fn target(address: impl std::fmt::Display) -> PeerTarget {
    PeerTarget { name: "b".to_owned(), address: address.to_string() }
}

/// A peer that handles one connection with `serve`.
async fn peer<F, R>(serve: F) -> PeerTarget
where
    F: FnOnce(TcpStream) -> R + Send + 'static,
    R: Future<Output = ()> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        serve(stream).await;
    });
    target(address)
}

async fn refused(dialer: &PeerDialer, to: &PeerTarget) -> LinkError {
    match dialer.stream(to, &hello()).await {
        Ok(_) => panic!("{to} was accepted"),
        Err(error) => error,
    }
}

#[tokio::test]
async fn a_welcome_gives_a_stream() {
    let to = peer(|mut stream| async move {
        let got = Hello::read(&mut stream).await.unwrap();
        assert_eq!(got.node, "tester");
        answer(&mut stream, Status::Welcome, "").await.unwrap();
        stream.write_all(b"x").await.unwrap();
    })
    .await;
    let mut stream = dialer(None).stream(&to, &hello()).await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x');
}

#[tokio::test]
async fn a_closed_port_and_a_bad_address_say_what_to_do() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = target(listener.local_addr().unwrap());
    drop(listener);
    let error = refused(&dialer(None), &to).await;
    assert!(matches!(error, LinkError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("is vmoved running there"), "{error}");
    let error = refused(&dialer(None), &target("nowhere")).await.to_string();
    assert!(error.contains("expected host:port"), "{error}");
    let error = refused(&dialer(None), &target("no-such-host.invalid:7420")).await.to_string();
    assert!(error.contains("cannot be resolved"), "{error}");
}

#[tokio::test]
async fn a_web_server_is_not_a_daemon() {
    let to = peer(|mut stream| async move {
        let mut some = [0; 16];
        let _ = stream.read(&mut some).await;
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
    })
    .await;
    let error = refused(&dialer(None), &to).await;
    assert!(error.to_string().contains("Expected a vmove daemon") || is_not_vmove(&error), "{error:?}");
}

#[tokio::test]
async fn a_server_that_hangs_up_is_not_a_daemon() {
    let to = peer(|stream| async move { drop(stream) }).await;
    let error = refused(&dialer(None), &to).await;
    assert!(is_not_vmove(&error), "{error:?}");
}

fn is_not_vmove(error: &LinkError) -> bool {
    matches!(error, LinkError::Hello { source: HelloError::NotVmove, .. })
}

#[tokio::test(start_paused = true)]
async fn a_server_that_says_nothing_is_given_up() {
    let (done, wait) = oneshot::channel::<()>();
    let to = peer(|stream| async move {
        let _ = wait.await;
        drop(stream);
    })
    .await;
    let error = refused(&dialer(None), &to).await.to_string();
    assert!(error.contains("sent no greeting"), "{error}");
    drop(done);
}

#[tokio::test]
async fn another_version_is_told_by_number() {
    let to = peer(|mut stream| async move {
        let mut greeting = vec![0; hello().encode().len()];
        stream.read_exact(&mut greeting).await.unwrap();
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&77_u16.to_le_bytes());
        bytes.extend_from_slice(&[Status::OtherVersion as u8, 0]);
        stream.write_all(&bytes).await.unwrap();
    })
    .await;
    let error = refused(&dialer(None), &to).await;
    assert!(vmove_types::problem::chain(&error).contains("found 77"), "{error:?}");
}

/// An authority and a node certificate of it, for 127.0.0.1, as files.
pub struct TestPki {
    dir: tempfile::TempDir,
}

impl TestPki {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ca_key = rcgen::KeyPair::generate().unwrap();
        let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca_cert = ca.self_signed(&ca_key).unwrap();
        let issuer = rcgen::Issuer::new(ca, ca_key);
        let key = rcgen::KeyPair::generate().unwrap();
        let node = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let cert = node.signed_by(&key, &issuer).unwrap();
        std::fs::write(dir.path().join("ca.pem"), ca_cert.pem()).unwrap();
        std::fs::write(dir.path().join("node.pem"), cert.pem()).unwrap();
        std::fs::write(dir.path().join("node.key"), key.serialize_pem()).unwrap();
        Self { dir }
    }

    pub fn files(&self) -> TlsFiles {
        let path = |name| self.dir.path().join(name);
        TlsFiles { cert: path("node.pem"), key: path("node.key"), ca: path("ca.pem") }
    }

    fn tls(&self) -> Tls {
        Tls::load(&self.files()).unwrap()
    }
}

/// A TLS peer of this authority that welcomes; hands out what it saw.
async fn tls_peer(pki: &TestPki) -> (PeerTarget, Arc<Mutex<Vec<String>>>) {
    let server = pki.tls().configs().server;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let to = peer(move |stream| async move {
        match tokio_rustls::TlsAcceptor::from(server).accept(stream).await {
            Ok(mut stream) => {
                let hello = Hello::read(&mut stream).await.unwrap();
                log.lock().unwrap().push(hello.node);
                answer(&mut stream, Status::Welcome, "").await.unwrap();
            }
            Err(error) => log.lock().unwrap().push(error.to_string()),
        }
    })
    .await;
    (to, seen)
}

#[tokio::test]
async fn two_nodes_of_one_authority_understand_each_other() {
    let pki = TestPki::new();
    let (to, seen) = tls_peer(&pki).await;
    dialer(Some(pki.tls())).stream(&to, &hello()).await.unwrap();
    assert_eq!(*seen.lock().unwrap(), ["tester"]);
}

#[tokio::test]
async fn a_node_of_another_authority_is_refused_by_the_one_that_dials() {
    let (ours, theirs) = (TestPki::new(), TestPki::new());
    let (to, _) = tls_peer(&theirs).await;
    let error = refused(&dialer(Some(ours.tls())), &to).await;
    assert!(matches!(error, LinkError::Tls { .. }), "{error:?}");
    assert!(error.to_string().contains("certificate of the same authority"), "{error}");
}

#[tokio::test]
async fn a_node_of_another_authority_is_refused_by_the_one_that_answers() {
    let (ours, theirs) = (TestPki::new(), TestPki::new());
    // It trusts the peer's authority, but cannot show a certificate of it.
    let mixed = TlsFiles { ca: theirs.files().ca, ..ours.files() };
    let (to, _) = tls_peer(&theirs).await;
    let error = refused(&dialer(Some(Tls::load(&mixed).unwrap())), &to).await;
    assert!(matches!(error, LinkError::Tls { .. }), "{error:?}");
}

#[tokio::test]
async fn a_client_that_poses_as_a_node_gets_no_guest() {
    let pki = TestPki::new();
    let (to, seen) = tls_peer(&pki).await;
    let entry = |peer| Client {
        named: Named::Name("127.0.0.1".to_owned()),
        role: Role::Admin,
        peer,
        rate: Rate { per_second: 1, burst: 1 },
    };
    let error = refused(&dialer_with(Some(pki.tls()), vec![entry(false)]), &to).await;
    assert!(error.to_string().contains("found that of the client 127.0.0.1"), "{error}");
    assert_ne!(*seen.lock().unwrap(), ["tester"], "it is not greeted");
    let (to, _) = tls_peer(&pki).await;
    dialer_with(Some(pki.tls()), vec![entry(true)]).stream(&to, &hello()).await.unwrap();
}

#[tokio::test]
async fn tls_to_a_peer_without_is_said_so() {
    let pki = TestPki::new();
    let to = peer(|mut stream| async move {
        let mut some = [0; 64];
        let _ = stream.read(&mut some).await;
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    })
    .await;
    let error = refused(&dialer(Some(pki.tls())), &to).await.to_string();
    assert!(error.contains("does not speak TLS"), "{error}");
}

#[test]
fn a_missing_or_wrong_tls_file_is_named() {
    let pki = TestPki::new();
    let error = Tls::load(&TlsFiles { key: "/no/such.key".into(), ..pki.files() }).unwrap_err().to_string();
    assert!(error.contains("/no/such.key"), "{error}");
    let error = Tls::load(&TlsFiles { cert: pki.files().key, ..pki.files() }).unwrap_err().to_string();
    assert!(error.contains("BEGIN CERTIFICATE"), "{error}");
    let other = TestPki::new();
    let error = Tls::load(&TlsFiles { key: other.files().key, ..pki.files() }).unwrap_err().to_string();
    assert!(error.contains("do not work together"), "{error}");
}
