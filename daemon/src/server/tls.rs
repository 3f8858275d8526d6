//! TLS between daemons: both ends show a certificate of the same authority.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::crypto::CryptoProvider;
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::config::TlsFiles;

/// ALPN of the protocol between daemons.
pub const ALPN_VMOVE: &[u8] = b"vmove/1";
/// ALPN of the REST interface on the same port.
pub const ALPN_HTTP: &[u8] = b"http/1.1";

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file is missing or is not what it should be.
    #[error("Could not read the {what} from {path}: {why}")]
    File {
        /// Certificate, key or authority.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The files do not fit each other.
    #[error("The TLS files do not work together ({cert}, {key}, {ca}): {why}")]
    Mismatch {
        /// Certificate chain.
        cert: PathBuf,
        /// Private key.
        key: PathBuf,
        /// Authority.
        ca: PathBuf,
        /// What the TLS library said.
        why: Box<MismatchError>,
    },
}

/// What the TLS library said of files that do not fit each other.
#[derive(Debug, thiserror::Error)]
pub enum MismatchError {
    /// Of the authority by which peers are verified.
    #[error(transparent)]
    Verifier(#[from] VerifierBuilderError),
    /// Of the certificates and the key.
    #[error(transparent)]
    Config(#[from] rustls::Error),
}

/// What both directions need.
#[derive(Debug, Clone)]
pub struct TlsConfigs {
    /// For connections that we open.
    pub client: Arc<ClientConfig>,
    /// For connections that we accept.
    pub server: Arc<ServerConfig>,
}

impl TlsConfigs {
    fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let chain = certificates("certificate chain", &files.cert)?;
        warn_if_others_can_read(&files.key);
        let key = PrivateKeyDer::from_pem_file(&files.key)
            .map_err(|e| file_error("private key", &files.key, &e))?;
        let mut roots = RootCertStore::empty();
        for authority in certificates("certificate authority", &files.ca)? {
            roots.add(authority).map_err(|e| file_error("certificate authority", &files.ca, &e))?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mismatch = |why| TlsError::Mismatch {
            cert: files.cert.clone(),
            key: files.key.clone(),
            ca: files.ca.clone(),
            why: Box::new(why),
        };
        Ok(Self {
            client: client(&provider, &roots, chain.clone(), key.clone_key()).map_err(mismatch)?,
            server: server(&provider, &roots, chain, key).map_err(mismatch)?,
        })
    }
}

fn client(
    provider: &Arc<CryptoProvider>,
    roots: &Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<ClientConfig>, MismatchError> {
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots.clone())
        .with_client_auth_cert(chain, key)?;
    config.alpn_protocols = vec![ALPN_VMOVE.to_vec()];
    // Every connection is long-lived and checked in full.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

fn server(
    provider: &Arc<CryptoProvider>,
    roots: &Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<ServerConfig>, MismatchError> {
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?;
    let mut config = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![ALPN_VMOVE.to_vec(), ALPN_HTTP.to_vec()];
    // Tickets would arrive in the middle of page traffic.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn warn_if_others_can_read(key: &Path) {
    use std::os::unix::fs::MetadataExt;
    if std::fs::metadata(key).is_ok_and(|meta| meta.mode() & 0o077 != 0) {
        tracing::warn!(key = %key.display(), "the private key can be read by others than its owner: chmod 0600");
    }
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(list) if list.is_empty() => Err(TlsError::File {
            what,
            path: path.to_owned(),
            why: "expected PEM with BEGIN CERTIFICATE, found none".to_owned(),
        }),
        Ok(list) => Ok(list),
        Err(error) => Err(file_error(what, path, &error)),
    }
}

fn file_error(what: &'static str, path: &Path, error: &dyn std::error::Error) -> TlsError {
    TlsError::File { what, path: path.to_owned(), why: error.to_string() }
}

/// The configurations in force; replaced when the files change and the daemon is told so (SIGHUP).
#[derive(Debug)]
pub struct Tls {
    files: TlsFiles,
    current: RwLock<TlsConfigs>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        Ok(Self { files: files.clone(), current: RwLock::new(TlsConfigs::load(files)?) })
    }

    /// Reads the files again. Connections that exist are not touched; on an error the old configuration stays.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn reload(&self) -> Result<(), TlsError> {
        let new = TlsConfigs::load(&self.files)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// The configurations for a new connection.
    pub fn configs(&self) -> TlsConfigs {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
