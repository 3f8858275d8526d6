//! Who is who in a distribution.

use serde::{Deserialize, Serialize};

/// A host: 0 is the root, others count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HostId(pub u32);

impl HostId {
    /// The host that has everything.
    pub const ROOT: Self = Self(0);
}

impl std::fmt::Display for HostId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if *self == Self::ROOT { f.write_str("the root") } else { write!(f, "host {}", self.0) }
    }
}
