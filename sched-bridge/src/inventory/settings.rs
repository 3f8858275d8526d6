//! What no file of the kernel says, and an operator does: `/etc/vmove/inventory.toml`.
//!
//! ```toml
//! [[vgpus]]                               # GPUs that are divided into vGPUs of this type
//! type = "nvidia-63"                      # a folder of mdev_supported_types
//! gpus = ["0000:65:00.0"]                 # all that have the type, if left out
//! traits = ["CUSTOM_GRAPHICS"]
//!
//! [[migs]]                                # the profile of MIG slices, which only the vendor's tools know
//! gpu = "0000:66:00.0"
//! gpu_instances = [3, 4]
//! profile = "3g.20gb"
//!
//! [[remote_gpus]]                         # GPUs of a service in the network
//! address = "10.0.0.9:8308"
//! model = "a100"
//! count = 4
//! ```

use std::net::SocketAddr;

use serde::Deserialize;
use vmove_types::typo;

use crate::model::PciAddress;

/// The file, below the root folder.
pub(super) const FILE: &str = "etc/vmove/inventory.toml";

/// See the [module](self).
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Settings {
    pub vgpus: Vec<VgpuType>,
    pub migs: Vec<MigProfile>,
    pub remote_gpus: Vec<RemoteGpus>,
}

/// A type of vGPUs, and the GPUs that are divided into them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VgpuType {
    #[serde(rename = "type")]
    pub name: String,
    #[serde(default)]
    pub gpus: Vec<PciAddress>,
    #[serde(default)]
    pub traits: Vec<String>,
}

/// The profile of some MIG slices.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MigProfile {
    pub gpu: PciAddress,
    pub gpu_instances: Vec<u16>,
    pub profile: String,
}

/// GPUs of one service.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RemoteGpus {
    pub address: SocketAddr,
    #[serde(default)]
    pub model: String,
    pub count: u16,
}

impl Settings {
    /// From the text of the file.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn read(text: &str) -> Result<Self, String> {
        let settings: Self = toml::from_str(text).map_err(|error| typo::hinted(&error.to_string()))?;
        for (at, vgpus) in settings.vgpus.iter().enumerate() {
            let all = vgpus.gpus.is_empty();
            let twice = settings.vgpus[..at].iter().any(|other| {
                all || other.gpus.is_empty() || other.gpus.iter().any(|gpu| vgpus.gpus.contains(gpu))
            });
            if twice {
                return Err(format!(
                    "[[vgpus]] of type {:?}: expected GPUs that no other [[vgpus]] has, since a GPU is divided into vGPUs of one type",
                    vgpus.name
                ));
            }
        }
        for (at, remote) in settings.remote_gpus.iter().enumerate() {
            if remote.count == 0
                || settings.remote_gpus[..at].iter().any(|other| other.address == remote.address)
            {
                return Err(format!(
                    "[[remote_gpus]] of {}: expected each address once, with a count of at least 1, found {}",
                    remote.address, remote.count
                ));
            }
        }
        Ok(settings)
    }

    /// The type of vGPUs that a GPU is divided into, if the operator says so.
    pub fn vgpus_of(&self, gpu: PciAddress) -> Option<&VgpuType> {
        self.vgpus.iter().find(|own| own.gpus.contains(&gpu) || own.gpus.is_empty())
    }
}
