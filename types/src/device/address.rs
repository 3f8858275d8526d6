//! Addresses of PCI functions.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Address of a PCI function: `0000:17:00.2`; without the domain, that is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    slot: u8,
    function: u8,
}

impl PciAddress {
    /// Whether two functions are of one card.
    #[must_use]
    pub fn same_slot(self, other: Self) -> bool {
        (self.domain, self.bus, self.slot) == (other.domain, other.bus, other.slot)
    }
}

/// A text is not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a PCI address; expected one like 0000:17:00.2")]
pub struct BadAddress(pub String);

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.slot, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let parse = || {
            let hex = |part: &str, digits: usize| {
                let valid = (1..=digits).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit());
                valid.then(|| u32::from_str_radix(part, 16).ok()).flatten()
            };
            let (rest, function) = text.rsplit_once('.')?;
            let mut parts = rest.rsplit(':');
            let slot = u8::try_from(hex(parts.next()?, 2)?).ok()?;
            let bus = u8::try_from(hex(parts.next()?, 2)?).ok()?;
            let domain = parts.next().map_or(Some(0), |part| hex(part, 8))?;
            let function = u8::try_from(hex(function, 1)?).ok()?;
            let valid = parts.next().is_none() && slot < 32 && function < 8;
            valid.then_some(Self { domain, bus, slot, function })
        };
        parse().ok_or_else(|| BadAddress(text.to_owned()))
    }
}

impl TryFrom<String> for PciAddress {
    type Error = BadAddress;

    fn try_from(text: String) -> Result<Self, BadAddress> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, written) in [
            ("0000:17:00.2", "0000:17:00.2"),
            ("17:1f.7", "0000:17:1f.7"),
            ("10000:E1:00.0", "10000:e1:00.0"),
        ] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), written);
        }
        for bad in [
            "",
            "17:00",
            "17:20.0",
            "17:00.8",
            "0:0:17:00.0",
            "x:17:00.0",
            "0000:17:00.",
            "0000::00.1",
            "é:0.0",
        ] {
            let error = bad.parse::<PciAddress>().unwrap_err();
            assert_eq!(error, BadAddress(bad.to_owned()));
        }
        let [one, two, other] =
            ["17:00.0", "17:00.1", "17:01.0"].map(|text| text.parse::<PciAddress>().unwrap());
        assert!(one.same_slot(two) && !one.same_slot(other));
    }
}
