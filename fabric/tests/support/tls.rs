//! Mutual TLS between two sockets, with certificates of the moment.

use std::net::TcpStream;
use std::sync::{Arc, OnceLock};

use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

struct Material {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

fn material() -> &'static Material {
    static MATERIAL: OnceLock<Material> = OnceLock::new();
    MATERIAL.get_or_init(|| {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (server_chain, server_key) = certificate();
        let (client_chain, client_key) = certificate();
        let trust = |chain: &[CertificateDer<'static>]| {
            let mut roots = RootCertStore::empty();
            roots.add(chain[0].clone()).unwrap();
            roots
        };
        let clients =
            rustls::server::WebPkiClientVerifier::builder(Arc::new(trust(&client_chain))).build().unwrap();
        let client = ClientConfig::builder()
            .with_root_certificates(trust(&server_chain))
            .with_client_auth_cert(client_chain, client_key)
            .unwrap();
        let server = ServerConfig::builder()
            .with_client_cert_verifier(clients)
            .with_single_cert(server_chain, server_key)
            .unwrap();
        Material { server: Arc::new(server), client: Arc::new(client) }
    })
}

fn certificate() -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let key = rcgen::KeyPair::generate().unwrap();
    let parameters = rcgen::CertificateParams::new(vec!["fabric.test".to_owned()]).unwrap();
    let certificate = parameters.self_signed(&key).unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    (vec![certificate.der().clone()], key)
}

pub fn connect(mut stream: &TcpStream) -> Connection {
    let name = "fabric.test".try_into().unwrap();
    let mut tls = ClientConnection::new(Arc::clone(&material().client), name).unwrap();
    while tls.is_handshaking() {
        tls.complete_io(&mut stream).unwrap();
    }
    tls.into()
}

pub fn accept(mut stream: &TcpStream) -> Connection {
    let mut tls = ServerConnection::new(Arc::clone(&material().server)).unwrap();
    while tls.is_handshaking() {
        tls.complete_io(&mut stream).unwrap();
    }
    tls.into()
}
