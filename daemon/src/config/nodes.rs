//! `[nodes]`: peers that have a name.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use vmove_node::peer::split_address;

use super::{ConfigError, value};

/// A peer that has a name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct KnownNode {
    /// `host:port`.
    pub address: String,
    /// Name its certificate must carry, where that is not the host part of the address.
    #[serde(default)]
    pub server_name: Option<String>,
    /// Leaf switch that it hangs on.
    #[serde(default)]
    pub leaf: Option<String>,
}

/// A peer as it is in the file: its address, or a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeEntry(KnownNode);

impl<'de> Deserialize<'de> for NodeEntry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(AddressOrTable)
    }
}

/// An untagged enum would not say which key of a table is wrong.
struct AddressOrTable;

impl<'de> Visitor<'de> for AddressOrTable {
    type Value = NodeEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"host:port\", or a table with address, server-name and leaf")
    }

    fn visit_str<E: Error>(self, address: &str) -> Result<NodeEntry, E> {
        Ok(NodeEntry(KnownNode { address: address.to_owned(), server_name: None, leaf: None }))
    }

    fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<NodeEntry, A::Error> {
        KnownNode::deserialize(MapAccessDeserializer::new(table)).map(NodeEntry)
    }
}

impl NodeEntry {
    /// The node, if its address is one.
    pub(super) fn checked(self, name: &str) -> Result<KnownNode, ConfigError> {
        if split_address(&self.0.address).is_none() {
            let why = format!("expected host:port, found \"{}\"", self.0.address);
            return Err(value(format!("nodes.{name}"), why));
        }
        Ok(self.0)
    }
}
