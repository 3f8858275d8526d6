//! What tells devices of a node apart: PCI addresses, and names of what is no PCI function.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::{IdError, PciAddress, written_as_text};

/// Before the address of a remote GPU.
const REMOTE: &str = "remote:";

/// The address of a device, as text: `0000:3b:00.0`, `0000:3b:00.0/gi3/ci0`, a UUID, or `remote:10.0.0.9:8308/0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum DeviceAddress {
    /// A PCI function.
    Pci(PciAddress),
    /// A MIG slice.
    Slice {
        /// Its GPU.
        gpu: PciAddress,
        /// Number of the GPU instance.
        gpu_instance: u16,
        /// Number of the compute instance in it.
        compute_instance: u16,
    },
    /// A mediated device, by the bytes of its UUID.
    Mediated(u128),
    /// A GPU that a service in the network gives to guests. It is the same one for all nodes that list it.
    Remote {
        /// Where the service listens.
        server: SocketAddr,
        /// Number of the GPU there.
        number: u16,
    },
}

impl DeviceAddress {
    /// The address of a PCI function; none for everything else.
    #[must_use]
    pub fn pci(self) -> Option<PciAddress> {
        match self {
            Self::Pci(address) => Some(address),
            _ => None,
        }
    }

    /// The UUID for an instance of a type that a GPU can make and has not made yet: the same each time, so that a lease can name it. It is of
    /// version 8 (RFC 9562), whose bits are free.
    #[must_use]
    pub fn of_instance(gpu: PciAddress, kind: &str, number: u16) -> Self {
        // FNV-1a, of 60 bits.
        let hash = kind.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let function = u128::from(gpu.device) << 3 | u128::from(gpu.function);
        let place = u128::from(gpu.domain) << 16 | u128::from(gpu.bus) << 8 | function;
        let (version, variant) = (8_u128 << 76, 2_u128 << 62);
        // 48 bits of place, 12 of the number, 60 of the type.
        let number = u128::from(number & 0xfff) << 64;
        Self::Mediated(
            place << 80 | version | number | variant | u128::from(hash >> 4) & 0x3fff_ffff_ffff_ffff,
        )
    }
}

impl From<PciAddress> for DeviceAddress {
    fn from(address: PciAddress) -> Self {
        Self::Pci(address)
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pci(address) => address.fmt(f),
            Self::Slice { gpu, gpu_instance, compute_instance } => {
                write!(f, "{gpu}/gi{gpu_instance}/ci{compute_instance}")
            }
            Self::Mediated(uuid) => {
                let part = |from: u32, digits: u32| uuid >> (from * 4) & ((1 << (digits * 4)) - 1);
                let (a, b, c, d, e) = (part(24, 8), part(20, 4), part(16, 4), part(12, 4), part(0, 12));
                write!(f, "{a:08x}-{b:04x}-{c:04x}-{d:04x}-{e:012x}")
            }
            Self::Remote { server, number } => write!(f, "{REMOTE}{server}/{number}"),
        }
    }
}

impl FromStr for DeviceAddress {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        if let Ok(address) = text.parse::<PciAddress>() {
            return Ok(Self::Pci(address));
        }
        let remote = || {
            let (server, number) = text.strip_prefix(REMOTE)?.rsplit_once('/')?;
            Some(Self::Remote { server: server.parse().ok()?, number: number.parse().ok()? })
        };
        let slice = || {
            let mut parts = text.split('/');
            let gpu = parts.next()?.parse().ok()?;
            let gpu_instance = parts.next()?.strip_prefix("gi")?.parse().ok()?;
            let compute_instance = parts.next()?.strip_prefix("ci")?.parse().ok()?;
            parts.next().is_none().then_some(Self::Slice { gpu, gpu_instance, compute_instance })
        };
        let found = remote().or_else(slice).or_else(|| uuid(text).map(Self::Mediated));
        found.ok_or_else(|| IdError::Device(text.to_owned()))
    }
}

fn uuid(text: &str) -> Option<u128> {
    let lengths: Vec<usize> = text.split('-').map(str::len).collect();
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let good = lengths == [8, 4, 4, 4, 12] && digits.bytes().all(|b| b.is_ascii_hexdigit());
    good.then(|| u128::from_str_radix(&digits, 16).ok()).flatten()
}

written_as_text!(DeviceAddress);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_address_is_read_as_it_is_written() {
        for text in [
            "0000:3b:00.0",
            "0000:3b:00.0/gi3/ci0",
            "c9a5d1c8-0000-4000-8000-00000000000f",
            "remote:10.0.0.9:8308/0",
            "remote:[fd00::9]:8308/3",
        ] {
            assert_eq!(text.parse::<DeviceAddress>().unwrap().to_string(), text);
        }
        for bad in [
            "",
            "3b",
            "0000:3b:00.0/gi3",
            "0000:3b:00.0/gi3/ci0/x",
            "remote:host:1/0",
            "remote:10.0.0.9/0",
            "c9a5d1c8",
        ] {
            let error = bad.parse::<DeviceAddress>().unwrap_err().to_string();
            assert!(error.contains("expected a PCI address"), "{error}");
        }
    }

    #[test]
    fn instances_that_do_not_exist_yet_have_names_of_their_own() {
        let gpu = |text: &str| text.parse::<PciAddress>().unwrap();
        let mut all = std::collections::BTreeSet::new();
        for (address, kind) in [
            ("0000:65:00.0", "nvidia-63"),
            ("0000:65:00.0", "nvidia-64"),
            ("0000:65:00.4", "nvidia-63"),
            ("0001:65:00.0", "nvidia-63"),
        ] {
            all.extend((0..16).map(|number| DeviceAddress::of_instance(gpu(address), kind, number)));
        }
        assert_eq!(all.len(), 64);
        let one = DeviceAddress::of_instance(gpu("0000:65:00.0"), "nvidia-63", 5).to_string();
        assert!(one.starts_with("00000000-6500-8005-") && "89ab".contains(&one[19..20]), "{one}");
        assert_eq!(one.parse::<DeviceAddress>().unwrap().to_string(), one);
    }
}
