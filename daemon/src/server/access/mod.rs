//! Who may do what: the user of the control socket everything, clients with a certificate what their role says, others ask a few questions.

mod audit;
mod bucket;
mod certificate;
mod gate;
mod operations;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use tokio::net::UnixListener;
use tokio::net::unix::UCred;

use crate::config::{Client, ConfigError, Named, read_clients};

pub use self::audit::Audit;
use self::bucket::Bucket;
pub use self::certificate::Certificate;
pub use self::gate::{LARGEST_BODY, admit};
pub(super) use self::gate::{ORIGINS, OUTCOMES};
pub use self::operations::{OPERATIONS, Operation};

/// Where a request comes from.
#[derive(Debug, Clone)]
pub enum Origin {
    /// The control socket, whose mode says who may: the user and process at its other end, as the kernel says.
    Socket(Option<UCred>),
    /// The peer port of a node with TLS, with what was shown.
    Tls(Arc<Certificate>, SocketAddr),
    /// The peer port of a node without TLS.
    Plain(SocketAddr),
}

impl Connected<IncomingStream<'_, UnixListener>> for Origin {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Self::Socket(stream.io().peer_cred().ok())
    }
}

/// A client that the configuration names, and how much it has asked.
#[derive(Debug)]
pub struct Known {
    /// As in the configuration.
    pub client: Client,
    bucket: Bucket,
}

/// Why a certificate opens no session between nodes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotANode {
    /// It is a client's.
    #[error(
        "expected the certificate of a node, found that of the client {named} ({subject}): give it `peer = true` in its [[client]] entry in {place} if it is a node as well"
    )]
    Client {
        /// By which the configuration knows it.
        named: Named,
        /// Of the certificate.
        subject: String,
        /// The configuration.
        place: String,
    },
    /// It says that it is for clients.
    #[error(
        "expected the certificate of a node, found one for clients only ({subject}): the extendedKeyUsage of a node's certificate has serverAuth"
    )]
    ForClientsOnly {
        /// Of the certificate.
        subject: String,
    },
}

/// The clients in force; replaced when the configuration changes and the daemon is told so (SIGHUP).
#[derive(Debug)]
pub struct Access {
    node: String,
    file: Option<PathBuf>,
    tls: bool,
    current: RwLock<Arc<[Arc<Known>]>>,
    audit: Option<Audit>,
}

impl Access {
    /// The clients of a node, as the configuration in `file` says.
    pub fn new(node: &str, file: Option<PathBuf>, tls: bool, clients: Vec<Client>) -> Self {
        Self { node: node.to_owned(), file, tls, current: RwLock::new(known(clients)), audit: None }
    }

    /// The same, with an audit log.
    pub fn with_audit(self, audit: Option<Audit>) -> Self {
        Self { audit, ..self }
    }

    /// Opens the audit log anew, reads the clients again, and says how many there are. On an error the old ones stay.
    ///
    /// # Errors
    /// The configuration cannot be used.
    pub fn reload(&self) -> Result<usize, ConfigError> {
        if let Some(audit) = &self.audit {
            audit.reopen();
        }
        let clients =
            self.file.as_deref().map_or_else(|| Ok(Vec::new()), |file| read_clients(file, self.tls))?;
        let count = clients.len();
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = known(clients);
        Ok(count)
    }

    /// Who has this certificate: the first entry of the configuration that names it.
    pub fn find(&self, certificate: &Certificate) -> Option<Arc<Known>> {
        let clients = self.current.read().unwrap_or_else(PoisonError::into_inner).clone();
        let named = |named: &Named| match named {
            Named::Name(wanted) => certificate.names.iter().any(|name| name.eq_ignore_ascii_case(wanted)),
            Named::Uri(wanted) => certificate.uris.contains(wanted),
        };
        clients.iter().find(|known| named(&known.client.named)).cloned()
    }

    /// Whether a certificate may be that of the other end of a session between nodes, on either side.
    ///
    /// # Errors
    /// [`NotANode`].
    pub fn check_node(&self, certificate: &Certificate) -> Result<(), NotANode> {
        let subject = certificate.subject.clone();
        match self.find(certificate) {
            Some(known) if known.client.peer => Ok(()),
            Some(known) => {
                Err(NotANode::Client { named: known.client.named.clone(), subject, place: self.place() })
            }
            None if certificate.for_clients_only => Err(NotANode::ForClientsOnly { subject }),
            None => Ok(()),
        }
    }

    /// Where the clients are written.
    fn place(&self) -> String {
        let file =
            self.file.as_deref().map_or_else(|| "its configuration (--config)".into(), Path::to_string_lossy);
        format!("{file} of node {}", self.node)
    }
}

fn known(clients: Vec<Client>) -> Arc<[Arc<Known>]> {
    let now = Instant::now();
    clients
        .into_iter()
        .map(|client| Arc::new(Known { bucket: Bucket::new(client.rate, now), client }))
        .collect()
}
