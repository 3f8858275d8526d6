//! Names, numbers and addresses, each a type of its own.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Text that is not a valid name or address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// Empty, or with white space or control characters in it.
    #[error(
        "{text:?} is not a valid {what}: expected at least one character, no white space and no control characters"
    )]
    Name {
        /// What it should name.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// Not `DDDD:BB:DD.F`.
    #[error("{0:?} is not a PCI address: expected DDDD:BB:DD.F in hexadecimal, for example 0000:3b:00.0")]
    Pci(String),
    /// Not `VVVV:DDDD`.
    #[error(
        "{0:?} is not a PCI vendor:device pair: expected two numbers of up to four hexadecimal digits, for example 10de:2330"
    )]
    PciId(String),
}

/// Written in files and messages as what `Display` prints, and read by `FromStr`.
macro_rules! written_as_text {
    ($type:ident) => {
        impl TryFrom<String> for $type {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> String {
                value.to_string()
            }
        }
    };
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(Arc<str>);

        impl $type {
            /// A name from text that is not empty and has neither white space nor control characters.
            ///
            /// # Errors
            /// [`IdError::Name`] for other text.
            pub fn new(text: impl AsRef<str>) -> Result<Self, IdError> {
                let text = text.as_ref();
                if text.is_empty() || text.chars().any(|c| c.is_whitespace() || c.is_control()) {
                    return Err(IdError::Name { what: $what, text: text.to_owned() });
                }
                Ok(Self(text.into()))
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl std::borrow::Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $type {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::new(text)
            }
        }

        written_as_text!($type);
    };
}

name!(
    /// A node (host) as the scheduler calls it; usually the short host name.
    NodeName,
    "node name"
);
name!(
    /// A virtual machine, unique in a fleet.
    VmName,
    "VM name"
);
name!(
    /// A virtual cluster, unique in a fleet.
    ClusterName,
    "cluster name"
);

name!(
    /// A switch, or several that count as one (a block, the spines of a pod).
    SwitchName,
    "switch name"
);

/// A NUMA node of a host, as the kernel numbers them (`/sys/devices/system/node/nodeN`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NumaId(pub u16);

/// A CPU socket (`physical_package_id`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SocketId(pub u16);

/// Memory in mebibytes (2^20 bytes).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MemoryMib(pub u64);

impl fmt::Display for NumaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for MemoryMib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0)
    }
}

/// A PCI function: `DDDD:BB:DD.F`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// Domain (segment); up to 32 bits behind VMD controllers.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device, 0 to 31.
    pub device: u8,
    /// Function, 0 to 7.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let mut parts = rest.split(':');
            let hex = |part: &str, digits: usize| {
                let valid =
                    !part.is_empty() && part.len() <= digits && part.bytes().all(|b| b.is_ascii_hexdigit());
                valid.then(|| u32::from_str_radix(part, 16).ok()).flatten()
            };
            let address = Self {
                domain: hex(parts.next()?, 8)?,
                bus: u8::try_from(hex(parts.next()?, 2)?).ok()?,
                device: u8::try_from(hex(parts.next()?, 2)?).ok()?,
                function: u8::try_from(hex(function, 1)?).ok()?,
            };
            (parts.next().is_none() && address.device < 32 && address.function < 8).then_some(address)
        };
        parse().ok_or_else(|| IdError::Pci(text.to_owned()))
    }
}

written_as_text!(PciAddress);

/// Vendor and device id of a PCI function: `10de:2330`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciId {
    /// Vendor, as the PCI-SIG assigned it.
    pub vendor: u16,
    /// Device, as the vendor assigned it.
    pub device: u16,
}

impl fmt::Display for PciId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:04x}", self.vendor, self.device)
    }
}

impl FromStr for PciId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let hex = |part: &str| {
            let part = part.strip_prefix("0x").unwrap_or(part);
            let digits = (1..=4).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit());
            digits.then(|| u16::from_str_radix(part, 16).ok()).flatten()
        };
        text.split_once(':')
            .and_then(|(vendor, device)| Some(Self { vendor: hex(vendor)?, device: hex(device)? }))
            .ok_or_else(|| IdError::PciId(text.to_owned()))
    }
}

written_as_text!(PciId);

/// A PCIe root port or root complex. Devices below the same one reach each other without crossing the CPU's own interconnect. Named
/// by the address of the root port (`0000:16:01.0`) or, for a device right on the root complex, by its bus (`pci0000:16`).
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PciRoot(pub Arc<str>);

impl fmt::Display for PciRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_round_trip_and_bad_ones_are_refused() {
        for text in ["0000:3b:00.0", "10000:e1:1f.7"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "3b:00.0",
            "0000:3b:20.0",
            "0000:3b:00.8",
            "0000:3b:00",
            "0000:3b:00.0.0",
            "0000:+b:00.0",
            "x",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
        assert_eq!("10de:2330".parse::<PciId>().unwrap().to_string(), "10de:2330");
        "10de".parse::<PciId>().unwrap_err();
    }

    #[test]
    fn names_have_no_white_space() {
        assert!(NodeName::new("n 1").is_err() && NodeName::new("").is_err());
        serde_json::from_str::<NodeName>("\"a\\nb\"").unwrap_err();
        assert_eq!(NodeName::new("n1").unwrap().as_str(), "n1");
    }
}
