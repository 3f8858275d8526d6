//! Files that earlier releases wrote, kept in a `tests/formats` folder of the crate that reads them.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

/// What to do when such a file cannot be read any more.
pub const WHAT_TO_DO: &str = "Hosts that are upgraded have such files, and guests may depend on them. Give the record a reader for it: \
    `serde(default)` for a new field, `serde(alias)` for another name, or the old record beside the new one and a `From`. \
    Never edit the file: put those that a new release writes beside it, in a folder of that release";

/// The files of a release, in the crate whose `CARGO_MANIFEST_DIR` is given, by name.
///
/// # Panics
/// When there are none.
#[must_use]
pub fn of_release(manifest_dir: &str, release: &str) -> Vec<PathBuf> {
    let folder = Path::new(manifest_dir).join("tests/formats").join(release);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<_> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    assert!(!files.is_empty(), "there are no files in {}", folder.display());
    files
}

/// Checks that a record, as it was read from the last line of `path` (or from all of it), still knows all that is written there.
///
/// # Panics
/// When it does not, with [`WHAT_TO_DO`].
pub fn check(path: &Path, record: &impl Serialize) {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let lines = path.extension().is_some_and(|e| e == "jsonl");
    let last = if lines { text.lines().last().unwrap_or_default() } else { &text };
    let was: Value = serde_json::from_str(last).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let is = serde_json::to_value(record).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    if let Some(lost) = lost(&was, &is, "") {
        panic!("{}: {lost} is not known any more. {WHAT_TO_DO}", path.display());
    }
}

/// The first value that is in `was` and not in `is`.
fn lost(was: &Value, is: &Value, at: &str) -> Option<String> {
    match (was, is) {
        (Value::Object(was), Value::Object(is)) => was.iter().find_map(|(key, value)| {
            lost(value, is.get(key).unwrap_or(&Value::Null), &format!("{at}/{key}"))
        }),
        (Value::Array(was), Value::Array(is)) if was.len() == is.len() => {
            let mut both = was.iter().zip(is).enumerate();
            both.find_map(|(number, (was, is))| lost(was, is, &format!("{at}/{number}")))
        }
        // A number or text that newer records keep together with something else.
        (was, Value::Object(is)) if !was.is_object() && is.values().any(|value| value == was) => None,
        _ => (was != is).then(|| format!("{at} = {was}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_value_that_is_not_known_any_more_is_noticed() {
        let was = json!({"a": 1, "b": [{"c": 2}]});
        let lost = |is: &Value| lost(&was, is, "");
        assert_eq!(lost(&json!({"b": [{"c": 2, "d": 0}], "a": 1, "new": 3})), None);
        assert_eq!(lost(&json!({"a": {"value": 1, "unit": "ms"}, "b": [{"c": 2}]})), None);
        assert_eq!(lost(&json!({"a": 1, "b": [{}]})).as_deref(), Some("/b/0/c = 2"));
        assert_eq!(lost(&json!({"a": 2, "b": [{"c": 2}]})).as_deref(), Some("/a = 1"));
        assert_eq!(lost(&json!({"a": 1, "b": []})).as_deref(), Some("/b = [{\"c\":2}]"));
    }
}
