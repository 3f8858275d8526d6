//! What libvirt's hook tells `vmoved`.

use serde::{Deserialize, Serialize};

/// Of the operations of the hook `qemu`, those that are for `vmoved`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum DomainOperation {
    /// A guest of another host is to come; there is no QEMU for it yet.
    Migrate,
    /// QEMU was started, for a guest of another host or for one that begins here.
    Started,
}

/// A call of the hook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DomainHook {
    /// What libvirt does.
    pub operation: DomainOperation,
    /// The domain's XML, as the hook gets it.
    pub xml: String,
}

/// libvirt may go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DomainHookDone {
    /// The migration that carries the guest, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<String>,
}
