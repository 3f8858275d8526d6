//! An authority for one test, and a certificate that all its nodes share.

use std::net::IpAddr;

use anyhow::Result;

/// The files, removed when dropped.
#[derive(Debug)]
pub struct Pki {
    folder: tempfile::TempDir,
}

impl Pki {
    /// An authority, and a certificate of it for nodes at these addresses.
    ///
    /// # Errors
    /// When the files cannot be written.
    pub fn new(addresses: &[IpAddr]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let key = rcgen::KeyPair::generate()?;
        let mut authority = rcgen::CertificateParams::new(Vec::new())?;
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        std::fs::write(folder.path().join("ca.pem"), authority.self_signed(&key)?.pem())?;
        let issuer = rcgen::Issuer::new(authority, key);
        let key = rcgen::KeyPair::generate()?;
        let names: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        let node = rcgen::CertificateParams::new(names)?.signed_by(&key, &issuer)?;
        std::fs::write(folder.path().join("node.pem"), node.pem())?;
        std::fs::write(folder.path().join("node.key"), key.serialize_pem())?;
        Ok(Self { folder })
    }

    /// The path of `ca.pem`, `node.pem` or `node.key`.
    #[must_use]
    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// `--tls-*` for a daemon.
    #[must_use]
    pub fn flags(&self) -> Vec<String> {
        let [cert, key, authority] = ["node.pem", "node.key", "ca.pem"].map(|name| self.path(name));
        ["--tls-cert", &cert, "--tls-key", &key, "--tls-ca", &authority].map(str::to_owned).into()
    }
}
