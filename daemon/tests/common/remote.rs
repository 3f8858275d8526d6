//! A client of the peer port, with a certificate.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;

use super::Shown;

/// A connection over TLS.
pub struct Remote(StreamOwned<ClientConnection, TcpStream>);

/// What was answered.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The code of the problem, or nothing.
    pub fn code(&self) -> String {
        serde_json::from_str::<Value>(&self.body)
            .ok()
            .and_then(|v| v["code"].as_str().map(str::to_owned))
            .unwrap_or_default()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}

impl Remote {
    /// Connects. The handshake is made with the first bytes.
    pub fn connect(to: SocketAddr, shown: &Shown, protocol: &str) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&shown.ca).unwrap()).unwrap();
        let chain = vec![CertificateDer::from_pem_file(&shown.cert).unwrap()];
        let key = PrivateKeyDer::from_pem_file(&shown.key).unwrap();
        let mut config =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_client_auth_cert(chain, key)
                .unwrap();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let name = ServerName::try_from(to.ip().to_string()).unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let stream = TcpStream::connect(to).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        Self(StreamOwned::new(connection, stream))
    }

    pub fn http(to: SocketAddr, shown: &Shown) -> Self {
        Self::connect(to, shown, "http/1.1")
    }

    /// One request; the connection is kept.
    pub fn try_ask(&mut self, method: &str, path: &str, body: &str) -> std::io::Result<Answer> {
        let length = body.len();
        let kind = "Content-Type: application/json";
        write!(
            self.0,
            "{method} {path} HTTP/1.1\r\nHost: x\r\n{kind}\r\nContent-Length: {length}\r\n\r\n{body}"
        )?;
        self.0.flush()?;
        let mut text = Vec::new();
        let end = loop {
            if let Some(end) = text.windows(4).position(|four| four == b"\r\n\r\n") {
                break end;
            }
            self.more(&mut text)?;
        };
        let head = String::from_utf8_lossy(&text[..end]).into_owned();
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap();
        let mut answer = Answer { status, head, body: String::new() };
        let length = answer.header("content-length").and_then(|n| n.parse::<usize>().ok()).unwrap_or(0);
        while text.len() < end + 4 + length {
            self.more(&mut text)?;
        }
        answer.body = String::from_utf8_lossy(&text[end + 4..]).into_owned();
        Ok(answer)
    }

    #[track_caller]
    pub fn ask(&mut self, method: &str, path: &str, body: &str) -> Answer {
        self.try_ask(method, path, body).unwrap_or_else(|error| panic!("{method} {path}: {error}"))
    }

    /// Sends bytes and takes all that comes until the end.
    pub fn say(&mut self, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
        self.0.write_all(bytes)?;
        self.0.flush()?;
        let mut answer = Vec::new();
        match self.0.read_to_end(&mut answer) {
            Ok(_) => Ok(answer),
            Err(_) if !answer.is_empty() => Ok(answer),
            Err(error) => Err(error),
        }
    }

    fn more(&mut self, text: &mut Vec<u8>) -> std::io::Result<()> {
        let mut some = [0; 4096];
        match self.0.read(&mut some)? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            read => {
                text.extend_from_slice(&some[..read]);
                Ok(())
            }
        }
    }
}
