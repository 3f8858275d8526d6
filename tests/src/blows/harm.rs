//! What must never happen, whatever is struck.

use std::fmt;

/// Kinds of harm; each has a column in the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The guest found wrong memory; so many pages.
    Corrupt(u64),
    /// The guest ran twice, or went back to an earlier state.
    Doubled,
    /// The guest ended though its QEMU was not killed as its owner.
    Lost,
    /// Something did not end, and did not say what it waits for.
    Stuck,
    /// Something was left over.
    Left,
}

/// An error that counts as harm; any other error means that the soak itself could not go on.
#[derive(Debug)]
pub struct Harm {
    /// Its kind.
    pub kind: Kind,
    text: String,
}

impl Harm {
    /// Harm of this kind, as an error.
    pub fn of(kind: Kind, text: impl Into<String>) -> anyhow::Error {
        Self { kind, text: text.into() }.into()
    }
}

impl fmt::Display for Harm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Corrupt(_) => "corrupt",
            Kind::Doubled => "doubled",
            Kind::Lost => "lost",
            Kind::Stuck => "stuck",
            Kind::Left => "left over",
        };
        write!(f, "{kind}: {}", self.text)
    }
}

impl std::error::Error for Harm {}
