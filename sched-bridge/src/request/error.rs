//! Errors in requests.

use crate::place::PlaceError;

/// Why a request is refused. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A word that cannot be read.
    #[error("{place}: {reason}; expected {expected}")]
    Syntax {
        /// Line and column, the column of a one-line request, or the name of a key.
        place: String,
        /// What is there.
        reason: String,
        /// What should be there.
        expected: String,
    },
    /// Two conditions that contradict each other.
    #[error("{place}: {reason}; no node meets both, leave one out")]
    Contradiction {
        /// Where.
        place: String,
        /// What contradicts what.
        reason: String,
    },
    /// A cluster that contradicts itself as a whole.
    #[error(transparent)]
    Place(#[from] PlaceError),
}

impl RequestError {
    pub(crate) fn syntax(
        place: impl Into<String>,
        reason: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::Syntax { place: place.into(), reason: reason.into(), expected: expected.into() }
    }

    pub(crate) fn contradiction(place: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Contradiction { place: place.into(), reason: reason.into() }
    }

    /// The same error in a text that is part of a file: `outer` says where.
    pub(crate) fn within(self, outer: &str) -> Self {
        match self {
            Self::Syntax { place, reason, expected } => {
                Self::Syntax { place: format!("{outer}, {place}"), reason, expected }
            }
            Self::Contradiction { place, reason } => {
                Self::Contradiction { place: format!("{outer}, {place}"), reason }
            }
            Self::Place(error) => Self::Place(error),
        }
    }
}
