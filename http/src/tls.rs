//! TLS for HTTP: the server shows a certificate, the client checks it against an authority. Who the client is, a token says, or a certificate
//! of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// ALPN of HTTP/1.1, the only version that is spoken here.
const ALPN: &[u8] = b"http/1.1";

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file is missing or is not what it should be.
    #[error("could not read the {what} from {path}: {why}")]
    File {
        /// Certificate chain, private key or authority.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The key is not that of the certificate.
    #[error("the certificate {cert} and the key {key} do not work together: {source}")]
    Mismatch {
        /// Certificate chain.
        cert: PathBuf,
        /// Private key.
        key: PathBuf,
        /// What the TLS library said.
        source: rustls::Error,
    },
    /// The TLS library refuses its own defaults.
    #[error("TLS cannot be set up: {0}")]
    Library(#[from] rustls::Error),
}

/// For a server that shows the certificate chain in `cert`. Both files are PEM.
///
/// # Errors
/// A file cannot be read, or they do not fit.
pub fn server_config(cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let chain = certificates("certificate chain", cert)?;
    let private =
        PrivateKeyDer::from_pem_file(key).map_err(|error| file_error("private key", key, &error))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|source| TlsError::Mismatch { cert: cert.to_owned(), key: key.to_owned(), source })?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// For a client that trusts the authorities in a file, and no others.
///
/// # Errors
/// The file cannot be read, or has no authority.
pub fn client_config(authorities: &Path) -> Result<Arc<ClientConfig>, TlsError> {
    let roots = roots(authorities)?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// The same for a client that also shows the certificate chain in `cert`. All files are PEM.
///
/// # Errors
/// A file cannot be read, or certificate and key do not fit.
pub fn client_config_with_certificate(
    authorities: &Path,
    cert: &Path,
    key: &Path,
) -> Result<Arc<ClientConfig>, TlsError> {
    let roots = roots(authorities)?;
    let chain = certificates("certificate chain", cert)?;
    let private =
        PrivateKeyDer::from_pem_file(key).map_err(|error| file_error("private key", key, &error))?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, private)
        .map_err(|source| TlsError::Mismatch { cert: cert.to_owned(), key: key.to_owned(), source })?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

fn roots(authorities: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in certificates("certificate authority", authorities)? {
        roots.add(authority).map_err(|error| file_error("certificate authority", authorities, &error))?;
    }
    Ok(roots)
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
