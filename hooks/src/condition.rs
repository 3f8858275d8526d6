//! `where`: conditions on the data of an event.

use glob::Pattern;
use serde_json::{Map, Value};

/// What a field must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// This text, number or truth value.
    Is(Value),
    /// Text that fits a pattern with `*` and `?`.
    Like(Pattern),
    /// One of these.
    AnyOf(Vec<Condition>),
    /// A number within these, both included.
    Range {
        /// The least.
        at_least: Option<i64>,
        /// The most.
        at_most: Option<i64>,
    },
    /// An object with these fields.
    Fields(Fields),
}

/// Conditions by the name of the field.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields(Vec<(String, Condition)>);

/// A condition that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unmet {
    field: String,
    why: String,
}

impl std::fmt::Display for Unmet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.field, self.why)
    }
}

impl Fields {
    /// Reads `where`. The error names the key below it.
    pub(crate) fn read(table: &Map<String, Value>) -> Result<Self, (String, String)> {
        let one = |(name, value): (&String, &Value)| match Condition::read(value) {
            Ok(condition) => Ok((name.clone(), condition)),
            Err((below, why)) => {
                Err((if below.is_empty() { name.clone() } else { format!("{name}.{below}") }, why))
            }
        };
        table.iter().map(one).collect::<Result<_, _>>().map(Self)
    }

    /// Whether all hold.
    pub(crate) fn check(&self, data: &Map<String, Value>) -> Result<(), Unmet> {
        self.0.iter().try_for_each(|(name, condition)| condition.check(name, data.get(name)))
    }
}

impl Condition {
    fn read(value: &Value) -> Result<Self, (String, String)> {
        let at_top = |why: String| (String::new(), why);
        Ok(match value {
            Value::String(text) if text.contains(['*', '?']) => Self::Like(pattern(text).map_err(at_top)?),
            Value::String(_) | Value::Number(_) | Value::Bool(_) => Self::Is(value.clone()),
            Value::Array(all) => Self::AnyOf(all.iter().map(Self::read).collect::<Result<_, _>>()?),
            Value::Object(table) if table.keys().any(|key| key == "at-least" || key == "at-most") => {
                if let Some(other) = table.keys().find(|key| *key != "at-least" && *key != "at-most") {
                    return Err((other.clone(), "expected at-least and at-most alone".to_owned()));
                }
                let number = |key: &str| match table.get(key) {
                    None => Ok(None),
                    Some(value) => value
                        .as_i64()
                        .map(Some)
                        .ok_or_else(|| (key.to_owned(), format!("expected a whole number, found {value}"))),
                };
                Self::Range { at_least: number("at-least")?, at_most: number("at-most")? }
            }
            Value::Object(table) => Self::Fields(Fields::read(table)?),
            Value::Null => {
                return Err(at_top("expected a text, a number, true or false, found nothing".to_owned()));
            }
        })
    }

    fn check(&self, field: &str, found: Option<&Value>) -> Result<(), Unmet> {
        let told = || found.map_or_else(|| "nothing".to_owned(), ToString::to_string);
        let unmet = |wanted: String| Unmet {
            field: field.to_owned(),
            why: format!("expected {wanted}, found {}", told()),
        };
        let holds = |yes: bool, wanted: String| if yes { Ok(()) } else { Err(unmet(wanted)) };
        match self {
            Self::Is(value) => holds(found == Some(value), value.to_string()),
            Self::Like(pattern) => {
                let text = found.and_then(Value::as_str);
                holds(text.is_some_and(|text| pattern.matches(text)), format!("\"{pattern}\""))
            }
            Self::AnyOf(all) => {
                let any = all.iter().any(|one| one.check(field, found).is_ok());
                holds(any, format!("one of {} values", all.len()))
            }
            Self::Range { at_least, at_most } => {
                let number = found.and_then(Value::as_i64);
                let within =
                    number.is_some_and(|n| at_least.is_none_or(|l| n >= l) && at_most.is_none_or(|m| n <= m));
                holds(within, format!("a number {}", range(*at_least, *at_most)))
            }
            Self::Fields(fields) => match found {
                Some(Value::Object(table)) => fields
                    .check(table)
                    .map_err(|below| Unmet { field: format!("{field}.{}", below.field), ..below }),
                _ => Err(unmet("a table".to_owned())),
            },
        }
    }
}

fn range(at_least: Option<i64>, at_most: Option<i64>) -> String {
    match (at_least, at_most) {
        (Some(least), Some(most)) => format!("from {least} to {most}"),
        (Some(least), None) => format!("of at least {least}"),
        (None, Some(most)) => format!("of at most {most}"),
        (None, None) => "of any size".to_owned(),
    }
}

/// A pattern with `*`, `?` and `[...]`.
pub(crate) fn pattern(text: &str) -> Result<Pattern, String> {
    Pattern::new(text)
        .map_err(|error| format!("expected a pattern such as \"web-*\", found \"{text}\" ({error})"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: &Value) -> Fields {
        Fields::read(value.as_object().unwrap()).unwrap()
    }

    #[test]
    fn conditions_hold_or_say_what_was_found() {
        let wanted = fields(&json!({
            "recipient": "hypervisor",
            "action": ["ignore", "inject"],
            "device": "virtio*",
            "count": {"at-least": 2, "at-most": 9},
            "flags": {"action-required": true},
        }));
        let data = json!({"recipient": "hypervisor", "action": "inject", "device": "virtio0", "count": 9,
                          "flags": {"action-required": true, "recursive": false}, "more": 1});
        assert_eq!(wanted.check(data.as_object().unwrap()), Ok(()));
        for (key, value, said) in [
            ("recipient", json!("guest"), "recipient: expected \"hypervisor\", found \"guest\""),
            ("count", json!(1), "count: expected a number from 2 to 9, found 1"),
            ("device", json!("ide0"), "device: expected \"virtio*\", found \"ide0\""),
            ("action", json!("fatal"), "action: expected one of 2 values, found \"fatal\""),
            ("flags", json!({"recursive": true}), "flags.action-required: expected true, found nothing"),
        ] {
            let mut other = data.as_object().unwrap().clone();
            other.insert(key.to_owned(), value);
            assert_eq!(wanted.check(&other).unwrap_err().to_string(), said);
        }
    }

    #[test]
    fn a_condition_that_is_none_is_named() {
        let error = |value: Value| Fields::read(value.as_object().unwrap()).unwrap_err();
        assert_eq!(error(json!({"a": {"b": null}})).0, "a.b");
        assert_eq!(error(json!({"a": {"at-least": "2"}})).0, "a.at-least");
        assert_eq!(error(json!({"a": {"at-least": 2, "more": 1}})).0, "a.more");
        assert!(error(json!({"a": "[*"})).1.contains("expected a pattern"));
    }
}
