//! Names, numbers and addresses, each a type of its own.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Text that is not a valid name or address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// Characters or a form that such a name cannot have.
    #[error("{text:?} is not a valid {what}: expected {expected}")]
    Name {
        /// What it should name.
        what: &'static str,
        /// The text.
        text: String,
        /// Which texts are valid.
        expected: &'static str,
    },
    /// Not `DDDD:BB:DD.F`.
    #[error("{0:?} is not a PCI address: expected DDDD:BB:DD.F in hexadecimal, for example 0000:3b:00.0")]
    Pci(String),
    /// Not `VVVV:DDDD`.
    #[error(
        "{0:?} is not a PCI vendor:device pair: expected two numbers of up to four hexadecimal digits, for example 10de:2330"
    )]
    PciId(String),
    /// Not the address of a device.
    #[error(
        "{0:?} is not the address of a device: expected a PCI address (0000:3b:00.0), a MIG slice (0000:3b:00.0/gi3/ci0), the UUID of a mediated device, or a remote GPU (remote:10.0.0.9:8308/0)"
    )]
    Device(String),
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

pub(crate) use written_as_text;

/// Which texts name something.
struct Rule {
    /// In words.
    expected: &'static str,
    accepts: fn(&str) -> bool,
}

/// Most bytes of a name: those of a DNS name.
const MOST_BYTES: usize = 253;

/// A host name by RFC 1123, in which `_` may stand as well: Slurm takes it. Such a name is no option of a program.
const HOST_NAME: Rule = Rule {
    expected: "a host name: at most 253 of A-Z a-z 0-9 - _ in parts of 1 to 63 that are separated by dots; no part begins or ends with -",
    accepts: |text| text.len() <= MOST_BYTES && text.split('.').all(is_host_label),
};

/// A name that is neither an option of a program, nor a path, nor a list.
const PLAIN_NAME: Rule = Rule {
    expected: "1 to 253 of A-Z a-z 0-9 . _ -, of which the first is a letter or a digit",
    accepts: |text| {
        text.len() <= MOST_BYTES
            && text.starts_with(|first: char| first.is_ascii_alphanumeric())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    },
};

/// A name that is only shown and compared.
const SHOWN_NAME: Rule = Rule {
    expected: "at least one character, no white space and no control characters",
    accepts: |text| !text.is_empty() && !text.chars().any(|c| c.is_whitespace() || c.is_control()),
};

fn is_host_label(label: &str) -> bool {
    (1..=63).contains(&label.len())
        && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
        && !label.starts_with('-')
        && !label.ends_with('-')
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal, $rule:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(Arc<str>);

        impl $type {
            /// A name from text.
            ///
            /// # Errors
            /// [`IdError::Name`], which says what was expected.
            pub fn new(text: impl AsRef<str>) -> Result<Self, IdError> {
                let text = text.as_ref();
                if ($rule.accepts)(text) {
                    return Ok(Self(text.into()));
                }
                Err(IdError::Name { what: $what, text: text.to_owned(), expected: $rule.expected })
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
    "node name",
    HOST_NAME
);
name!(
    /// A virtual machine, unique in a fleet.
    VmName,
    "VM name",
    PLAIN_NAME
);
name!(
    /// A virtual cluster, unique in a fleet.
    ClusterName,
    "cluster name",
    PLAIN_NAME
);

name!(
    /// A switch, or several that count as one (a block, the spines of a pod).
    SwitchName,
    "switch name",
    SHOWN_NAME
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
    fn no_name_is_an_option_a_path_or_a_list() {
        let long = "x".repeat(64);
        for bad in
            ["", "n 1", "-oProxyCommand=x", "a,b", "a/b", "a=b", "n[1-3]", "\u{e4}", "a\nb", "$x", "a:1", "-"]
        {
            NodeName::new(bad).unwrap_err();
            VmName::new(bad).unwrap_err();
            ClusterName::new(bad).unwrap_err();
        }
        for bad in ["a..b", ".a", "a.", "a-", "a.-b", &long, &format!("{}a", "a.".repeat(127))] {
            NodeName::new(bad).unwrap_err();
        }
        for good in ["n1", "gpu_01", "node-7.example.org", "7", &long[1..]] {
            assert_eq!(NodeName::new(good).unwrap().as_str(), good);
            VmName::new(good).unwrap();
        }
        let error = serde_json::from_str::<NodeName>("\"-v\"").unwrap_err().to_string();
        assert!(error.contains("\"-v\" is not a valid node name: expected a host name"), "{error}");
        assert!(SwitchName::new("s 1").is_err() && SwitchName::new("").is_err());
        SwitchName::new("S-0002c903:spine").unwrap();
    }
}
