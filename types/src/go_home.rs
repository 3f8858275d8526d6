//! What takes a guest home from a visit by itself.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What takes a guest home from a visit by itself; whichever comes first. Default: nothing does, and an operator takes it home.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct GoHome {
    /// This long after the node that it visits has taken it. Unit: milliseconds of that node's wall clock; at least 1,000.
    pub after_ms: Option<u64>,
    /// When its QEMU tells of this event there.
    pub on_event: Option<AwaitedEvent>,
    /// When its QEMU has used less than 5 % of one processor in every second of this time. Unit: milliseconds; 1,000 to 86,400,000.
    pub when_idle_ms: Option<u64>,
}

impl GoHome {
    /// Whether anything takes the guest home by itself.
    #[must_use]
    pub const fn is_some(&self) -> bool {
        self.after_ms.is_some() || self.on_event.is_some() || self.when_idle_ms.is_some()
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// A sentence that names the field, what was expected and what was found.
    pub(crate) fn validate(&self) -> Result<(), String> {
        if let Some(after) = self.after_ms.filter(|ms| *ms < 1000) {
            return Err(format!("go_home.after_ms: expected at least 1000, found {after}"));
        }
        if let Some(idle) = self.when_idle_ms.filter(|ms| !(1000..=86_400_000).contains(ms)) {
            return Err(format!("go_home.when_idle_ms: expected 1000 to 86400000, found {idle}"));
        }
        match &self.on_event {
            Some(event) if !event.has_name() => {
                Err(format!("go_home.on_event: expected the name of a QMP event, found {:?}", event.name))
            }
            _ => Ok(()),
        }
    }
}

/// A QMP event, and what its data must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AwaitedEvent {
    /// Its name, such as `VSERPORT_CHANGE`.
    pub name: String,
    /// Fields of its data, each with its value as text: `true`, `4096`, `port0`.
    #[serde(default)]
    pub data: BTreeMap<String, String>,
}

impl AwaitedEvent {
    /// Whether an event of this name, with this data, is the one.
    #[must_use]
    pub fn is(&self, name: &str, data: &serde_json::Value) -> bool {
        let text = |value: &serde_json::Value| {
            value.as_str().map_or_else(|| value.to_string(), std::borrow::ToOwned::to_owned)
        };
        let holds =
            |(key, wanted): (&String, &String)| data.get(key).is_some_and(|found| text(found) == *wanted);
        self.name == name && self.data.iter().all(holds)
    }

    fn has_name(&self) -> bool {
        let is_word = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        !self.name.is_empty() && self.name.chars().all(is_word)
    }
}

/// `NAME` or `NAME:KEY=VALUE,…`.
impl FromStr for AwaitedEvent {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        let (name, conditions) = word.split_once(':').unwrap_or((word, ""));
        let field = |field: &str| {
            let field = field.split_once('=').filter(|(key, _)| !key.is_empty());
            field.map(|(key, value)| (key.to_owned(), value.to_owned()))
        };
        let fields = conditions.split(',').filter(|_| !conditions.is_empty()).map(field);
        let event = fields.collect::<Option<_>>().map(|data| Self { name: name.to_owned(), data });
        event.filter(Self::has_name).ok_or_else(|| {
            format!("expected a QMP event, such as VSERPORT_CHANGE or VSERPORT_CHANGE:id=job,open=false, found {word:?}")
        })
    }
}

impl fmt::Display for AwaitedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        let fields: Vec<String> = self.data.iter().map(|(key, value)| format!("{key}={value}")).collect();
        if fields.is_empty() { Ok(()) } else { write!(f, ":{}", fields.join(",")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{MigrationSpec, Visit};

    #[test]
    fn what_takes_a_visitor_home_is_read_and_checked() {
        let event: AwaitedEvent = "VSERPORT_CHANGE:id=job,open=false".parse().unwrap();
        assert_eq!(event.to_string(), "VSERPORT_CHANGE:id=job,open=false");
        assert!(event.is("VSERPORT_CHANGE", &serde_json::json!({ "id": "job", "open": false })));
        assert!(!event.is("VSERPORT_CHANGE", &serde_json::json!({ "id": "job", "open": true })));
        assert!(!event.is("STOP", &serde_json::json!({ "id": "job", "open": false })));
        assert!("STOP".parse::<AwaitedEvent>().unwrap().is("STOP", &serde_json::Value::Null));
        for bad in ["", "stop", "STOP:", "STOP:id", "STOP:=1"] {
            assert!(bad.parse::<AwaitedEvent>().is_err() || bad == "STOP:", "{bad:?}");
        }
        let of = |visit, go_home| MigrationSpec { visit, go_home, ..MigrationSpec::default() }.validate();
        let soon = GoHome { after_ms: Some(60_000), ..GoHome::default() };
        assert_eq!(of(Visit::Go, soon.clone()), Ok(()));
        assert!(of(Visit::No, soon.clone()).unwrap_err().contains("goes for a visit"));
        assert!(of(Visit::Back, soon).unwrap_err().contains("goes for a visit"));
        let at_once = GoHome { when_idle_ms: Some(1), ..GoHome::default() };
        assert!(of(Visit::Go, at_once).unwrap_err().contains("found 1"));
    }
}
