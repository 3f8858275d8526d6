//! Who may do what: bearer tokens, and the role of each.

use std::fmt;
use std::sync::Arc;

use hyper::Method;
use serde::Deserialize;

/// What a tenant may change: leases, clusters and checkpoints, of its own.
const OF_TENANTS: [&str; 3] = ["/v1/leases/", "/v1/clusters/", "/v1/checkpoints/"];

/// What the bearer of a token may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Read everything, change nothing.
    Viewer,
    /// Place virtual clusters, and do everything with its own leases.
    Tenant,
    /// Everything.
    Operator,
}

/// Who sent a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// Somebody who only reads.
    Viewer,
    /// A tenant. Its name is the holder of its leases.
    Tenant(Arc<str>),
    /// Somebody who may do everything.
    Operator,
}

impl Caller {
    /// The bearer of a token with this name and role.
    #[must_use]
    pub fn new(name: &str, role: Role) -> Self {
        match role {
            Role::Viewer => Self::Viewer,
            Role::Tenant => Self::Tenant(name.into()),
            Role::Operator => Self::Operator,
        }
    }

    /// Whether it may send such a request at all. For requests that concern a lease, [`Caller::may_use`] has to be asked as well.
    #[must_use]
    pub fn may(&self, method: &Method, path: &str) -> bool {
        let reads = matches!(*method, Method::GET | Method::HEAD);
        match self {
            Self::Operator => true,
            // What counts then is what the node lists.
            Self::Viewer => reads || (*method == Method::POST && looks_at_node(path)),
            // Plans name the VMs of everybody.
            Self::Tenant(_) if reads => !path.starts_with("/v1/plans"),
            Self::Tenant(_) => {
                path == "/v1/leases" || OF_TENANTS.iter().any(|prefix| path.starts_with(prefix))
            }
        }
    }

    /// Whether what belongs to `holder` is shown to it. If it may change leases at all, it may change those of this holder.
    #[must_use]
    pub fn may_use(&self, holder: &str) -> bool {
        match self {
            Self::Tenant(name) => **name == *holder,
            Self::Viewer | Self::Operator => true,
        }
    }

    /// Whether it may have any program started on a node.
    #[must_use]
    pub fn is_operator(&self) -> bool {
        *self == Self::Operator
    }
}

fn looks_at_node(path: &str) -> bool {
    let name = path.strip_prefix("/v1/nodes/").and_then(|rest| rest.strip_suffix("/look"));
    name.is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Viewer => f.write_str("viewer"),
            Self::Tenant(name) => write!(f, "tenant {name}"),
            Self::Operator => f.write_str("operator"),
        }
    }
}

/// A bearer token. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// A token from text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Compares in a time that does not depend on the contents.
    fn is(&self, given: &str) -> bool {
        let (a, b) = (self.0.as_bytes(), given.as_bytes());
        a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (x, y)| differ | (x ^ y)) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// The tokens of a listener, with their bearers. Without any, everybody who can connect is an operator.
#[derive(Debug, Clone, Default)]
pub struct Access(Vec<(Token, Caller)>);

impl Access {
    /// Takes requests with these tokens, and no others.
    #[must_use]
    pub fn new(tokens: Vec<(Token, Caller)>) -> Self {
        Self(tokens)
    }

    /// Whether requests need no token.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.is_empty()
    }

    /// Who sent a request with this token; none, if nobody has such a token.
    #[must_use]
    pub fn caller(&self, given: Option<&str>) -> Option<Caller> {
        if self.is_open() {
            return Some(Caller::Operator);
        }
        // All are compared, so that the time does not tell which one is similar.
        let given = given?;
        self.0
            .iter()
            .fold(None, |found, (token, caller)| if token.is(given) { Some(caller.clone()) } else { found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_viewer_changes_nothing_but_has_nodes_looked_at() {
        for (path, may) in [
            ("/v1/nodes/n1/look", true),
            ("/v1/nodes/look", false),
            ("/v1/nodes/n1/x/look", false),
            ("/v1/nodes/n1/state", false),
            ("/v1/leases", false),
        ] {
            assert_eq!(Caller::Viewer.may(&Method::POST, path), may, "{path}");
        }
        assert!(!Caller::Viewer.may(&Method::DELETE, "/v1/nodes/n1/look"));
        assert!(!Caller::Tenant("alice".into()).may(&Method::POST, "/v1/nodes/n1/look"));
    }
}
