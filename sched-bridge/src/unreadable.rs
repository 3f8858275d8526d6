//! Files that people have written and that cannot be read: where, what is there, and what was expected.

use vmove_types::typo;

/// A mistake in a file.
#[derive(Debug)]
pub(crate) struct Unreadable {
    /// From 1; 0 if it is not known.
    pub line: usize,
    /// From 1; 0 if it is not known.
    pub column: usize,
    /// What is there.
    pub reason: String,
    /// What should be there: for a misspelt name those that there are and the nearest one, otherwise what the file should be.
    pub expected: String,
}

impl Unreadable {
    /// `expected`: what the file should be.
    pub fn toml(text: &str, error: &toml::de::Error, expected: &str) -> Self {
        let at = error.span().map(|span| span.start).and_then(|at| place(text, at));
        Self::new(at, error.message().trim(), expected)
    }

    /// `expected`: what the file should be.
    pub fn yaml(error: &serde_yaml_ng::Error, expected: &str) -> Self {
        let at = error.location().map(|at| (at.line(), at.column()));
        let mut reason = error.to_string();
        if let Some((line, column)) = at {
            // The place is told once.
            reason = reason.replace(&format!(" at line {line} column {column}"), "");
        }
        Self::new(at, &reason, expected)
    }

    pub fn new(at: Option<(usize, usize)>, reason: &str, expected: &str) -> Self {
        let (line, column) = at.unwrap_or_default();
        let (reason, expected) =
            typo::parted(reason).unwrap_or_else(|| (reason.to_owned(), expected.to_owned()));
        Self { line, column, reason, expected }
    }

    /// Line and column, as far as they are known.
    pub fn place(&self) -> String {
        match (self.line, self.column) {
            (0, _) => "file".to_owned(),
            (line, 0) => format!("line {line}"),
            (line, column) => format!("line {line} column {column}"),
        }
    }
}

/// Line and column of a byte of a text, from 1.
pub(crate) fn place(text: &str, at: usize) -> Option<(usize, usize)> {
    let before = text.get(..at)?;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    Some((before.matches('\n').count() + 1, column))
}
