//! `[grants]`: whose grants this node takes.

use serde::Deserialize;
use vmove_grant::PublicKey;

use super::{ConfigError, value};

/// Bridges, and whether VMs need a grant of one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct GrantPolicy {
    /// Public keys of the bridges whose grants are taken. Without one, nothing is checked.
    pub keys: Vec<PublicKey>,
    /// Whether a VM without a grant is refused. Otherwise it is counted.
    pub required: bool,
}

impl GrantPolicy {
    /// The policy, if it can be met.
    pub(super) fn checked(self) -> Result<Self, ConfigError> {
        if self.required && self.keys.is_empty() {
            let why = "expected keys of bridges, found none: no VM could be started".to_owned();
            return Err(value("grants.required", why));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_checked_and_nobody_is_locked_out_by_mistake() {
        let read = |text: &str| toml::from_str::<GrantPolicy>(text).map_err(|error| error.to_string());
        assert_eq!(read("").unwrap().checked().unwrap(), GrantPolicy::default());
        let error = read("required = true").unwrap().checked().unwrap_err().to_string();
        assert!(error.contains("grants.required") && error.contains("expected keys"), "{error}");
        let error = read("keys = [\"short\"]").unwrap_err();
        assert!(error.contains("\"short\" is no public key"), "{error}");
    }
}
