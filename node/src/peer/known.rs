//! The nodes that a configuration names.

use std::collections::BTreeMap;

use super::link::PeerTarget;

/// A node that has a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownPeer {
    /// `host:port` of its daemon.
    pub address: String,
    /// The leaf switch that it is connected to.
    pub leaf: Option<String>,
}

/// The nodes that a configuration names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownPeers {
    nodes: BTreeMap<String, KnownPeer>,
    /// The name of this node.
    own: String,
}

/// A word that names no node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Expected host:port or a node of the configuration ({known}), found {word:?}{}", if *.own { ", which is this node" } else { "" })]
pub struct UnknownPeer {
    /// The word.
    pub word: String,
    /// Names of the nodes that there are.
    pub known: String,
    /// It is the name of this node.
    pub own: bool,
}

impl KnownPeers {
    /// The nodes by their names, for the node `own`.
    #[must_use]
    pub const fn new(nodes: BTreeMap<String, KnownPeer>, own: String) -> Self {
        Self { nodes, own }
    }

    /// All of them, by name.
    pub fn all(&self) -> impl Iterator<Item = PeerTarget> {
        self.nodes.iter().map(|(name, node)| PeerTarget { name: name.clone(), address: node.address.clone() })
    }

    /// The node that an operator's word stands for: a name, or `host:port`.
    ///
    /// # Errors
    /// [`UnknownPeer`] if it is neither.
    pub fn target(&self, word: &str) -> Result<PeerTarget, UnknownPeer> {
        if let Some(node) = self.nodes.get(word) {
            return Ok(PeerTarget { name: word.to_owned(), address: node.address.clone() });
        }
        if split_address(word).is_some() {
            return Ok(PeerTarget { name: word.to_owned(), address: word.to_owned() });
        }
        let known: Vec<&str> = self.nodes.keys().map(String::as_str).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        Err(UnknownPeer { word: word.to_owned(), known, own: word == self.own })
    }

    /// A node that another one names: as it is known here, or at the address that the other one gave.
    #[must_use]
    pub fn named_by_peer(&self, name: &str, address: &str) -> PeerTarget {
        let address = self.nodes.get(name).map_or(address, |node| node.address.as_str());
        PeerTarget { name: name.to_owned(), address: address.to_owned() }
    }

    /// The leaf switch of a node, if it is known.
    #[must_use]
    pub fn leaf(&self, name: &str) -> Option<&str> {
        self.nodes.get(name).and_then(|node| node.leaf.as_deref())
    }
}

/// Splits `host:port` or `[v6]:port`; `None` if it is neither.
#[must_use]
pub fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    if bare.is_empty() || (bare.contains(':') && bare == host) || bare.contains(char::is_whitespace) {
        return None;
    }
    Some((bare, port.parse().ok().filter(|port| *port > 0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_node_is_none_of_the_others() {
        let known = KnownPeers::new(BTreeMap::new(), "a".to_owned());
        let told = |word: &str| known.target(word).unwrap_err().to_string();
        assert_eq!(
            told("a"),
            r#"Expected host:port or a node of the configuration (none), found "a", which is this node"#
        );
        assert!(told("b").ends_with(r#"found "b""#));
    }

    #[test]
    fn addresses_are_split_at_the_port() {
        assert_eq!(split_address("host:1"), Some(("host", 1)));
        assert_eq!(split_address("[::1]:7420"), Some(("::1", 7420)));
        for bad in ["host", "host:", ":1", "host:0", "host:99999", "::1:7420", "two words:1"] {
            assert_eq!(split_address(bad), None, "{bad}");
        }
    }
}
