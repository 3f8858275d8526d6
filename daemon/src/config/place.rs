//! Where in the file of settings a key is.

use std::fmt;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

/// A file and a line, as far as they are known; followed by a colon, for the begin of a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    path: Option<PathBuf>,
    /// From 1.
    line: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.path, self.line) {
            (None, _) => Ok(()),
            (Some(path), None) => write!(f, "{}: ", path.display()),
            (Some(path), Some(line)) => write!(f, "{}:{line}: ", path.display()),
        }
    }
}

impl Place {
    /// A key such as `fork.link-mbit` or `hook[2].on`, counted from 1, or what of it is there.
    pub(super) fn near(path: &Path, text: &str, key: &str) -> Self {
        Self { path: Some(path.to_owned()), line: find(text, key).map(|found| found.line) }
    }

    /// The same, if all of the key is there: otherwise the value is not from this file.
    pub(super) fn of(path: &Path, text: &str, key: &str) -> Self {
        match find(text, key) {
            Some(Found { line, whole: true }) => Self { path: Some(path.to_owned()), line: Some(line) },
            _ => Self::default(),
        }
    }
}

struct Found {
    /// Of the last part that is there.
    line: usize,
    /// Whether that is the last of all.
    whole: bool,
}

fn find(text: &str, key: &str) -> Option<Found> {
    let root = DeTable::parse(text).ok()?;
    let line = |at: usize| text.get(..at).map_or(1, |before| before.matches('\n').count() + 1);
    let (mut table, mut rest, mut found) = (root.get_ref(), key, None);
    loop {
        // Names of nodes have dots.
        let begins = |name: &str| {
            rest.strip_prefix(name).is_some_and(|after| after.is_empty() || after.starts_with(['.', '[']))
        };
        let entries = table.iter().filter(|(name, _)| begins(name.get_ref()));
        let Some((name, value)) = entries.max_by_key(|(name, _)| name.get_ref().len()) else { return found };
        rest = &rest[name.get_ref().len()..];
        let (mut at, mut value) = (name.span().start, value.get_ref());
        if let Some((number, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            let number: usize = number.parse().ok()?;
            let one = value.as_array().and_then(|all| all.get(number.checked_sub(1)?));
            let Some(one) = one else { return found };
            (at, value, rest) = (one.span().start, one.get_ref(), after);
        }
        found = Some(Found { line: line(at), whole: rest.is_empty() });
        match (rest.strip_prefix('.'), value) {
            (Some(next), DeValue::Table(below)) => (table, rest) = (below, next),
            _ => return found,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_a_key_is_found() {
        let text = "node = 'a'\n[fork]\nlink-mbit = 1\n\n[[hook]]\nname = 'x'\n[[hook]]\nname = 'y'\non = 'STOP'\n\
            do = { migrate = {\n to = 'b' } }\n[nodes]\n'b.c' = 'x'\nb = { address = 'y' }\n";
        for (key, line, whole) in [
            ("node", 1, true),
            ("fork", 2, true),
            ("fork.link-mbit", 3, true),
            ("fork.leaf", 2, false),
            ("hook[1]", 5, true),
            ("hook[2].on", 9, true),
            ("hook[2].do.migrate.to", 11, true),
            ("hook[2].every", 7, false),
            ("nodes.b.c", 13, true),
            ("nodes.b", 14, true),
            ("nodes.b.address", 14, true),
        ] {
            let found = find(text, key).unwrap();
            assert_eq!((found.line, found.whole), (line, whole), "{key}");
        }
        for key in ["nod", "hook[3].on", "hook[0].on", "hook[x]", "rdma"] {
            assert!(find(text, key).is_none(), "{key}");
        }
        let path = Path::new("/c.toml");
        assert_eq!(Place::of(path, text, "fork.link-mbit").to_string(), "/c.toml:3: ");
        assert_eq!(Place::of(path, text, "fork.leaf").to_string(), "");
        assert_eq!(Place::near(path, text, "rdma").to_string(), "/c.toml: ");
    }
}
