//! The value language of QEMU's options: `first,key=value,flag,key=a,,b` (a comma inside a value is doubled), or JSON.

use serde_json::Value;

/// A parsed option value. Unchanged parts keep their text, so that what is not edited is passed on as it was written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Options {
    /// `a,b=c`
    Pairs(Pairs),
    /// `{"a": "b"}`
    Json(serde_json::Map<String, Value>),
}

/// Comma-separated pairs.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct Pairs(Vec<Pair>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Pair {
    /// Without `=`: the implied first key, or a flag.
    key: Option<String>,
    /// Unescaped.
    value: String,
}

impl Pairs {
    pub(crate) fn parse(text: &str) -> Self {
        let mut pairs = Vec::new();
        for part in split_commas(text) {
            // Between two others, nothing would be read as a comma when it is written again.
            if part.is_empty() && !pairs.is_empty() {
                continue;
            }
            let pair = match part.split_once('=') {
                Some((key, value)) => Pair { key: Some(key.to_owned()), value: value.to_owned() },
                None => Pair { key: None, value: part },
            };
            pairs.push(pair);
        }
        Self(pairs)
    }

    /// The value of `key`; `implied` says that the first part may stand without its key. A bare `key` means `on`, a bare
    /// `nokey` means `off`. The last one counts, as in QEMU.
    pub(crate) fn get(&self, key: &str, implied: bool) -> Option<&str> {
        self.0.iter().enumerate().rev().find_map(|(at, pair)| match &pair.key {
            Some(name) if name == key => Some(pair.value.as_str()),
            Some(_) => None,
            None if at == 0 && implied => Some(pair.value.as_str()),
            None if pair.value == key => Some("on"),
            None if pair.value.strip_prefix("no") == Some(key) => Some("off"),
            None => None,
        })
    }

    /// The first part, if it stands without a key.
    pub(crate) fn first(&self) -> Option<&str> {
        self.0.first().filter(|pair| pair.key.is_none()).map(|pair| pair.value.as_str())
    }

    /// Sets `key`, in place where it is, else at the end.
    pub(crate) fn set(&mut self, key: &str, value: &str) {
        self.remove_flag(key);
        let new = Pair { key: Some(key.to_owned()), value: value.to_owned() };
        match self.0.iter().position(|pair| pair.key.as_deref() == Some(key)) {
            Some(at) => {
                self.0[at] = new;
                let mut index = 0;
                self.0.retain(|pair| {
                    index += 1;
                    index - 1 <= at || pair.key.as_deref() != Some(key)
                });
            }
            None => self.0.push(new),
        }
    }

    /// Replaces the first part that stands without a key.
    pub(crate) fn set_first(&mut self, value: &str) {
        let new = Pair { key: None, value: value.to_owned() };
        match self.0.first_mut().filter(|pair| pair.key.is_none()) {
            Some(first) => *first = new,
            None => self.0.insert(0, new),
        }
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.remove_flag(key);
        self.0.retain(|pair| pair.key.as_deref() != Some(key));
    }

    fn remove_flag(&mut self, key: &str) {
        let mut first = true;
        self.0.retain(|pair| {
            let keep = first
                || pair.key.is_some()
                || (pair.value != key && pair.value.strip_prefix("no") != Some(key));
            first = false;
            keep
        });
    }
}

impl std::fmt::Display for Pairs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (at, pair) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str(",")?;
            }
            if let Some(key) = &pair.key {
                write!(f, "{}=", escape(key))?;
            }
            f.write_str(&escape(&pair.value))?;
        }
        Ok(())
    }
}

