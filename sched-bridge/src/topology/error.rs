//! What can be wrong with a description of a network.

use std::fmt;

/// Where something was said: the line of a file, or nowhere in particular.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Origin {
    /// Line from 1; 0 if unknown.
    pub line: usize,
}

impl Origin {
    /// A line, counted from 1.
    #[must_use]
    pub fn line(line: usize) -> Self {
        Self { line }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 { Ok(()) } else { write!(f, "line {}: ", self.line) }
    }
}

/// Why a description of a network was not taken. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A line or an element that cannot be read.
    #[error("{origin}{reason}; expected {expected}")]
    Syntax {
        /// Where.
        origin: Origin,
        /// What is there.
        reason: String,
        /// What should be there.
        expected: String,
    },
    /// A switch that is there twice.
    #[error("{origin}switch {switch} is described a second time; expected one description of each switch")]
    DuplicateSwitch {
        /// Where.
        origin: Origin,
        /// Which.
        switch: String,
    },
    /// A node under two switches.
    #[error(
        "{origin}node {node} hangs on {second}, but also on {first}; expected every node under one leaf switch"
    )]
    TwoLeaves {
        /// Where the second was said.
        origin: Origin,
        /// The node.
        node: String,
        /// The first switch.
        first: String,
        /// The second switch.
        second: String,
    },
    /// A switch under two switches.
    #[error(
        "{origin}switch {switch} hangs under {second}, but also under {first}; expected one switch above each"
    )]
    TwoParents {
        /// Where the second was said.
        origin: Origin,
        /// The switch.
        switch: String,
        /// The first above it.
        first: String,
        /// The second above it.
        second: String,
    },
    /// A child that nobody describes.
    #[error(
        "{origin}switch {parent} names switch {child}, which is described nowhere; expected a SwitchName={child} as well"
    )]
    NoSuchSwitch {
        /// Where.
        origin: Origin,
        /// The switch that names it.
        parent: String,
        /// The missing one.
        child: String,
    },
    /// A switch that is below itself.
    #[error("{origin}switches hang below each other in a circle: {circle}; expected a tree")]
    Cycle {
        /// Where one of them is described.
        origin: Origin,
        /// The circle: `a > b > a`.
        circle: String,
    },
}

impl TopologyError {
    /// A line or an element that cannot be read.
    pub(crate) fn syntax(line: usize, reason: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Syntax { origin: Origin::line(line), reason: reason.into(), expected: expected.into() }
    }

    /// The line where it is, from 1; 0 if it has none.
    #[must_use]
    pub fn line(&self) -> usize {
        match self {
            Self::Syntax { origin, .. }
            | Self::DuplicateSwitch { origin, .. }
            | Self::TwoLeaves { origin, .. }
            | Self::TwoParents { origin, .. }
            | Self::NoSuchSwitch { origin, .. }
            | Self::Cycle { origin, .. } => origin.line,
        }
    }
}
