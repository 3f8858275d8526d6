//! A device as its VM has it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::DeviceRequest;

/// A device that a VM has, or had and is to get again: which one it is here, and what QEMU calls it everywhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmDevice {
    /// Role, address on this node, and the addresses by which others know it.
    pub request: DeviceRequest,
    /// QEMU's id of it: the same on every node.
    pub id: String,
    /// QEMU's id of the port or bus that it sits on, where it can be unplugged: the same on every node.
    pub bus: String,
    /// Further properties that QEMU's device has, as its command line writes them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub properties: BTreeMap<String, String>,
}

impl VmDevice {
    /// The id that a device of this role has unless the operator's command line says otherwise.
    #[must_use]
    pub fn id_of(role: &str) -> String {
        format!("vmove-{role}")
    }
}
