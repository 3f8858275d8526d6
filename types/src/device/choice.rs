//! A device as a request names it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{BadRequest, DeviceRequest};

/// A device for a VM, written as `vmove migrate --device` takes it: `ROLE=ADDRESS[,mac=…]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(value_type = String))]
#[serde(try_from = "String", into = "String")]
pub struct DeviceChoice(pub DeviceRequest);

impl FromStr for DeviceChoice {
    type Err = BadRequest;

    fn from_str(text: &str) -> Result<Self, BadRequest> {
        text.parse().map(Self)
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = BadRequest;

    fn try_from(text: String) -> Result<Self, BadRequest> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_its_text() {
        let text = "net0=0000:17:00.2,mac=52:54:00:12:34:56,pkey=0x8001";
        let choice: DeviceChoice = text.parse().unwrap();
        let json = serde_json::to_string(&choice).unwrap();
        assert_eq!(json, format!("\"{text}\""));
        assert_eq!(serde_json::from_str::<DeviceChoice>(&json).unwrap(), choice);
        serde_json::from_str::<DeviceChoice>("\"net0\"").unwrap_err();
    }
}
