//! Command templates: command lines of VMs that an operator has written, and the few words in them that a request fills in.
//!
//! A value becomes a part of one argument and stays there: no shell reads it, and its characters are such that QEMU finds no further
//! option in it.

use std::collections::BTreeMap;

use serde::Deserialize;

/// What the lease or the node's daemon fills in.
const FILLED_IN_LATER: [&str; 6] = ["vcpus", "memory_mib", "devices", "remote_gpus", "name", "vmdir"];
/// Most bytes of a name as a value.
const LONGEST_NAME: usize = 64;

/// A template.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Template {
    /// QEMU and its arguments; `{FIELD}` stands for the value of a field.
    command: Vec<String>,
    /// Fields, which every request must give.
    #[serde(default)]
    fields: BTreeMap<String, Field>,
}

/// Which values a field takes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields, tag = "is")]
pub enum Field {
    /// A name: letters, digits and `. _ -`, of which the first is a letter or a digit.
    Name,
    /// A whole number.
    Number {
        /// The smallest.
        least: u64,
        /// The largest.
        most: u64,
    },
    /// One of these words.
    Choice {
        /// The words.
        of: Vec<String>,
    },
}

/// Why a template cannot be used, or not with these values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// No such template.
    #[error("expected the name of a template ({known}), found {found:?}")]
    Unknown {
        /// What was asked for.
        found: String,
        /// The names of all.
        known: String,
    },
    /// A field has no value.
    #[error("template {template} has a field {field:?}: expected {expected}, found no value")]
    Missing {
        /// The template.
        template: String,
        /// The field.
        field: String,
        /// Its values.
        expected: String,
    },
    /// A value for a field that does not exist.
    #[error("template {template} has no field {field:?}: expected one of {known}")]
    NoSuchField {
        /// The template.
        template: String,
        /// The field of the request.
        field: String,
        /// The fields of the template.
        known: String,
    },
    /// A value that the field does not take.
    #[error("field {field:?} of template {template}: expected {expected}, found {found:?}")]
    Value {
        /// The template.
        template: String,
        /// The field.
        field: String,
        /// Its values.
        expected: String,
        /// The value of the request.
        found: String,
    },
    /// The template itself contradicts itself.
    #[error("[templates.{template}]: {reason}")]
    Wrong {
        /// The template.
        template: String,
        /// What is wrong, and what was expected.
        reason: String,
    },
}

impl Field {
    fn expected(&self) -> String {
        match self {
            Self::Name => {
                format!("1 to {LONGEST_NAME} of A-Z a-z 0-9 . _ -, of which the first is a letter or a digit")
            }
            Self::Number { least, most } => format!("a whole number from {least} to {most}"),
            Self::Choice { of } => format!("one of {}", of.join(", ")),
        }
    }

    /// The text that stands for a value; none, if the field does not take it.
    fn text(&self, value: &str) -> Option<String> {
        match self {
            Self::Name => {
                let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
                let good = value.starts_with(|first: char| first.is_ascii_alphanumeric())
                    && value.len() <= LONGEST_NAME
                    && value.bytes().all(plain);
                good.then(|| value.to_owned())
            }
            // Written anew: `+7` and `007` are 7.
            Self::Number { least, most } => {
                let number = value.parse::<u64>().ok().filter(|number| (*least..=*most).contains(number))?;
                Some(number.to_string())
            }
            Self::Choice { of } => of.iter().find(|word| *word == value).cloned(),
        }
    }
}

/// All templates of a bridge, by name.
#[derive(Debug, Clone, Default)]
pub struct Templates(BTreeMap<String, Template>);

impl Templates {
    /// Checks templates: each has a program, and everything in braces is a field.
    ///
    /// # Errors
    /// [`TemplateError::Wrong`].
    pub fn new(templates: BTreeMap<String, Template>) -> Result<Self, TemplateError> {
        for (name, template) in &templates {
            let wrong = |reason: String| TemplateError::Wrong { template: name.clone(), reason };
            template.check().map_err(wrong)?;
        }
        Ok(Self(templates))
    }

    /// The command line of a template with these values. What the lease has is not filled in yet.
    ///
    /// # Errors
    /// There is no such template, or it does not take these values.
    pub fn fill(&self, name: &str, values: &BTreeMap<String, String>) -> Result<Vec<String>, TemplateError> {
        let template = self
            .0
            .get(name)
            .ok_or_else(|| TemplateError::Unknown { found: name.to_owned(), known: listed(self.0.keys()) })?;
        if let Some(field) = values.keys().find(|field| !template.fields.contains_key(*field)) {
            return Err(TemplateError::NoSuchField {
                template: name.to_owned(),
                field: field.clone(),
                known: listed(template.fields.keys()),
            });
        }
        let mut texts = BTreeMap::new();
        for (field, kind) in &template.fields {
            let (template, expected) = (name.to_owned(), kind.expected());
            let Some(value) = values.get(field) else {
                return Err(TemplateError::Missing { template, field: field.clone(), expected });
            };
            let text = kind.text(value).ok_or_else(|| TemplateError::Value {
                template,
                field: field.clone(),
                expected,
                found: value.chars().take(LONGEST_NAME).collect(),
            })?;
            texts.insert(field.as_str(), text);
        }
        Ok(template.command.iter().map(|word| filled(word, &texts)).collect())
    }
}

