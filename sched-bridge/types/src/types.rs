//! Instance types, keys and aliases.

use std::collections::BTreeMap;

use sched_bridge::place::Alternative;
use sched_bridge::request::{AliasText, KeyText};
use serde::{Deserialize, Serialize};

/// What requests may name.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TypeList {
    /// Instance types, by name.
    pub types: Vec<InstanceTypeInfo>,
    /// Keys that operators have defined, by name, as they are written.
    #[cfg_attr(feature = "schema", schema(value_type = Object))]
    pub keys: BTreeMap<String, KeyText>,
    /// Aliases of `pci_passthrough:alias`, by name, as they are written.
    #[cfg_attr(feature = "schema", schema(value_type = Object))]
    pub aliases: BTreeMap<String, AliasText>,
}

/// An instance type.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct InstanceTypeInfo {
    /// Its name.
    pub name: String,
    /// The request that it stands for.
    pub request: String,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// The file that defines it; absent for what ships.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// What a VM of it needs: one of these.
    #[cfg_attr(feature = "schema", schema(value_type = Vec<Object>))]
    pub alternatives: Vec<Alternative>,
}
