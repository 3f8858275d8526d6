//! Requests for virtual clusters, as text.

use serde::{Deserialize, Serialize};

/// A request as text.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RequestText {
    /// The format.
    pub format: RequestFormat,
    /// The text.
    pub text: String,
    /// Number of VMs, for formats that describe one VM.
    #[serde(default = "one")]
    pub count: u32,
}

fn one() -> u32 {
    1
}

/// A format of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum RequestFormat {
    /// Instance type string: `cg1.small; xpus=2; xpu_arch=fermi`.
    Instance,
    /// Output of `openstack flavor show -f json`.
    Flavor,
    /// A virtual cluster in TOML.
    Toml,
    /// A virtual cluster in YAML.
    Yaml,
}
