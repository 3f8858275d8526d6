//! `[[client]]`: who may give commands over the peer port, told by a name in its certificate.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use serde::Deserialize;

use super::{ConfigError, ConfigFile, Place};

/// Requests a second that a client may send for long, unless its entry says otherwise.
const PER_SECOND: u32 = 50;
/// Requests that it may send at once.
const BURST: u32 = 100;
/// More would be no limit.
const HIGHEST: u32 = 100_000;

/// What a client may do. Each role may do all that those before it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Nothing: shuts a certificate out that is still valid.
    None,
    /// Read everything, change nothing.
    Viewer,
    /// Move, fork, pause and stop guests that are there.
    Operator,
    /// Everything, as on the control socket: start any program as a guest, and take a guest by force.
    Admin,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        })
    }
}

/// What a certificate must contain.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Named {
    /// A DNS name, an address, or the common name, in whatever case.
    Name(String),
    /// A URI such as `spiffe://example/scheduler`, to the letter.
    Uri(String),
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(text) | Self::Uri(text) => f.write_str(text),
        }
    }
}

/// How often a client may ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Requests a second, for long.
    pub per_second: u32,
    /// Requests at once.
    pub burst: u32,
}

/// A client that the configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// Whose certificate.
    pub named: Named,
    /// What it may do.
    pub role: Role,
    /// Whether it is a node as well, which may bring guests.
    pub peer: bool,
    /// How often it may ask.
    pub rate: Rate,
}

/// An entry as it is in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ClientEntry {
    name: Option<String>,
    uri: Option<String>,
    role: Role,
    #[serde(default)]
    peer: bool,
    requests_per_second: Option<u32>,
    burst: Option<u32>,
}

/// Why an entry cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("client[{number}].{key}: {why}")]
pub struct ClientError {
    /// Its place in the file, from 1 on.
    number: usize,
    key: &'static str,
    /// Expected and found.
    why: String,
}

impl ClientError {
    /// Its key in the file.
    pub(super) fn place(&self) -> String {
        format!("client[{}].{}", self.number, self.key)
    }
}

impl ClientEntry {
    fn checked(self, number: usize) -> Result<Client, ClientError> {
        let bad = |key, why: String| ClientError { number, key, why };
        let named = match (self.name, self.uri) {
            (Some(name), None) if name.is_empty() || name.contains(['/', '*']) => {
                let why = format!("expected a name as it is in the certificate, found {name:?}");
                return Err(bad("name", why));
            }
            (Some(name), None) => Named::Name(name.to_ascii_lowercase()),
            (None, Some(uri))
                if !uri.split_once("://").is_some_and(|(s, rest)| !s.is_empty() && !rest.is_empty()) =>
            {
                return Err(bad(
                    "uri",
                    format!("expected a URI such as spiffe://example/scheduler, found {uri:?}"),
                ));
            }
            (None, Some(uri)) => Named::Uri(uri),
            (None, None) => return Err(bad("name", "expected either name or uri, found neither".to_owned())),
            (Some(_), Some(_)) => {
                return Err(bad("uri", "expected either name or uri, found both".to_owned()));
            }
        };
        if self.peer && self.role == Role::None {
            return Err(bad("peer", "expected a role for a node, found \"none\"".to_owned()));
        }
        let within = |key, found: Option<u32>, usual| match found.unwrap_or(usual) {
            found @ 1..=HIGHEST => Ok(found),
            found => Err(bad(key, format!("expected 1 to {HIGHEST}, found {found}"))),
        };
        let per_second = within("requests-per-second", self.requests_per_second, PER_SECOND)?;
        let burst = within("burst", self.burst, BURST.max(per_second))?;
        Ok(Client { named, role: self.role, peer: self.peer, rate: Rate { per_second, burst } })
    }
}

/// All entries, each for a name of its own.
pub(super) fn check(entries: Vec<ClientEntry>, tls: bool) -> Result<Vec<Client>, ClientError> {
    let mut known = HashSet::new();
    let clients = entries.into_iter().enumerate().map(|(index, entry)| {
        let number = index + 1;
        let client = entry.checked(number)?;
        let bad = |why: String| ClientError { number, key: "name", why };
        if !tls {
            return Err(bad(
                "expected TLS, found insecure: without certificates nobody knows who a client is".to_owned(),
            ));
        }
        if !known.insert(client.named.clone()) {
            return Err(bad(format!("expected one entry for {}, found another one before", client.named)));
        }
        Ok(client)
    });
    clients.collect()
}

/// The clients that the file names now.
///
/// # Errors
/// The file cannot be read or used as a whole, or names clients without TLS.
pub fn read_clients(path: &Path, tls: bool) -> Result<Vec<Client>, ConfigError> {
    let text = super::read(path)?;
    let file = ConfigFile::parse(path, &text)?;
    let clients = check(file.client, tls);
    clients.map_err(|why| ConfigError::Client { place: Place::default(), why }.within(path, &text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, tls: bool) -> Result<Vec<Client>, String> {
        let file: ConfigFile = toml::from_str(text).map_err(|error| error.to_string())?;
        check(file.client, tls).map_err(|error| error.to_string())
    }

    #[test]
    fn a_client_is_told_by_a_name_or_a_uri_and_has_a_rate() {
        let clients = read(
            "[[client]]\nname = 'Sched.Example'\nrole = 'operator'\nrequests-per-second = 7\n\
             [[client]]\nuri = 'spiffe://example/Eye'\nrole = 'viewer'\npeer = true\nburst = 3",
            true,
        )
        .unwrap();
        assert_eq!(clients[0].named, Named::Name("sched.example".to_owned()));
        assert_eq!((clients[0].role, clients[0].peer), (Role::Operator, false));
        assert_eq!(clients[0].rate, Rate { per_second: 7, burst: BURST });
        assert_eq!(clients[1].named, Named::Uri("spiffe://example/Eye".to_owned()));
        assert_eq!((clients[1].peer, clients[1].rate), (true, Rate { per_second: PER_SECOND, burst: 3 }));
        assert!(Role::None < Role::Viewer && Role::Viewer < Role::Operator && Role::Operator < Role::Admin);
    }

    #[test]
    fn an_entry_that_cannot_be_used_is_named_by_its_place_and_key() {
        let one = "[[client]]\nname = 'a'\nrole = 'viewer'\n";
        for (text, word) in [
            ("[[client]]\nname = 'a'", "missing field `role`"),
            ("[[client]]\nname = 'a'\nrole = 'root'", "unknown variant `root`"),
            ("[[client]]\nrole = 'viewer'", "client[1].name: expected either name or uri, found neither"),
            (
                "[[client]]\nname = 'a'\nuri = 'x://y'\nrole = 'viewer'",
                "client[1].uri: expected either name or uri, found both",
            ),
            (
                "[[client]]\nname = '*.example'\nrole = 'viewer'",
                "client[1].name: expected a name as it is in the certificate",
            ),
            ("[[client]]\nuri = 'example'\nrole = 'viewer'", "client[1].uri: expected a URI"),
            ("[[client]]\nname = 'a'\nrole = 'none'\npeer = true", "client[1].peer"),
            (
                "[[client]]\nname = 'a'\nrole = 'viewer'\nburst = 0",
                "client[1].burst: expected 1 to 100000, found 0",
            ),
            (
                &format!("{one}[[client]]\nname = 'A'\nrole = 'admin'"),
                "client[2].name: expected one entry for a, found another",
            ),
        ] {
            let error = read(text, true).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        let error = read(one, false).unwrap_err();
        assert!(error.contains("client[1].name: expected TLS, found insecure"), "{error}");
    }
}