impl Template {
    fn check(&self) -> Result<(), String> {
        let Some(program) = self.command.first() else {
            return Err("expected a command: QEMU and its arguments".to_owned());
        };
        if placeholders(program).next().is_some() {
            return Err(format!("expected a program, found {program:?}: requests do not choose it"));
        }
        for (name, field) in &self.fields {
            if FILLED_IN_LATER.contains(&name.as_str()) || !is_field_name(name) {
                return Err(format!(
                    "field {name:?}: expected a name of a-z 0-9 _ that begins with a letter and is none of {}",
                    FILLED_IN_LATER.join(", ")
                ));
            }
            match field {
                Field::Number { least, most } if least > most => {
                    return Err(format!(
                        "field {name:?}: expected least up to most, found {least} and {most}"
                    ));
                }
                Field::Choice { of } if of.is_empty() => {
                    return Err(format!("field {name:?}: expected at least one word to choose"));
                }
                _ => {}
            }
        }
        let known = |name: &str| self.fields.contains_key(name) || FILLED_IN_LATER.contains(&name);
        match self.command.iter().flat_map(|word| placeholders(word)).find(|name| !known(name)) {
            Some(name) => Err(format!(
                "{{{name}}} is no field: expected one of {}",
                listed(self.fields.keys().map(String::as_str).chain(FILLED_IN_LATER))
            )),
            None => Ok(()),
        }
    }
}

/// Names, for a message.
fn listed(names: impl Iterator<Item = impl AsRef<str>>) -> String {
    let names: Vec<String> = names.map(|name| name.as_ref().to_owned()).collect();
    if names.is_empty() { "there is none".to_owned() } else { names.join(", ") }
}

fn is_field_name(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_lowercase())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// The names in braces. Other braces, as those of JSON, are left as they are.
fn placeholders(word: &str) -> impl Iterator<Item = &str> {
    word.split('{')
        .skip(1)
        .filter_map(|rest| rest.split_once('}'))
        .map(|(name, _)| name)
        .filter(|name| is_field_name(name))
}

/// A word with the values of its fields. Values have no braces: none of them is taken for a field.
fn filled(word: &str, texts: &BTreeMap<&str, String>) -> String {
    texts.iter().fold(word.to_owned(), |word, (field, text)| word.replace(&format!("{{{field}}}"), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn templates(text: &str) -> Result<Templates, TemplateError> {
        Templates::new(toml::from_str(text).unwrap())
    }

    const SMALL: &str = r#"
        [small]
        command = ["qemu", "-m", "{memory_mib}", "-drive", "file=/shared/{disk},format={format}", "-smp", "{cores}", "{devices}"]
        [small.fields]
        disk = { is = "name" }
        format = { is = "choice", of = ["raw", "qcow2"] }
        cores = { is = "number", least = 1, most = 8 }
    "#;

    fn values(disk: &str, format: &str, cores: &str) -> BTreeMap<String, String> {
        let all = [("disk", disk), ("format", format), ("cores", cores)];
        all.map(|(field, value)| (field.to_owned(), value.to_owned())).into()
    }

    #[test]
    fn values_stay_within_their_word() {
        let small = templates(SMALL).unwrap();
        let line = small.fill("small", &values("a-1.img", "raw", "4")).unwrap();
        let wanted = [
            "qemu",
            "-m",
            "{memory_mib}",
            "-drive",
            "file=/shared/a-1.img,format=raw",
            "-smp",
            "4",
            "{devices}",
        ];
        assert_eq!(line, wanted);
        for bad in
            ["a,readonly=on", "../a", "-a", ".a", "a b", "", "{cores}", "a;b", "$(id)", &"a".repeat(65)]
        {
            let error = small.fill("small", &values(bad, "raw", "4")).unwrap_err();
            assert!(
                matches!(&error, TemplateError::Value { field, .. } if field == "disk"),
                "{bad}: {error}"
            );
        }
        for (format, cores) in
            [("vmdk", "4"), ("raw", "9"), ("raw", "0"), ("raw", "4,sockets=9"), ("raw", "-1")]
        {
            let error = small.fill("small", &values("a", format, cores)).unwrap_err();
            assert!(matches!(error, TemplateError::Value { .. }), "{error}");
        }
        assert_eq!(small.fill("small", &values("a", "raw", "007")).unwrap()[6], "7");
    }

    #[test]
    fn each_field_is_given_and_no_other() {
        let small = templates(SMALL).unwrap();
        let mut given = values("a", "raw", "1");
        given.insert("extra".to_owned(), "x".to_owned());
        let error = small.fill("small", &given).unwrap_err().to_string();
        assert_eq!(error, "template small has no field \"extra\": expected one of cores, disk, format");
        given = values("a", "raw", "1");
        given.remove("format");
        let error = small.fill("small", &given).unwrap_err().to_string();
        assert!(error.contains("\"format\": expected one of raw, qcow2, found no value"), "{error}");
        let error = small.fill("large", &given).unwrap_err().to_string();
        assert_eq!(error, "expected the name of a template (small), found \"large\"");
    }

    #[test]
    fn templates_that_cannot_work_are_refused_at_the_start() {
        for (text, wanted) in [
            ("[t]\ncommand = []", "expected a command"),
            ("[t]\ncommand = [\"{p}\"]\n[t.fields]\np = { is = \"name\" }", "expected a program"),
            ("[t]\ncommand = [\"qemu\", \"{disc}\"]", "{disc} is no field: expected one of vcpus"),
            ("[t]\ncommand = [\"qemu\"]\n[t.fields]\nvcpus = { is = \"name\" }", "is none of vcpus"),
            (
                "[t]\ncommand = [\"qemu\"]\n[t.fields]\nn = { is = \"number\", least = 2, most = 1 }",
                "found 2 and 1",
            ),
        ] {
            let error = templates(text).unwrap_err().to_string();
            assert!(error.starts_with("[templates.t]: ") && error.contains(wanted), "{error}");
        }
        // Braces of JSON are no fields.
        templates("[t]\ncommand = [\"qemu\", '{\"driver\":\"file\",\"filename\":\"{vmdir}/a\"}']").unwrap();
    }
}
