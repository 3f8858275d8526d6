//! Which device a VM is to get: `ROLE=ADDRESS[,mac=…,vlan=…,trust=…,node-guid=…,port-guid=…,pkey=…]`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::address::BadAddress;
use super::identity::BadIdentity;
use super::{Identity, PciAddress};

/// Longest name of a role: QEMU's id of the device is made of it.
const MAX_ROLE: usize = 32;

/// A device for a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(try_from = "Unchecked")]
pub struct DeviceRequest {
    /// What it is to the VM: the same after a move, when the device is another one. A letter, then up to 31 letters, digits, `-` or `_`.
    pub role: String,
    /// Which one, such as `0000:17:00.2`.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub address: PciAddress,
    /// Its addresses.
    #[cfg_attr(feature = "schema", schema(required = false))]
    pub identity: Identity,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    role: String,
    address: PciAddress,
    #[serde(default)]
    identity: Identity,
}

impl TryFrom<Unchecked> for DeviceRequest {
    type Error = BadRequest;

    fn try_from(Unchecked { role, address, identity }: Unchecked) -> Result<Self, BadRequest> {
        check_role(&role)?;
        Ok(Self { role, address, identity })
    }
}

/// A text is no request for a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadRequest {
    /// Its form.
    #[error("{0:?} names no device; expected ROLE=ADDRESS, such as net0=0000:17:00.2,mac=52:54:00:12:34:56")]
    Form(String),
    /// Its role.
    #[error("{0:?} is not a role; expected a letter, then up to 31 letters, digits, '-' or '_'")]
    Role(String),
    /// Which child of a fork is to have it.
    #[error("{0:?} is not the number of a child; expected a number from 1 on, as in 2:net0=0000:17:00.2")]
    Child(String),
    /// Its address.
    #[error(transparent)]
    Address(#[from] BadAddress),
    /// One of its settings.
    #[error(transparent)]
    Identity(#[from] BadIdentity),
}

impl FromStr for DeviceRequest {
    type Err = BadRequest;

    fn from_str(text: &str) -> Result<Self, BadRequest> {
        let form = || BadRequest::Form(text.to_owned());
        let (role, rest) = text.split_once('=').ok_or_else(form)?;
        let mut parts = rest.split(',');
        let address = parts.next().unwrap_or_default().parse()?;
        check_role(role)?;
        let mut identity = Identity::default();
        for part in parts {
            let (key, value) = part.split_once('=').ok_or_else(form)?;
            identity.set(key, value)?;
        }
        Ok(Self { role: role.to_owned(), address, identity })
    }
}

/// Whether a text can be a role.
#[must_use]
pub fn is_role(role: &str) -> bool {
    check_role(role).is_ok()
}

fn check_role(role: &str) -> Result<(), BadRequest> {
    let first = role.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic());
    let rest = role.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    if first && rest && role.len() <= MAX_ROLE { Ok(()) } else { Err(BadRequest::Role(role.to_owned())) }
}

impl fmt::Display for DeviceRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Identity { mac, vlan, trust, node_guid, port_guid, pkey } = self.identity;
        write!(f, "{}={}", self.role, self.address)?;
        mac.map_or(Ok(()), |mac| write!(f, ",mac={mac}"))?;
        vlan.map_or(Ok(()), |vlan| write!(f, ",vlan={vlan}"))?;
        trust.map_or(Ok(()), |trust| write!(f, ",trust={}", if trust { "on" } else { "off" }))?;
        node_guid.map_or(Ok(()), |guid| write!(f, ",node-guid={guid}"))?;
        port_guid.map_or(Ok(()), |guid| write!(f, ",port-guid={guid}"))?;
        pkey.map_or(Ok(()), |pkey| write!(f, ",pkey={pkey:#06x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Guid;

    #[test]
    fn requests_are_read_and_written() {
        let full = "ib0=0000:17:00.2,mac=52:54:00:12:34:56,vlan=7,trust=on,node-guid=00:11:22:33:44:55:66:77,\
                    port-guid=00:11:22:33:44:55:66:78,pkey=0x8001";
        for text in [full, "gpu=0000:3b:00.0", "n-1_x=0000:17:00.2,vlan=0,trust=off"] {
            let request: DeviceRequest = text.parse().unwrap();
            assert_eq!(request.to_string(), text);
            let json = serde_json::to_string(&request).unwrap();
            assert_eq!(serde_json::from_str::<DeviceRequest>(&json).unwrap(), request, "{json}");
        }
        let short: DeviceRequest = "gpu=3b:00.0,node-guid=0011:2233:4455:6677".parse().unwrap();
        assert_eq!(short.identity.node_guid, Some(Guid(0x0011_2233_4455_6677)));
    }

    #[test]
    fn bad_requests_say_what_is_expected() {
        let cases = [
            ("gpu", "names no device"),
            ("=17:00.0", "is not a role"),
            ("9a=17:00.0", "is not a role"),
            ("a b=17:00.0", "is not a role"),
            ("gpu=17:00", "is not a PCI address"),
            ("n=17:00.0,mac", "names no device"),
            ("n=17:00.0,mac=01:00:5e:00:00:01", "the address of one station"),
            ("n=17:00.0,mac=00:00:00:00:00:00", "the address of one station"),
            ("n=17:00.0,mac=5254:0012:3456", "is not a MAC address"),
            ("n=17:00.0,vlan=4095", "0 (none) to 4094"),
            ("n=17:00.0,trust=yes", "on or off"),
            ("n=17:00.0,port-guid=0", "is not a GUID"),
            ("n=17:00.0,pkey=8000", "is not a P_Key"),
            ("n=17:00.0,speed=1", "is not a setting of a device"),
        ];
        for (text, words) in cases {
            let error = text.parse::<DeviceRequest>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
