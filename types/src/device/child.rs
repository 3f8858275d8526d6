//! A device for a child of a fork.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{BadRequest, DeviceRequest};

/// A device for a child of a fork, written as `vfork create --device` takes it: `[CHILD:]ROLE=ADDRESS[,mac=…]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ChildDevice {
    /// Which child of the fork, from 1; the first that lacks the role without it.
    pub child: Option<usize>,
    /// The device.
    pub device: DeviceRequest,
}

impl FromStr for ChildDevice {
    type Err = BadRequest;

    fn from_str(text: &str) -> Result<Self, BadRequest> {
        // A role has no colon.
        let before = text.split_once('=').map_or(text, |(before, _)| before);
        let Some((child, _)) = before.split_once(':') else {
            return Ok(Self { child: None, device: text.parse()? });
        };
        let number = child.parse().ok().filter(|number| *number > 0);
        let number = number.ok_or_else(|| BadRequest::Child(child.to_owned()))?;
        Ok(Self { child: Some(number), device: text[child.len() + 1..].parse()? })
    }
}

impl fmt::Display for ChildDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.child.map_or(Ok(()), |child| write!(f, "{child}:"))?;
        self.device.fmt(f)
    }
}

impl TryFrom<String> for ChildDevice {
    type Error = BadRequest;

    fn try_from(text: String) -> Result<Self, BadRequest> {
        text.parse()
    }
}

impl From<ChildDevice> for String {
    fn from(device: ChildDevice) -> Self {
        device.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_a_child_is_its_text() {
        for (text, child) in [
            ("nic=0000:17:00.2,mac=52:54:00:12:34:56", None),
            ("2:nic=0000:17:00.2,mac=52:54:00:12:34:56", Some(2)),
        ] {
            let device: ChildDevice = text.parse().unwrap();
            assert_eq!((device.child, device.device.role.as_str()), (child, "nic"));
            let json = serde_json::to_string(&device).unwrap();
            assert_eq!(json, format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<ChildDevice>(&json).unwrap(), device);
        }
        for (text, words) in [
            ("0:nic=17:00.2", "from 1"),
            ("x:nic=17:00.2", "from 1"),
            (":nic=17:00.2", "from 1"),
            ("1:nic", "names no device"),
            ("1:2:nic=17:00.2", "is not a role"),
        ] {
            let error = text.parse::<ChildDevice>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
