//! Mutual TLS for the benchmark: one certificate of the moment, which both processes present and trust.

use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// What both sides have.
pub struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    trusted: Arc<RootCertStore>,
}

impl Identity {
    /// Makes a certificate and leaves it in the folder for the peer.
    pub fn create(folder: &Path) -> Outcome<Self> {
        let key = rcgen::KeyPair::generate()?;
        let certificate =
            rcgen::CertificateParams::new(vec!["fabric.bench".to_owned()])?.self_signed(&key)?;
        std::fs::write(folder.join("certificate"), certificate.der())?;
        std::fs::write(folder.join("key"), key.serialize_der())?;
        Self::load(folder)
    }

    /// Reads what [`create`](Self::create) left.
    pub fn load(folder: &Path) -> Outcome<Self> {
        let certificate = CertificateDer::from(std::fs::read(folder.join("certificate"))?);
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(std::fs::read(folder.join("key"))?));
        let mut trusted = RootCertStore::empty();
        trusted.add(certificate.clone())?;
        Ok(Self { chain: vec![certificate], key, trusted: Arc::new(trusted) })
    }

    /// The handshake of the side that connects.
    pub fn connect(&self, mut stream: &TcpStream) -> Outcome<Connection> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(Arc::clone(&self.trusted))
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())?;
        let mut tls = ClientConnection::new(Arc::new(config), "fabric.bench".try_into()?)?;
        while tls.is_handshaking() {
            tls.complete_io(&mut stream)?;
        }
        Ok(tls.into())
    }

    /// The handshake of the side that accepts.
    pub fn accept(&self, mut stream: &TcpStream) -> Outcome<Connection> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let clients = rustls::server::WebPkiClientVerifier::builder_with_provider(
            Arc::clone(&self.trusted),
            Arc::clone(&provider),
        )
        .build()?;
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(clients)
            .with_single_cert(self.chain.clone(), self.key.clone_key())?;
        let mut tls = ServerConnection::new(Arc::new(config))?;
        while tls.is_handshaking() {
            tls.complete_io(&mut stream)?;
        }
        Ok(tls.into())
    }
}
