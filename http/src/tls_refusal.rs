//! Why two ends with TLS do not come together, in words that lead on.

use std::error::Error;
use std::{fmt, io};

use rustls::{AlertDescription, CertificateError};

/// Why TLS failed. Nothing was asked of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TlsRefusal {
    /// The server says that the client's certificate is out of date.
    OwnExpired,
    /// The server does not know the authority of the client's certificate.
    OwnUnknownAuthority,
    /// The server wants a certificate, and was shown none.
    OwnMissing,
    /// The server refuses the client's certificate for another reason: the word of TLS for it.
    OwnRefused(String),
    /// The server's certificate is out of date.
    TheirsExpired,
    /// The server's certificate is of an authority that the client does not trust.
    TheirsUnknownAuthority,
    /// The server's certificate is for other names: what the TLS library said.
    TheirsOtherName(String),
    /// The server's certificate cannot be trusted for another reason: what the TLS library said.
    TheirsRefused(String),
    /// The server does not speak TLS, or none that is known here.
    NoTls,
}

impl TlsRefusal {
    /// What TLS says in the chain of an error; `None` if that is about something else.
    #[must_use]
    pub fn of(error: &(dyn Error + 'static)) -> Option<Self> {
        Some(match found(error)? {
            rustls::Error::AlertReceived(alert) => Self::told(*alert),
            rustls::Error::InvalidCertificate(why) => Self::seen(why),
            rustls::Error::InvalidMessage(_) => Self::NoTls,
            other => Self::TheirsRefused(other.to_string()),
        })
    }

    /// What the server says of us.
    fn told(alert: AlertDescription) -> Self {
        match alert {
            AlertDescription::CertificateExpired => Self::OwnExpired,
            AlertDescription::UnknownCA | AlertDescription::DecryptError => Self::OwnUnknownAuthority,
            AlertDescription::CertificateRequired => Self::OwnMissing,
            AlertDescription::HandshakeFailure | AlertDescription::ProtocolVersion => Self::NoTls,
            other => Self::OwnRefused(format!("{other:?}")),
        }
    }

    /// What we say of the server.
    fn seen(why: &CertificateError) -> Self {
        match why {
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. } => Self::TheirsExpired,
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::TheirsUnknownAuthority,
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                Self::TheirsOtherName(why.to_string())
            }
            other => Self::TheirsRefused(other.to_string()),
        }
    }
}

impl fmt::Display for TlsRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OwnExpired => f.write_str(
                "it refuses the certificate that it was shown: that is out of date, or not valid yet; issue a new one, or set the clocks",
            ),
            Self::OwnUnknownAuthority => f.write_str(
                "it refuses the certificate that it was shown: that is of another authority than its tls-ca; have it issued by that one",
            ),
            Self::OwnMissing => f.write_str("it wants a certificate, and was shown none; give one and its key"),
            Self::OwnRefused(alert) => write!(
                f,
                "it refuses the certificate that it was shown ({alert}); its log says why. A client needs extendedKeyUsage=clientAuth"
            ),
            Self::TheirsExpired => {
                f.write_str("its certificate is out of date, or not valid yet; renew it there, or set the clocks")
            }
            Self::TheirsUnknownAuthority => f.write_str(
                "its certificate is of another authority than the one that is trusted here; give the authority of the nodes",
            ),
            Self::TheirsOtherName(why) => write!(
                f,
                "its certificate is for another name ({why}); reach it by a name that is in the certificate, or say that name"
            ),
            Self::TheirsRefused(why) => write!(f, "TLS failed ({why}); the log of the other side may say more"),
            Self::NoTls => f.write_str(
                "no TLS that is known here; is this the right port, and does it run without TLS (--insecure)?",
            ),
        }
    }
}

/// The error of the TLS library that caused this one.
fn found<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(tls) = error.downcast_ref::<rustls::Error>() {
            return Some(tls);
        }
        // What an I/O error wraps is not its source: that is the source of what it wraps.
        let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = wrapped.map(|error| -> &(dyn Error + 'static) { error }).or_else(|| error.source());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tls_says_is_found_below_other_errors() {
        let alert = rustls::Error::AlertReceived(AlertDescription::CertificateExpired);
        let wrapped = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, alert));
        assert_eq!(TlsRefusal::of(&wrapped), Some(TlsRefusal::OwnExpired));
        assert_eq!(TlsRefusal::of(&io::Error::from(io::ErrorKind::ConnectionRefused)), None);
        let theirs = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        assert_eq!(TlsRefusal::of(&theirs), Some(TlsRefusal::TheirsUnknownAuthority));
    }
}
