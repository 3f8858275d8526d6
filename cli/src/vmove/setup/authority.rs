//! An authority, and the certificates that it signs.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::args::setup::{ClientWanted, NodeWanted};

/// Certificates hold from this long ago on: clocks of nodes differ.
const EARLIER: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// How long an authority holds, unless its certificates hold longer.
const AUTHORITY_DAYS: u32 = 3650;

/// Why there is no authority, or no certificate.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A file cannot be read.
    #[error("could not read {path}: {source}; --ca names the folder with ca.pem and ca.key of an authority")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The key is none.
    #[error(
        "{path} has no private key that can be used ({why}); expected PEM with BEGIN PRIVATE KEY, as `openssl pkcs8 -topk8 -nocrypt` writes it"
    )]
    Key { path: PathBuf, why: rcgen::Error },
    /// There is no certificate in the file.
    #[error("{path} has no certificate that can be read; expected PEM with BEGIN CERTIFICATE")]
    Certificate { path: PathBuf },
    /// The key is another's.
    #[error("{key} is not the key of a certificate in {cert}; expected those of one authority")]
    Foreign { key: PathBuf, cert: PathBuf },
    /// It may sign nothing.
    #[error(
        "the certificate in {path} is no authority's: it may not sign others; make an authority without --ca"
    )]
    NoAuthority { path: PathBuf },
    /// It has ended, or has not begun.
    #[error("the authority in {path} holds from {from} to {to}, and not now; make a new one without --ca")]
    NotNow { path: PathBuf, from: String, to: String },
    /// Certificates would outlive it.
    #[error(
        "the authority in {path} ends in {left} days, and certificates cannot hold longer, found --days {days}; give --days {left}, or make a new authority without --ca"
    )]
    TooLong { path: PathBuf, left: u64, days: u32 },
    /// The library.
    #[error("could not make a certificate: {0}")]
    Make(#[from] rcgen::Error),
}

/// Certificate and key of somebody. PEM.
#[derive(Debug)]
pub struct Issued {
    pub cert: String,
    pub key: String,
}

/// An authority that can sign.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its certificate, and others that were in the file with it: what nodes and clients are to trust. PEM.
    pub cert: String,
    /// Its key, if it is new. PEM.
    pub new_key: Option<String>,
}

impl Authority {
    /// A new one, which holds as long as certificates of `days` do.
    pub fn make(days: u32) -> Result<Self, AuthorityError> {
        let mut params = CertificateParams::new(Vec::new())?;
        // OpenSSL takes a certificate for self-signed whose issuer has the same name: no node is called so.
        params.distinguished_name = common_name("vmove authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        hold(&mut params, days.max(AUTHORITY_DAYS));
        let key = KeyPair::generate()?;
        let cert = params.self_signed(&key)?.pem();
        let new_key = Some(key.serialize_pem());
        Ok(Self { issuer: Issuer::new(params, key), cert, new_key })
    }

    /// The one in this folder, if certificates of `days` would hold.
    pub fn open(folder: &Path, days: u32) -> Result<Self, AuthorityError> {
        let (cert_path, key_path) = (folder.join("ca.pem"), folder.join("ca.key"));
        let read = |path: &Path| {
            let failed = |source| AuthorityError::Read { path: path.to_owned(), source };
            std::fs::read_to_string(path).map_err(failed)
        };
        let (cert, key) = (read(&cert_path)?, read(&key_path)?);
        let key =
            KeyPair::from_pem(&key).map_err(|why| AuthorityError::Key { path: key_path.clone(), why })?;
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(cert.as_bytes()).collect();
        let found = found.ok().filter(|found| !found.is_empty());
        let found = found.ok_or_else(|| AuthorityError::Certificate { path: cert_path.clone() })?;
        // Of an authority that is being replaced there are two.
        let of_key = |der: &&CertificateDer<'_>| {
            let public = key.subject_public_key_info();
            X509Certificate::from_der(der).is_ok_and(|(_, own)| own.public_key().raw == public)
        };
        let own = found
            .iter()
            .find(of_key)
            .ok_or_else(|| AuthorityError::Foreign { key: key_path.clone(), cert: cert_path.clone() })?;
        check(own, &cert_path, days)?;
        Ok(Self { issuer: Issuer::from_ca_cert_der(own, key)?, cert, new_key: None })
    }

    /// A certificate with which a node takes and makes connections.
    pub fn node(&self, node: &NodeWanted, days: u32) -> Result<Issued, AuthorityError> {
        use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        self.sign(node.subject_names(), &node.name, vec![ServerAuth, ClientAuth], days)
    }

    /// A certificate that opens no session between nodes.
    pub fn client(&self, client: &ClientWanted, days: u32) -> Result<Issued, AuthorityError> {
        self.sign(Vec::new(), &client.name, vec![ExtendedKeyUsagePurpose::ClientAuth], days)
    }

    fn sign(
        &self,
        names: Vec<String>,
        name: &str,
        purpose: Vec<ExtendedKeyUsagePurpose>,
        days: u32,
    ) -> Result<Issued, AuthorityError> {
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name = common_name(name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = purpose;
        params.use_authority_key_identifier_extension = true;
        hold(&mut params, days);
        let key = KeyPair::generate()?;
        Ok(Issued { cert: params.signed_by(&key, &self.issuer)?.pem(), key: key.serialize_pem() })
    }
}

/// Whether the certificate of an authority can sign others that hold for `days`.
fn check(der: &CertificateDer<'_>, path: &Path, days: u32) -> Result<(), AuthorityError> {
    let path = path.to_owned();
    let Ok((_, own)) = X509Certificate::from_der(der) else {
        return Err(AuthorityError::Certificate { path });
    };
    let signs = own.key_usage().ok().flatten().is_none_or(|usage| usage.value.key_cert_sign());
    if !own.is_ca() || !signs {
        return Err(AuthorityError::NoAuthority { path });
    }
    let holds = own.validity();
    let Some(left) = holds.time_to_expiration() else {
        let (from, to) = (holds.not_before.to_string(), holds.not_after.to_string());
        return Err(AuthorityError::NotNow { path, from, to });
    };
    let left = left.whole_days().unsigned_abs();
    if left < u64::from(days) {
        return Err(AuthorityError::TooLong { path, left, days });
    }
    Ok(())
}

fn common_name(name: &str) -> rcgen::DistinguishedName {
    let mut subject = rcgen::DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

/// From now on, for so many days.
fn hold(params: &mut CertificateParams, days: u32) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    params.not_before = epoch + now.saturating_sub(EARLIER);
    params.not_after = epoch + now + DAY * days;
}