impl Options {
    /// Parses a value; `None` if it looks like JSON and is not.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        // `{name}` and `{vmdir}` are placeholders, not JSON.
        let json = text.strip_prefix('{').is_some_and(|rest| rest.trim_start().starts_with(['"', '}']));
        if !json {
            return Some(Self::Pairs(Pairs::parse(text)));
        }
        serde_json::from_str(text).ok().map(Self::Json)
    }

    /// Everything that is said, in order, also what a later word overrides: keys, with dots between those of objects inside each other, and
    /// values. The first part of pairs may be without its key: that is empty then.
    pub(crate) fn all(&self) -> Vec<(String, String)> {
        let mut found = Vec::new();
        match self {
            Self::Pairs(Pairs(pairs)) => {
                for (at, pair) in pairs.iter().enumerate() {
                    match &pair.key {
                        Some(key) => found.push((key.clone(), pair.value.clone())),
                        None if at == 0 => found.push((String::new(), pair.value.clone())),
                        None => {
                            found.push((pair.value.clone(), "on".to_owned()));
                            let off =
                                pair.value.strip_prefix("no").map(|key| (key.to_owned(), "off".to_owned()));
                            found.extend(off);
                        }
                    }
                }
            }
            Self::Json(map) => {
                map.iter().for_each(|(key, value)| flatten(key, value, &mut found));
            }
        }
        found
    }

    /// The value of a top-level key as text.
    pub(crate) fn get(&self, key: &str, implied: bool) -> Option<String> {
        match self {
            Self::Pairs(pairs) => pairs.get(key, implied).map(str::to_owned),
            Self::Json(map) => map.get(key).map(|value| match value {
                Value::String(text) => text.clone(),
                Value::Bool(true) => "on".to_owned(),
                Value::Bool(false) => "off".to_owned(),
                other => other.to_string(),
            }),
        }
    }

    /// Whether a switch is on; `None` if it is not given.
    pub(crate) fn flag(&self, key: &str) -> Option<bool> {
        self.get(key, false).map(|value| matches!(value.as_str(), "on" | "yes" | "true" | "y"))
    }

    pub(crate) fn set_text(&mut self, key: &str, value: &str) {
        match self {
            Self::Pairs(pairs) => pairs.set(key, value),
            Self::Json(map) => {
                map.insert(key.to_owned(), value.into());
            }
        }
    }

    pub(crate) fn set_flag(&mut self, key: &str, on: bool) {
        match self {
            Self::Pairs(pairs) => pairs.set(key, if on { "on" } else { "off" }),
            Self::Json(map) => {
                map.insert(key.to_owned(), on.into());
            }
        }
    }

    /// Sets the type, which pairs may give without its key.
    pub(crate) fn set_kind(&mut self, key: &str, value: &str) {
        match self {
            Self::Pairs(pairs) if pairs.first().is_some() => pairs.set_first(value),
            other => other.set_text(key, value),
        }
    }

    pub(crate) fn remove(&mut self, key: &str) {
        match self {
            Self::Pairs(pairs) => pairs.remove(key),
            Self::Json(map) => {
                map.remove(key);
            }
        }
    }
}

impl std::fmt::Display for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pairs(pairs) => pairs.fmt(f),
            Self::Json(map) => f.write_str(&serde_json::to_string(map).map_err(|_| std::fmt::Error)?),
        }
    }
}

/// Adds what a JSON value holds under `key`.
fn flatten(key: &str, value: &Value, found: &mut Vec<(String, String)>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                flatten(&format!("{key}.{name}"), value, found);
            }
        }
        Value::Array(all) => {
            for (at, value) in all.iter().enumerate() {
                flatten(&format!("{key}.{at}"), value, found);
            }
        }
        Value::String(text) => found.push((key.to_owned(), text.clone())),
        Value::Bool(on) => found.push((key.to_owned(), if *on { "on" } else { "off" }.to_owned())),
        other => found.push((key.to_owned(), other.to_string())),
    }
}

/// Doubles commas.
pub(crate) fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

/// Splits at single commas and makes double ones single.
fn split_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let doubled = c == ',' && chars.peek() == Some(&',');
        if c == ',' && !doubled {
            parts.push(String::new());
            continue;
        }
        if doubled {
            chars.next();
        }
        if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    parts
}
