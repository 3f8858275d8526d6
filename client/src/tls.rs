//! Nodes elsewhere, over TLS.

use std::path::PathBuf;

use rustls_pki_types::ServerName;
use vmove_http::client::{Endpoint, HttpClient};
pub use vmove_http::tls::TlsError;
use vmove_http::tls::client_config_with_certificate;

use crate::connection::Connection;
use crate::{ANSWER_TIMEOUT, Client};

/// What a client over TLS shows and trusts. All files are PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain of this client. A `[[client]]` entry of the node says what it may do.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority of the certificates of nodes.
    pub ca: PathBuf,
}

/// Why there is no client over TLS.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The address of the node.
    #[error("expected HOST:PORT, such as node1.example:7420, found \"{0}\"")]
    Address(String),
    /// The name that its certificate should have.
    #[error("expected a DNS name or an address, as in the certificate of the node, found \"{0}\"")]
    ServerName(String),
    /// The files.
    #[error(transparent)]
    Files(#[from] TlsError),
}

impl Client {
    /// A client of the daemon whose peer port is `address` (`host:port`). The certificate of the node must be for that host. A connection is
    /// made with the first request, within 10 s; a host that goes silent is given up after 30 s. The files are read now: after they were
    /// renewed, make a new client.
    ///
    /// ```no_run
    /// # use vmove_client::{Client, TlsFiles};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let files = TlsFiles {
    ///     cert: "/etc/scheduler/scheduler.pem".into(),
    ///     key: "/etc/scheduler/scheduler.key".into(),
    ///     ca: "/etc/scheduler/ca.pem".into(),
    /// };
    /// let node = Client::connect_tls("node1.example:7420", &files)?.node().await?;
    /// println!("{}: {} VMs", node.node, node.vms);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The address is none, or a file cannot be used.
    pub fn connect_tls(address: &str, files: &TlsFiles) -> Result<Self, ConnectError> {
        Self::over_tls(address, files, None)
    }

    /// The same for a node whose certificate is for `name`, such as one that is reached by a forwarded port.
    ///
    /// # Errors
    /// As [`Client::connect_tls`], or `name` is neither a DNS name nor an address.
    pub fn connect_tls_as(address: &str, name: &str, files: &TlsFiles) -> Result<Self, ConnectError> {
        let expected =
            ServerName::try_from(name.to_owned()).map_err(|_| ConnectError::ServerName(name.to_owned()))?;
        Self::over_tls(address, files, Some(expected))
    }

    /// A client of a daemon without TLS (`insecure`), which answers questions only.
    ///
    /// # Errors
    /// The address is none.
    pub fn connect_insecure(address: &str) -> Result<Self, ConnectError> {
        let no_address = || ConnectError::Address(address.to_owned());
        let endpoint: Endpoint = format!("http://{address}").parse().map_err(|_| no_address())?;
        Ok(Self(Connection::of(HttpClient::new(endpoint, ANSWER_TIMEOUT), "vmoved")))
    }

    fn over_tls(
        address: &str,
        files: &TlsFiles,
        name: Option<ServerName<'static>>,
    ) -> Result<Self, ConnectError> {
        let no_address = || ConnectError::Address(address.to_owned());
        let endpoint: Endpoint = format!("https://{address}").parse().map_err(|_| no_address())?;
        if address.starts_with(':') {
            return Err(no_address());
        }
        let tls = client_config_with_certificate(&files.ca, &files.cert, &files.key)?;
        let http = HttpClient::new(endpoint, ANSWER_TIMEOUT).with_tls(Some(tls)).with_server_name(name);
        Ok(Self(Connection::of(http, "vmoved")))
    }
}
