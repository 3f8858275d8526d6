//! An authority for one test, a certificate that all its nodes share, and those of clients.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::Result;

/// The files, removed when dropped.
pub struct Pki {
    folder: tempfile::TempDir,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

/// Whether a certificate is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validity {
    /// It is.
    Now,
    /// It was, from 2020 to 2021.
    Expired,
}

impl fmt::Debug for Pki {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pki").field("folder", &self.folder).finish_non_exhaustive()
    }
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
        // OpenSSL takes a certificate for self-signed whose issuer has the same name.
        authority.distinguished_name = named("authority");
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        std::fs::write(folder.path().join("ca.pem"), authority.self_signed(&key)?.pem())?;
        let own = Self { folder, issuer: rcgen::Issuer::new(authority, key) };
        own.sign_nodes(addresses, Validity::Now)?;
        Ok(own)
    }

    /// A folder with `client.pem`, `client.key` and `ca.pem` of a client with this common name.
    ///
    /// # Errors
    /// When the files cannot be written.
    pub fn client(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder.path().join(name);
        std::fs::create_dir(&folder)?;
        std::fs::copy(self.path("ca.pem"), folder.join("ca.pem"))?;
        self.sign_client(name, Validity::Now)?;
        Ok(folder)
    }

    /// Puts another certificate into the folder of a client.
    ///
    /// # Errors
    /// When the files cannot be written.
    pub fn sign_client(&self, name: &str, validity: Validity) -> Result<()> {
        let mut params = rcgen::CertificateParams::new(Vec::new())?;
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        params.distinguished_name = named(name);
        self.sign(params, validity, &format!("{name}/client"))
    }

    /// Puts another certificate in the place of that of the nodes, which read it when they are told to.
    ///
    /// # Errors
    /// When the files cannot be written.
    pub fn sign_nodes(&self, addresses: &[IpAddr], validity: Validity) -> Result<()> {
        let names: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        let mut params = rcgen::CertificateParams::new(names)?;
        params.distinguished_name = named("node");
        self.sign(params, validity, "node")
    }

    fn sign(&self, mut params: rcgen::CertificateParams, validity: Validity, file: &str) -> Result<()> {
        if validity == Validity::Expired {
            params.not_before = rcgen::date_time_ymd(2020, 1, 1);
            params.not_after = rcgen::date_time_ymd(2021, 1, 1);
        }
        let key = rcgen::KeyPair::generate()?;
        let path = |kind: &str| self.folder.path().join(format!("{file}.{kind}"));
        std::fs::write(path("pem"), params.signed_by(&key, &self.issuer)?.pem())?;
        std::fs::write(path("key"), key.serialize_pem())?;
        Ok(())
    }

    /// A folder with the node's certificate under the names by which QEMU looks for it; `endpoint` is `client` or `server`.
    ///
    /// # Errors
    /// When the files cannot be written.
    pub fn for_qemu(&self, endpoint: &str) -> Result<PathBuf> {
        let folder = self.folder.path().join(format!("qemu-{endpoint}"));
        std::fs::create_dir_all(&folder)?;
        for (ours, theirs) in [
            ("ca.pem", "ca-cert.pem".to_owned()),
            ("node.pem", format!("{endpoint}-cert.pem")),
            ("node.key", format!("{endpoint}-key.pem")),
        ] {
            std::fs::copy(self.path(ours), folder.join(theirs))?;
        }
        Ok(folder)
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

fn named(common: &str) -> rcgen::DistinguishedName {
    let mut name = rcgen::DistinguishedName::new();
    name.push(rcgen::DnType::CommonName, common);
    name
}
