//! Addresses by which a device is known to others: what a guest takes along when its device is another one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A MAC address of one station.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mac(pub [u8; 6]);

/// A GUID of an InfiniBand node or port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Guid(pub u64);

/// A text is no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not a {what}; expected {expected}")]
pub struct BadIdentity {
    /// What it should be.
    pub what: &'static str,
    /// What was found.
    pub found: String,
    /// How one looks.
    pub expected: &'static str,
}

/// What a virtual function is to be; what is `None` stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Identity {
    /// MAC address.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub mac: Option<Mac>,
    /// VLAN that the card puts its frames into, 1 to 4094; 0: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// Whether the guest may change its address and receive all traffic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust: Option<bool>,
    /// InfiniBand: GUID of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub node_guid: Option<Guid>,
    /// InfiniBand: GUID of the port.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub port_guid: Option<Guid>,
    /// InfiniBand: partition key; the highest bit says full membership.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pkey: Option<u16>,
}

impl Identity {
    /// Whether nothing is to be set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// These settings, and for each that there is none of that of `others`.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            mac: self.mac.or(others.mac),
            vlan: self.vlan.or(others.vlan),
            trust: self.trust.or(others.trust),
            node_guid: self.node_guid.or(others.node_guid),
            port_guid: self.port_guid.or(others.port_guid),
            pkey: self.pkey.or(others.pkey),
        }
    }

    /// Sets one field by its name in a command line: `mac`, `vlan`, `trust`, `node-guid`, `port-guid`, `pkey`.
    ///
    /// # Errors
    /// [`BadIdentity`].
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), BadIdentity> {
        let bad = |what, expected| BadIdentity { what, found: value.to_owned(), expected };
        match key {
            "mac" => self.mac = Some(value.parse()?),
            "vlan" => {
                let vlan = value.parse().ok().filter(|vlan| *vlan < 4095);
                self.vlan = Some(vlan.ok_or_else(|| bad("VLAN", "a number from 0 (none) to 4094"))?);
            }
            "trust" => {
                self.trust = Some(match value {
                    "on" => true,
                    "off" => false,
                    _ => return Err(bad("trust", "on or off")),
                });
            }
            "node-guid" => self.node_guid = Some(value.parse()?),
            "port-guid" => self.port_guid = Some(value.parse()?),
            "pkey" => {
                let digits = value.strip_prefix("0x").unwrap_or(value);
                // 0 and 0x8000 stand for no partition.
                let pkey = u16::from_str_radix(digits, 16).ok().filter(|pkey| pkey & 0x7fff != 0);
                self.pkey = Some(pkey.ok_or_else(|| bad("P_Key", "a hexadecimal number like 0x8001"))?);
            }
            _ => {
                let expected = "mac, vlan, trust, node-guid, port-guid or pkey";
                return Err(BadIdentity { what: "setting of a device", found: key.to_owned(), expected });
            }
        }
        Ok(())
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = BadIdentity;

    fn from_str(text: &str) -> Result<Self, BadIdentity> {
        let bytes = bytes(text).filter(|bytes: &[u8; 6]| bytes[0] & 1 == 0 && *bytes != [0; 6]);
        let expected = "the address of one station, like 52:54:00:12:34:56";
        bytes.map(Self).ok_or_else(|| BadIdentity { what: "MAC address", found: text.to_owned(), expected })
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.to_be_bytes().map(|byte| format!("{byte:02x}"));
        f.write_str(&bytes.join(":"))
    }
}

impl FromStr for Guid {
    type Err = BadIdentity;

    /// `00:11:22:33:44:55:66:77`, as `ip` writes it, or `0011:2233:4455:6677`, as the kernel does.
    fn from_str(text: &str) -> Result<Self, BadIdentity> {
        let by_four = || {
            let groups: Vec<u16> = text
                .split(':')
                .map(|part| (part.len() == 4).then(|| u16::from_str_radix(part, 16).ok()).flatten())
                .collect::<Option<_>>()?;
            let [a, b, c, d] = <[u16; 4]>::try_from(groups).ok()?.map(u64::from);
            Some(a << 48 | b << 32 | c << 16 | d)
        };
        let guid = bytes(text).map(u64::from_be_bytes).or_else(by_four).filter(|guid| *guid != 0);
        let expected = "eight bytes like 00:11:22:33:44:55:66:77, not all 0";
        guid.map(Self).ok_or_else(|| BadIdentity { what: "GUID", found: text.to_owned(), expected })
    }
}

/// Bytes of two digits with colons between them.
fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let byte = |part: &str| {
        let valid = part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
        valid.then(|| u8::from_str_radix(part, 16).ok()).flatten()
    };
    let all: Vec<u8> = text.split(':').map(byte).collect::<Option<_>>()?;
    all.try_into().ok()
}

macro_rules! as_text {
    ($($kind:ty),*) => {$(
        impl TryFrom<String> for $kind {
            type Error = BadIdentity;

            fn try_from(text: String) -> Result<Self, BadIdentity> {
                text.parse()
            }
        }

        impl From<$kind> for String {
            fn from(value: $kind) -> Self {
                value.to_string()
            }
        }
    )*};
}
as_text!(Mac, Guid);

#[cfg(test)]
mod tests {
    use crate::device::DeviceRequest;

    #[test]
    fn what_was_asked_for_takes_the_place_of_what_the_guest_has() {
        let identity = |text: &str| format!("n=1:0.0{text}").parse::<DeviceRequest>().unwrap().identity;
        let guest = identity(",mac=52:54:00:00:00:01,vlan=7");
        assert_eq!(identity("").or(guest), guest);
        let asked = identity(",vlan=8,trust=on").or(guest);
        assert_eq!(asked, identity(",mac=52:54:00:00:00:01,vlan=8,trust=on"));
    }
}
