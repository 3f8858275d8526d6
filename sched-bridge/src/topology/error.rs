//! Errors in descriptions of networks.

use std::fmt;

/// Where something is described: the line of a file, if known.
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

/// Why a description of a network is refused. Nothing was changed.
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
    /// A switch that is described twice.
    #[error("{origin}switch {switch} is described a second time; expected one description for each switch")]
    DuplicateSwitch {
        /// Where.
        origin: Origin,
        /// Which.
        switch: String,
    },
    /// A node below two switches.
    #[error(
        "{origin}node {node} is below switch {second}, but also below {first}; expected each node below one switch"
    )]
    TwoLeaves {
        /// Where the second switch is described.
        origin: Origin,
        /// The node.
        node: String,
        /// The first switch.
        first: String,
        /// The second switch.
        second: String,
    },
    /// A switch below two switches.
    #[error(
        "{origin}switch {switch} is below switch {second}, but also below {first}; expected each switch below at most one"
    )]
    TwoParents {
        /// Where the second switch is described.
        origin: Origin,
        /// The switch.
        switch: String,
        /// The first above it.
        first: String,
        /// The second above it.
        second: String,
    },
    /// A switch below another that is not described itself.
    #[error(
        "{origin}switch {parent} names switch {child}, which is not described; expected a SwitchName={child} as well"
    )]
    NoSuchSwitch {
        /// Where.
        origin: Origin,
        /// The switch that names it.
        parent: String,
        /// The missing one.
        child: String,
    },
    /// No switch is described.
    #[error("no switch is described; expected one at least, with the nodes below it")]
    NoSwitch,
    /// Switches that are below themselves.
    #[error("{origin}switches are below each other in a cycle: {path}; expected a tree")]
    Cycle {
        /// Where one of them is described.
        origin: Origin,
        /// The cycle: `a > b > a`.
        path: String,
    },
}

impl TopologyError {
    /// A line or an element that cannot be read.
    pub(crate) fn syntax(line: usize, reason: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Syntax { origin: Origin::line(line), reason: reason.into(), expected: expected.into() }
    }

    /// Its line, from 1; 0 if unknown.
    #[must_use]
    pub fn line(&self) -> usize {
        match self {
            Self::Syntax { origin, .. }
            | Self::DuplicateSwitch { origin, .. }
            | Self::TwoLeaves { origin, .. }
            | Self::TwoParents { origin, .. }
            | Self::NoSuchSwitch { origin, .. }
            | Self::Cycle { origin, .. } => origin.line,
            Self::NoSwitch => 0,
        }
    }
}
