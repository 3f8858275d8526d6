//! What a certificate says of whoever has shown it.

use std::net::IpAddr;

use rustls_pki_types::CertificateDer;
use vmove_node::peer::Caller;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// A certificate that TLS has verified: signed by the authority, and in force when the connection was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Certificate {
    /// Its subject, as people read it: `CN=scheduler, O=site`.
    pub subject: String,
    /// DNS names and addresses, and the common name.
    pub names: Vec<String>,
    /// URIs.
    pub uris: Vec<String>,
    /// It says what it is for, and that is not to be a server: no node has such a one.
    pub for_clients_only: bool,
    /// When it ends. Unit: seconds since 1970.
    pub ends: i64,
}

impl Certificate {
    /// The first one of a chain; `None` if it cannot be read.
    pub fn of(chain: Option<&[CertificateDer<'_>]>) -> Option<Self> {
        let (_, own) = X509Certificate::from_der(chain?.first()?).ok()?;
        let mut found = Self {
            subject: own.subject().to_string(),
            ends: own.validity().not_after.timestamp(),
            ..Self::default()
        };
        for name in own.subject_alternative_name().ok()?.iter().flat_map(|more| &more.value.general_names) {
            match name {
                GeneralName::DNSName(name) => found.names.push((*name).to_owned()),
                GeneralName::IPAddress(bytes) => found.names.extend(address(bytes)),
                GeneralName::URI(uri) => found.uris.push((*uri).to_owned()),
                _ => {}
            }
        }
        let common = own.subject().iter_common_name().filter_map(|name| name.as_str().ok());
        found.names.extend(common.map(str::to_owned));
        let purpose = own.extended_key_usage().ok()?;
        found.for_clients_only =
            purpose.is_some_and(|purpose| !purpose.value.server_auth && !purpose.value.any);
        Some(found)
    }

    /// The node that has it.
    pub fn caller(&self) -> Caller {
        Caller { names: self.names.clone(), address: None }
    }
}

/// An address of a certificate: its 4 or 16 bytes.
fn address(bytes: &[u8]) -> Option<String> {
    let four = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    let address = four.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from));
    Some(address.ok()?.to_string())
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, SanType};

    use super::*;

    fn shown(dns: &[&str], uri: Option<&str>, purpose: &[ExtendedKeyUsagePurpose]) -> Certificate {
        let dns: Vec<String> = dns.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(dns).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "sched");
        params.subject_alt_names.extend(uri.map(|uri| SanType::URI(uri.try_into().unwrap())));
        params.extended_key_usages = purpose.to_vec();
        params.not_after = rcgen::date_time_ymd(2040, 1, 1);
        let made = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        Certificate::of(Some(&[made.der().clone()])).unwrap()
    }

    #[test]
    fn all_names_and_the_purpose_are_read() {
        use ExtendedKeyUsagePurpose::{Any, ClientAuth, ServerAuth};
        let found =
            shown(&["a.example", "192.0.2.1", "2001:db8::1"], Some("spiffe://example/a"), &[ClientAuth]);
        assert_eq!(found.names, ["a.example", "192.0.2.1", "2001:db8::1", "sched"]);
        assert_eq!(
            (found.uris.as_slice(), found.subject.as_str()),
            (&["spiffe://example/a".to_owned()][..], "CN=sched")
        );
        assert!(found.for_clients_only);
        assert_eq!(found.ends, 2_208_988_800);
        for purpose in [&[][..], &[ServerAuth], &[ServerAuth, ClientAuth], &[Any]] {
            assert!(!shown(&["a"], None, purpose).for_clients_only, "{purpose:?}");
        }
        assert_eq!(Certificate::of(Some(&[CertificateDer::from(vec![1, 2, 3])])), None);
        assert_eq!(Certificate::of(None), None);
    }
}
