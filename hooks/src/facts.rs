//! What a program is told: as JSON on its standard input, and in its environment.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::node::Vm;
use crate::{Event, Hooks};

/// Longer values are on the standard input alone.
const LONGEST_VALUE: usize = 4096;
/// The report of a migration or fork is on the standard input alone.
const REPORT: &str = "report";

/// A run, as its program sees it.
#[derive(Debug, Clone)]
pub(crate) struct Facts<'a> {
    pub run: &'a str,
    pub hook: &'a str,
    pub event: &'a Event,
    pub vm: Option<&'a Vm>,
    pub cause: &'a [String],
    pub attempt: u32,
    /// An earlier daemon had begun the run.
    pub again: bool,
    /// It is a trial: the event is made up.
    pub test: bool,
    /// Seconds since 1970.
    pub at: u64,
}

impl Facts<'_> {
    pub(crate) fn json(&self, hooks: &Hooks) -> Value {
        json!({
            "run": self.run,
            "hook": self.hook,
            "event": self.event.name.as_str(),
            "node": hooks.settings.node,
            "vm": self.vm.map(|vm| &vm.name),
            "labels": self.vm.map(|vm| &vm.labels),
            "data": self.event.data,
            "cause": self.cause,
            "attempt": self.attempt,
            "again": self.again,
            "test": self.test,
            "time": self.at,
        })
    }

    /// The data first: none of it can take the place of what we say.
    pub(crate) fn environment(&self, hooks: &Hooks) -> Vec<(String, String)> {
        let mut all = Vec::new();
        flatten("VMOVE", &self.event.data, &mut all);
        let flag = |yes: bool| if yes { "1" } else { "0" }.to_owned();
        let control: &Path = &hooks.settings.control;
        let ours = [
            ("VMOVE_RUN", self.run.to_owned()),
            ("VMOVE_HOOK", self.hook.to_owned()),
            ("VMOVE_EVENT", self.event.name.as_str().to_owned()),
            ("VMOVE_NODE", hooks.settings.node.clone()),
            ("VMOVE_VM", self.vm.map(|vm| vm.name.clone()).unwrap_or_default()),
            ("VMOVE_ATTEMPT", self.attempt.to_string()),
            ("VMOVE_AGAIN", flag(self.again)),
            ("VMOVE_TEST", flag(self.test)),
            ("VMOVE_CONTROL", control.display().to_string()),
        ];
        all.extend(ours.map(|(key, value)| (key.to_owned(), value)));
        all
    }
}

/// `{"flags": {"action-required": true}}` is `VMOVE_FLAGS_ACTION_REQUIRED=true`. Lists of texts are joined by spaces.
fn flatten(before: &str, data: &Map<String, Value>, into: &mut Vec<(String, String)>) {
    for (key, value) in data {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
        let name = format!("{before}_{}", key.chars().map(plain).collect::<String>());
        let text = match value {
            // Too much to be looked for there.
            Value::Object(_) if key == REPORT => continue,
            Value::Object(below) => {
                flatten(&name, below, into);
                continue;
            }
            Value::String(text) => text.clone(),
            Value::Array(all) => {
                let words: Option<Vec<&str>> = all.iter().map(Value::as_str).collect();
                words.map_or_else(|| value.to_string(), |words| words.join(" "))
            }
            Value::Null => String::new(),
            Value::Bool(_) | Value::Number(_) => value.to_string(),
        };
        if text.len() <= LONGEST_VALUE && !text.contains('\0') {
            into.push((name, text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_are_variables_by_their_path() {
        let data = json!({"recipient": "guest", "flags": {"action-required": true}, "macs": ["a", "b"], "n": 3,
                          "bad": "x\0y", "long": "x".repeat(5000), "mixed": [1, "a"]});
        let mut all = Vec::new();
        flatten("VMOVE", data.as_object().unwrap(), &mut all);
        all.sort();
        let all: Vec<_> = all.iter().map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(
            all,
            [
                "VMOVE_FLAGS_ACTION_REQUIRED=true",
                "VMOVE_MACS=a b",
                "VMOVE_MIXED=[1,\"a\"]",
                "VMOVE_N=3",
                "VMOVE_RECIPIENT=guest"
            ]
        );
    }
}
