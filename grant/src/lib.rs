//! Grants: what a bridge lets one VM have on one node, signed with the bridge's Ed25519 key.
//!
//! A node that knows the public key of its bridge ([`PublicKey`]) starts a VM only into a grant: it reads it ([`PublicKey::read`]), and takes
//! the VM into its [`Book`], which refuses what exceeds the grant, what another grant holds, and a grant that was used before.
//!
//! ```
//! use vmove_grant::{Book, Demand, Grant, Host, SecretKey};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (key, _) = SecretKey::generate()?;
//! let grant = Grant {
//!     lease: "train-17".into(), holder: "alice".into(), node: "n1".into(), vm: "train-0".into(), serial: 1, expires_ms: 60_000,
//!     cores: 4, memory_mib: 1024, huge_2m_mib: 0, huge_1g_mib: 0, devices: Vec::new(), numa: Vec::new(),
//! };
//! let text = key.sign(&grant)?;
//!
//! let host = Host { node: "n1".into(), cores: 8, keys: vec![key.public()] };
//! let demand = Demand { cores: 4, memory_mib: 1024, ..Demand::default() };
//! let mut book = Book::default();
//! book.take(&host, &text, "train-0", &demand, 1000)?;
//! // A copy of it is of no use.
//! book.end("train-0");
//! assert!(book.take(&host, &text, "train-0", &demand, 2000).is_err());
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod book;
mod key;

pub use book::{Book, Demand, Host, Taken};
pub use key::{BadKey, PublicKey, SecretKey};

use serde::{Deserialize, Serialize};

/// What one VM may have on one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// The lease that it is a part of.
    pub lease: String,
    /// Who holds the lease.
    pub holder: String,
    /// The node.
    pub node: String,
    /// The VM.
    pub vm: String,
    /// Different for each grant of a bridge. A node takes each once.
    pub serial: u64,
    /// The VM must be started before this time of day; one that runs may go on. Unit: milliseconds since 1970-01-01 00:00 UTC.
    pub expires_ms: u64,
    /// Hardware threads.
    pub cores: u32,
    /// Memory outside huge pages. Unit: MiB.
    pub memory_mib: u64,
    /// Memory in pages of 2 MiB. Unit: MiB.
    #[serde(default)]
    pub huge_2m_mib: u64,
    /// Memory in pages of 1 GiB. Unit: MiB.
    #[serde(default)]
    pub huge_1g_mib: u64,
    /// Devices.
    #[serde(default)]
    pub devices: Vec<GrantedDevice>,
    /// Of which NUMA nodes cores and memory are, if the bridge says so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numa: Vec<GrantedShare>,
}

/// What a grant gives of a NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GrantedShare {
    /// Number of the NUMA node.
    pub node: u32,
    /// Hardware threads.
    pub cores: u32,
    /// Memory of all kinds. Unit: MiB.
    pub memory_mib: u64,
}

/// A device of a grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GrantedDevice {
    /// What the VM knows it as, the same on every node.
    pub role: String,
    /// Its PCI address.
    pub address: String,
}

/// Why a VM is not taken into a grant. Nothing has changed then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// There is none.
    #[error(
        "VM {vm} has no grant, and this node starts only VMs that a bridge has granted: start it through the bridge (`vmove place --run`)"
    )]
    Missing {
        /// The VM.
        vm: String,
    },
    /// A VM comes from another node without one.
    #[error(
        "VM {vm} comes without a grant, and node {here} takes only VMs that a bridge has granted: move or fork it through the bridge (`vmove cluster`, `vmove plan`)"
    )]
    ComesWithout {
        /// The VM.
        vm: String,
        /// This node.
        here: String,
    },
    /// The text is not a grant.
    #[error("expected a grant (two parts in base64 with a dot between them), found another text: {0}")]
    Malformed(String),
    /// No key of the configuration has signed it.
    #[error(
        "the grant was not signed by a bridge that this node knows: it is of another one, or was changed on its way"
    )]
    OtherBridge,
    /// It is of another node.
    #[error("the grant is for node {granted}, and this is {here}")]
    OtherNode {
        /// The node that it names.
        granted: String,
        /// This one.
        here: String,
    },
    /// It is of another VM.
    #[error("the grant is for VM {granted}, and VM {vm} was to be started")]
    OtherVm {
        /// The VM that it names.
        granted: String,
        /// The VM that was to be started.
        vm: String,
    },
    /// It came too late.
    #[error(
        "the grant of lease {lease} ended {ago_s} s ago by the clock of this node: start the VM through the bridge again"
    )]
    Expired {
        /// Its lease.
        lease: String,
        /// Since then. Unit: seconds.
        ago_s: u64,
    },
    /// It was used before.
    #[error("grant {serial} of lease {lease} was used before: each is good for one start")]
    Replayed {
        /// Its lease.
        lease: String,
        /// Its serial number.
        serial: u64,
    },
    /// The VM has more than was granted.
    #[error("VM {vm} wants {wanted} {what}, and lease {lease} grants {granted}")]
    Exceeds {
        /// The VM.
        vm: String,
        /// Its lease.
        lease: String,
        /// Of what.
        what: &'static str,
        /// How much it wants.
        wanted: u64,
        /// How much it may have.
        granted: u64,
    },
    /// The VM has a device that was not granted.
    #[error("VM {vm} wants device {address}, which lease {lease} does not grant")]
    NotGranted {
        /// The VM.
        vm: String,
        /// Its lease.
        lease: String,
        /// The device.
        address: String,
    },
    /// Another VM has it.
    #[error("device {address} is held by VM {by} of lease {lease}: end it first")]
    Held {
        /// The device.
        address: String,
        /// The VM that has it.
        by: String,
        /// Its lease.
        lease: String,
    },
    /// The node has not that many.
    #[error("the grants of this node's VMs and this one have {wanted} cores, and it has {cores}")]
    Overcommitted {
        /// Of all.
        wanted: u64,
        /// Of the node.
        cores: u64,
    },
}
